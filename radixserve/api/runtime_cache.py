"""`RuntimeCache`: the methods of `Runtime` that look at the cache, empty, save and load it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

from radixserve.advice.messages import GetAdvice, GetWorth
from radixserve.api.arguments import check_path, check_type
from radixserve.api.client import RuntimeMethods
from radixserve.api.settings import ChatSettings, chat_options
from radixserve.api.tree_view import flat_tree
from radixserve.cache import Lookup, SnapshotView
from radixserve.checks import check_int, check_text
from radixserve.engine import messages
from radixserve.reports import (
    CacheAdvice,
    CacheWorth,
    EngineStats,
    EngineStatus,
    EvictionCandidate,
    FlatTreeDump,
    TreeDump,
)
from radixserve.store.messages import FindStored, ListStored, LoadPrefix, OpenStore, SavePrefix
from radixserve.text.prompts import Prompt, check_prompts
from radixserve.token_marks import num_unmarked

_IDLE_POLL_S = 0.02  # until an engine that is busy is asked again


class RuntimeCache(RuntimeMethods):
    """The cache: what it has of a prompt, its figures and pictures, and its K/V in folders."""

    def lookup(
        self,
        prompt: Prompt,
        namespace: str = "",
        *,
        adapter: str = "",
        compare_namespaces: bool = True,
        **chat: Unpack[ChatSettings],
    ) -> Lookup:
        """Returns how much of `prompt` is cached now for requests with `adapter`, and why not more.
        Changes nothing.

        With `compare_namespaces` False the answer does not depend on other tenants and salts.
        """
        self._client.core.check_alive()
        reader = self._client.reader
        options = reader.at_its_start(prompt, chat_options(chat), is_noted=False)
        ids = reader.read(prompt, options=options)
        name = self._client.namespace(namespace, adapter)
        answer = self._client.lookup(ids, name, compare_namespaces=compare_namespaces)
        if answer.reason == "diverged" and reader.is_in_date(prompt, answer.position, options):
            return answer._replace(reason="date")
        return answer

    def status(self) -> EngineStatus:
        """Returns the engine's load and statistics. Never waits for the engine."""
        return self._client.core.status()

    def cache_stats(self) -> EngineStats:
        """Returns counters and gauges of cache and scheduler, and the seconds spent by part of a
        step, see `EngineStats`."""
        return self._client.core.call(messages.GetStats())

    def advice(self) -> CacheAdvice | None:
        """Returns what the traffic so far says about the cache: the hit rate by size, the size that
        is enough, why tokens were computed; see docs/advice.md. None with `advice=False` and with
        cache="off"."""
        return self._client.core.call(GetAdvice())

    def cache_worth(self, tenant: str | None = None) -> CacheWorth | None:
        """Returns what caching has saved since the start, in tokens and in seconds by the measured
        cost of a computed token, in sum, by tenant and session; of one tenant if it is given. None
        where `advice` is None."""
        if tenant is not None:
            check_text("tenant", tenant)
        return self._client.core.call(GetWorth(tenant))

    @overload
    def cache_tree(
        self, max_nodes: int = ..., namespace: str | None = ..., *, flat: Literal[False] = False
    ) -> TreeDump: ...

    @overload
    def cache_tree(
        self, max_nodes: int = ..., namespace: str | None = ..., *, flat: Literal[True]
    ) -> FlatTreeDump: ...

    @overload
    def cache_tree(
        self, max_nodes: int = ..., namespace: str | None = ..., *, flat: bool
    ) -> TreeDump | FlatTreeDump: ...

    def cache_tree(
        self, max_nodes: int = 10_000, namespace: str | None = None, *, flat: bool = False
    ) -> TreeDump | FlatTreeDump:
        """Returns the prefix tree as nested dicts, see `PrefixCache.dump`; with cache="hash" the
        blocks. "sequences" has the page tables of running requests, with "request_id". `flat`:
        returns one list of nodes, see `flat_tree`; needed to print a deep tree or write it as
        JSON."""
        count = check_int("max_nodes", max_nodes, 0)
        if namespace is not None:
            check_text("namespace", namespace)
        dump = self._client.core.call(messages.DumpTree(count, namespace))
        return flat_tree(dump) if flat else dump

    def eviction_preview(self, n: int = 10) -> list[EvictionCandidate]:
        """Returns the next evictions and their reasons, see `PrefixCache.eviction_preview`."""
        return self._client.core.call(messages.PreviewEviction(check_int("n", n, 0)))

    def cache_snapshot(self, view: SnapshotView | None = None) -> dict[str, Any]:
        """Returns a bounded snapshot of the cache and its requests, cheap for a tree of any size.

        See `PrefixCache.snapshot` and `RequestSnapshots.take`. "counters" are those of all requests
        and pages; "at" is its time on the monotonic clock; "engine_s" the processor time that the
        engine's thread took for it.
        """
        given = SnapshotView() if view is None else check_type("view", view, SnapshotView)
        return self._client.core.call(messages.TakeSnapshot(given))

    def flush_cache(self, namespace: str | None = None) -> None:
        """Drop the cached prefixes of one namespace and those below it, such as a tenant's, with
        its salts and adapters; of all if None. Running requests continue."""
        if namespace is not None:
            check_text("namespace", namespace)
        self._client.core.call(messages.ResetCache(namespace))

    def stored_len(self, prompt: Prompt, *, namespace: str = "") -> int:
        """Returns how many leading tokens of a prompt are in the `kv_store`, cached or not; 0
        without one. Raises InvalidRequest as `lookup` does."""
        tokens = self._client.reader.read(prompt)
        return self._client.core.call(FindStored(tokens, check_text("namespace", namespace)))

    def save_cache(
        self,
        folder: str | os.PathLike[str],
        *,
        namespace: str | None = None,
        prompts: Sequence[Prompt] | None = None,
    ) -> int:
        """Write cached K/V into a folder, for `load_cache` or for another process with that folder
        as `kv_store`. K/V that the folder has already is not written again.

        prompts    write only the cached parts of these prompts, in `namespace` or ""; None: write
                   all cached prefixes
        namespace  write only this namespace and those below it; None: all

        Returns the tokens written. Other requests continue between runs of up to 512 tokens. Raises
        InvalidRequest if K/V cannot be stored, see `EngineConfig.kv_store`; OSError.
        """
        name = check_path("folder", folder)
        if namespace is not None:
            check_text("namespace", namespace)
        if prompts is None:
            prefixes = self._client.core.call(messages.ListPrefixes(namespace))
        else:
            read = self._client.reader.read
            prefixes = [(namespace or "", read(prompt)) for prompt in check_prompts(prompts)]
        prefixes.reverse()  # the last used is written last
        self._client.core.call(OpenStore(name))
        num_written = 0
        for namespace, keyed in prefixes:
            tokens = keyed[: num_unmarked(keyed)]  # marks of adapters are this process's
            self._client.core.call(FindStored(tokens, namespace, name))
            while count := self._client.core.call(SavePrefix(name, namespace, tokens)):
                num_written += count
        return num_written

    def load_cache(self, folder: str | os.PathLike[str], *, while_idle: bool = False) -> int:
        """Fill free pages with the K/V that a folder has for this model, the last used first, until
        no page is free. Other requests continue between runs of up to 512 tokens.

        while_idle  wait before each run until no request is open

        Returns the tokens loaded. Damaged files are left out. Raises what `save_cache` raises.
        """
        name, num_loaded = check_path("folder", folder), 0
        count: int | None = 0
        loads: list[LoadPrefix] = []
        self._client.core.call(OpenStore(name))
        for namespace, tokens in self._client.core.call(ListStored(name)):
            loads.append(LoadPrefix(name, namespace, tokens))
            while count := self._load_run(loads[-1], while_idle=while_idle):
                num_loaded += count
            if count is None:
                break
        for load in reversed(loads):  # so that what was used last is evicted last
            self._load_run(load, while_idle=while_idle)
        return num_loaded

    def _load_run(self, load: LoadPrefix, *, while_idle: bool) -> int | None:
        while while_idle and (status := self.status()).is_alive and not status.is_idle:
            time.sleep(_IDLE_POLL_S)
        return self._client.core.call(load)

    def check(self) -> None:
        """Audit the cache, the scheduler and the kv_store. Raises AssertionError, which names the
        first broken invariant."""
        self._client.core.call(messages.CheckCache())
