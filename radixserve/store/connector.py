"""`KVConnector`: the K/V store as an extension of the engine.

The engine's thread decides what is loaded, fills pages and copies K/V out of them. It reads and
writes no store; three threads do:

    finder    reads heads of files: which prefix of a prompt is stored
    reader    reads runs
    writer    writes runs, notes uses, drops what is forgotten

Each call has a deadline (`StoreLimits`). A request that waits for a late call continues without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, RadixCache
from radixserve.cache.lookup import Lookup, StoredLookup
from radixserve.config import EngineConfig, KVStoreWrite, parse_bytes
from radixserve.engine.extension import EngineExtension
from radixserve.engine.messages import EngineMessage, LookUpPrompt
from radixserve.errors import InvalidRequest
from radixserve.output import Finish
from radixserve.request import Request
from radixserve.store.buffers import BufferPool
from radixserve.store.counts import StoreCounts
from radixserve.store.daemon_executor import within
from radixserve.store.fingerprint import model_fingerprint
from radixserve.store.folder_store import FolderStore
from radixserve.store.host_store import HostStore, TieredStore
from radixserve.store.limits import LIMITS, StoreLimits
from radixserve.store.load_cost import LoadCostModel
from radixserve.store.loader import KVLoader
from radixserve.store.messages import FindStored
from radixserve.store.redis_store import SCHEMES, RedisStore
from radixserve.store.run_store import RunStore
from radixserve.store.saver import KVSaver
from radixserve.store.stored_prefixes import StoredPrefix, StoredPrefixes
from radixserve.store.write_policy import WritePolicy

if TYPE_CHECKING:
    from radixserve.engine.engine import Engine
    from radixserve.runner.kv_pool import KVPool

_CACHE_FOLDER = Path("~/.cache/radixserve")  # of fingerprints, where the store is not a folder


class KVConnector(EngineExtension):
    """A `KVLoader` and a `KVSaver` over one store. The engine's thread makes all calls."""

    name = "kv_store"

    def __init__(
        self,
        prefixes: StoredPrefixes,
        pool: KVPool,
        cache: RadixCache,
        *,
        policy: KVStoreWrite = "finish",
        min_uses: int = 2,
        step_tokens: int = 0,
        token_cost: Callable[[], tuple[float, int]] = lambda: (0.0, 0),
        step_seconds: Callable[[], float] = lambda: 0.0,
        has_room: Callable[[int, float], bool] = lambda _, __: True,
        limits: StoreLimits = LIMITS,
        is_main: bool = True,
        fingerprint: Callable[[], str] | None = None,
    ) -> None:
        """
        fingerprint            of the runner's present weights; None where they do not change
        policy, min_uses       see `WritePolicy`
        step_tokens            see `KVSaver`
        token_cost             see `LoadCostModel`
        step_seconds, has_room see `KVLoader`
        is_main                it is the engine's kv_store: it holds requests and saves ended ones.
                               Else it does what `save_cache` and `load_cache` ask for
        """
        self.prefixes = prefixes
        self.is_main = is_main
        self.is_closed = False
        self.counts = StoreCounts()
        self.cost = LoadCostModel(prefixes.layout.token_bytes, token_cost)
        self.policy = WritePolicy(
            policy,
            cache,
            self.cost,
            self.counts,
            min_uses=min_uses,
            min_tokens=limits.min_tokens,
            is_on_device=not pool.is_in_host_memory,
            step_seconds=step_seconds,
        )
        self._limits = limits
        self._fingerprint = fingerprint
        self._buffers = BufferPool(prefixes.max_file_bytes)
        shared = prefixes, pool, cache, self._buffers
        self.saver = KVSaver(*shared, self.policy, self.counts, limits, step_tokens=step_tokens)
        self.loader = KVLoader(
            *shared,
            self.cost,
            self.counts,
            limits,
            step_seconds=step_seconds,
            has_room=has_room,
            touch=self.saver.touch,
        )

    # -- of the engine -------------------------------------------------------------------------

    def hold(self, request: Request, queued_at: float, release: Callable[[int], None]) -> bool:
        if not self.is_main:
            return False
        self.policy.note_request()
        self.saver.note_busy()
        if request.beams is not None or self.saver.is_forgetting:
            return False
        return self.loader.queue(request, queued_at, lambda count: release(count or 0))

    def let_go(self, request_id: str) -> None:
        self.loader.cancel(request_id)

    def before_step(self, *, may_wait: bool) -> None:
        if len(self.loader):
            self.loader.step(may_wait=may_wait)

    def after_step(self, *, is_idle: bool) -> None:
        self.saver.copy_unsaved(is_idle=is_idle)

    def on_release(self, sequence: CacheSequence, num_prompt: int, num_reused: int) -> None:
        if self.is_main:
            self.saver.save(sequence, num_prompt, num_reused)

    def on_finish(
        self,
        request: Request,
        output_ids: Sequence[int],  # noqa: ARG002
        finish: Finish,  # noqa: ARG002
        arrived_at: float,  # noqa: ARG002
    ) -> None:
        self.loader.tiers.pop(request.request_id, None)

    def tier_of(self, request_id: str) -> str | None:
        """Where an open request's K/V was loaded from: "host", "disk", "remote", or several, such
        as "disk+host"; None: nowhere."""
        return self.loader.tiers.get(request_id)

    def on_reset(self, namespace: str | None) -> None:
        if self.is_main:
            self.forget(namespace)

    def on_epoch(self, weights: str) -> None:  # noqa: ARG002
        """Find and store what the new weights compute alone. What waits to be copied is dropped."""
        self.loader.cancel()
        self.saver.end_writes()
        if self._fingerprint is not None:
            self.prefixes.set_model(self._fingerprint())

    def forget(self, namespace: str | None) -> None:
        """Drop the stored prefixes of a namespace, or all of this model if None. Returns at
        once."""
        self.loader.forget(namespace)
        self.saver.forget(namespace)

    @property
    def has_work(self) -> bool:
        return len(self.loader) > 0 or self.saver.has_work

    @property
    def idle_timeout(self) -> float | None:
        return self.saver.idle_timeout

    def answer(self, message: EngineMessage[Any], answer: Any) -> Any:
        if not self.is_main:
            return answer
        match message:
            case LookUpPrompt(token_ids, namespace):
                return self.extend_lookup(answer, token_ids, namespace)
            case FindStored(token_ids, namespace, ""):
                return self.stored_len(token_ids, namespace)
        return answer

    def stats(self) -> dict[str, Any] | None:
        """Returns the counters of `StoreCounts` and what the store's parts say of themselves; None
        for a store that is not the engine's."""
        if not self.is_main:
            return None
        loader, saver, store = self.loader, self.saver, self.prefixes.store
        return {
            **self.counts.as_dict(),
            "refused_files": self.prefixes.num_refused,
            "loading_requests": len(loader),
            "unsaved_requests": len(saver),
            "read_bytes_per_s": round(self.cost.bandwidth),
            "write_ns_per_kb": round(1e12 * (self.policy.write_s + self.policy.copy_s)),
            "load_latency_us": round(1e6 * self.cost.latency_s),
            "store_bytes": store.num_bytes,
            "store_dropped_files": store.num_dropped,
            "pauses": loader.health.num_pauses + saver.health.num_pauses,
            "is_paused": int(not (loader.may_ask and saver.health.may_try)),
        }

    def check(self) -> Future[None]:
        """Audit the loads, the saves and the buffers; then, if no other process uses the store, its
        bytes on disk, once all is written. Raises AssertionError."""
        self.loader.check()
        is_lent = self.loader.may_hold_buffers or self.saver.may_hold_buffers
        num_lent, num_copied = self._buffers.num_lent, self.saver.num_buffers
        assert num_lent >= num_copied, "a buffer with copied K/V was given back"
        assert is_lent or num_lent == num_copied, "a buffer was not given back"
        return within(self._limits.check_s, self.saver.check())

    def close(self, timeout_s: float) -> None:
        """Write the queued K/V for at most `close_s`, and end the threads."""
        self.is_closed = True
        self.loader.close()
        self.saver.close(min(timeout_s, self._limits.close_s))

    # -- look-ups ------------------------------------------------------------------------------

    def stored_len(self, tokens: IntArray, namespace: str) -> int | Future[int]:
        """Returns the length of the longest stored prefix; what is known of it where the store is
        late or broken."""
        if not self.loader.may_ask:
            return self.prefixes.known(tokens, namespace).length
        return _mapped(self._find(tokens, namespace), lambda stored: stored.length)

    def extend_lookup(
        self, lookup: Lookup, tokens: IntArray, namespace: str
    ) -> Lookup | Future[Lookup]:
        """Returns the look-up with its `StoredLookup`, in a future if the store is asked."""

        def extended(stored: StoredPrefix) -> Lookup:
            return lookup._replace(stored=self._stored_lookup(stored, tokens, lookup.cached_len))

        if not self.loader.may_ask:
            return extended(self.prefixes.known(tokens, namespace))
        return _mapped(self._find(tokens, namespace), extended)

    def _find(self, tokens: IntArray, namespace: str) -> Future[StoredPrefix]:
        """The stored prefix; what is known of it where the store is late or fails."""
        limit = self._limits.lookup_s
        found: Future[StoredPrefix] = Future()

        def note(search: Future[StoredPrefix]) -> None:
            if search.exception() is None:
                found.set_result(search.result())
            else:
                found.set_result(self.prefixes.known(tokens, namespace))

        within(limit, self.loader.find(tokens, namespace, limit)).add_done_callback(note)
        return found

    def _stored_lookup(
        self, stored: StoredPrefix, tokens: IntArray, cached_len: int
    ) -> StoredLookup:
        in_memory, cost = self.prefixes.store.in_memory, self.cost
        host_len = sum(run.num_tokens for run in stored.runs if in_memory(run.name))
        num_tokens = max(0, min(stored.length, len(tokens) - 1) - cached_len)
        load_s = cost.load_seconds(num_tokens) if num_tokens else 0.0
        compute_s = cost.compute_seconds(num_tokens)
        return StoredLookup(stored.length, num_tokens, load_s, compute_s, host_len)


def _mapped(future: Future[Any], function: Callable[[Any], Any]) -> Future[Any]:
    """Returns a future with the function of another one's result."""
    mapped: Future[Any] = Future()

    def note(done: Future[Any]) -> None:
        try:
            mapped.set_result(function(done.result()))
        except Exception as error:
            mapped.set_exception(error)

    future.add_done_callback(note)
    return mapped


# -- opening -----------------------------------------------------------------------------------


def open_connector(
    engine: Engine,
    config: EngineConfig,
    *,
    is_main: bool = True,
    limits: StoreLimits | None = None,
    as_stored: Callable[[IntArray], IntArray] | None = None,
) -> KVConnector:
    """Returns the connector of an engine to the store that `config` names. `as_stored`: of its
    pictures, see `PictureTable`. Reads the store, and for a fingerprint the weights. Raises
    InvalidRequest if the model's K/V cannot be stored or the store cannot be used."""
    assert isinstance(engine.cache, RadixCache)
    runner = engine.runner
    pool, layout, settings = runner.storable_pool()
    store = open_store(config, pool)
    settings["layout"] = layout.as_list()
    is_folder = config.kv_store is not None and not config.kv_store.startswith(SCHEMES)
    folder = Path(config.kv_store or "") if is_folder else _CACHE_FOLDER

    def fingerprint() -> str:
        given = runner.weights_are_given
        name = runner.weights_id if given else f"{runner.info.architecture} {config.seed}"
        path = None if given else runner.model_path
        return model_fingerprint(path, name, settings, folder.expanduser())

    return KVConnector(
        StoredPrefixes(store, fingerprint(), layout, as_stored),
        pool,
        engine.cache,
        policy=config.kv_store_write,
        min_uses=config.kv_store_min_uses,
        step_tokens=config.chunked_prefill_size,
        token_cost=engine.prefill_cost,
        step_seconds=engine.step_seconds,
        has_room=engine.has_room,
        limits=limits or LIMITS,
        is_main=is_main,
        fingerprint=fingerprint,
    )


def open_store(config: EngineConfig, pool: KVPool) -> RunStore:
    """The store that `config` names, for the K/V of a pool. Raises InvalidRequest."""
    host = None
    if config.host_cache_memory is not None:
        if pool.is_in_host_memory:
            raise InvalidRequest(
                "host_cache_memory cannot be used on the CPU: there the pool is in host memory; "
                "make it larger with kv_cache_memory"
            )
        size = parse_bytes(config.host_cache_memory, "host_cache_memory")
        host = HostStore(size, pool.make_pinned)
    if config.kv_store is None:
        assert host is not None
        return host
    try:
        store: RunStore
        if config.kv_store.startswith(SCHEMES):
            store = RedisStore(config.kv_store)
        else:
            folder = Path(config.kv_store).expanduser()
            store = FolderStore(folder, parse_bytes(config.kv_store_size, "kv_store_size"))
            store.drop_temporary()
    except OSError as error:
        raise InvalidRequest(f"kv_store={config.kv_store!r} cannot be used: {error}") from error
    return store if host is None else TieredStore(host, store)
