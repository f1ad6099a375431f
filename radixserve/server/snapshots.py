"""`Snapshots`: snapshots of the cache for the open pages, within a share of the time.

A snapshot is taken when it is asked for, never else, and shared by all that ask for the same one.
What it cost, in the engine's thread and here, is counted: the next one is taken when the share of
all snapshots is back below `SHARE`, after `LONGEST_S` at the latest, and every answer says when to
come again, the later the more viewers there are.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from radixserve.cache import SnapshotView
from radixserve.server.errors import ApiError
from radixserve.server.json_response import dump
from radixserve.server.state import Server
from radixserve.server.tenants import Caller

SHARE = 0.01  # of the time, at most
EVERY_S = 0.4  # a snapshot is that old at least before a new one is taken
LONGEST_S = 5.0  # the longest wait for the next: a garbage collection can make one cost a lot
ANSWER_COST_S = 0.0005  # of an answer that is taken from memory
_MAX_KEPT = 32
_MAX_WAITING = 32
_MAX_TEXTS = 8192
_COUNTERS = (
    "prompted_tokens", "reused_tokens", "computed_tokens", "generated_tokens", "prefilled_tokens",
    "decoded_tokens", "evicted_tokens", "preemptions", "splits", "finished", "nodes", "namespaces",
    "sessions", "pages_total", "pages_free", "pages_tree", "pages_locked", "pages_private",
    "pages_leased", "pages_shared",
)  # fmt: skip


class Snapshots:
    """Owned by the event loop."""

    def __init__(self, server: Server, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._kept: OrderedDict[tuple[str, SnapshotView], tuple[float, bytes]] = OrderedDict()
        self._texts: OrderedDict[tuple[int, ...], str] = OrderedDict()
        self._making = asyncio.Lock()
        self._num_waiting = 0
        self._next_at = 0.0  # when the next one may be taken
        self._answers_until = 0.0  # when what the answers cost is back below the share
        self.num_taken = 0
        self.cost_s = 0.0  # of all of them

    async def get(self, caller: Caller, view: SnapshotView) -> bytes:
        """JSON. Raises ApiError 429 where many different ones are waited for."""
        key = (caller.tenant, view)
        kept = self._fresh(key)
        if kept is None:
            if self._num_waiting >= _MAX_WAITING:
                raise ApiError(429, "many others look at the page", code="too_many_viewers",
                               headers={"retry-after": "5"})  # fmt: skip
            self._num_waiting += 1
            try:
                kept = await self._make(key, caller, view)
            finally:
                self._num_waiting -= 1
        now = self._clock()
        self._answers_until = max(self._answers_until, now) + ANSWER_COST_S / SHARE
        wait_s = max(EVERY_S, self._next_at - now, self._answers_until - now)
        return kept[:-1] + f',"next_s":{wait_s:.2f}}}'.encode()

    def _fresh(self, key: tuple[str, SnapshotView]) -> bytes | None:
        """What was taken just now, or last as long as no other may be taken."""
        made_at, kept = self._kept.get(key, (0.0, None))
        if kept is None or self._clock() >= max(made_at + EVERY_S, self._next_at):
            return None
        return kept

    async def _make(
        self, key: tuple[str, SnapshotView], caller: Caller, view: SnapshotView
    ) -> bytes:
        async with self._making:
            kept = self._fresh(key)  # another request has taken it meanwhile
            if kept is not None:
                return kept
            await asyncio.sleep(self._next_at - self._clock())
            found, cost_s = await asyncio.to_thread(self._take, caller, view)
            now = self._clock()
            self.num_taken += 1
            self.cost_s += cost_s
            self._next_at = now + min(cost_s / SHARE, LONGEST_S)
            self._kept[key] = (now, found)
            self._kept.move_to_end(key)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
            return found

    def _take(self, caller: Caller, view: SnapshotView) -> tuple[bytes, float]:
        """In a thread: the JSON, and the seconds of processor time that it took."""
        server = self._server
        start = time.thread_time()
        found = server.runtime.cache_snapshot(view)
        engine_s = found.pop("engine_s")
        stats = {**server.runtime.status().stats, **found.pop("counters")}
        for one in (*found["nodes"], *found["victims"]):
            one["text"] = self._text(one["head"])
            one["tail_text"] = self._text(one["tail"])
            del one["tail"]
        for one in found["nodes"]:
            one["sessions"] = [session_id(name) for name in one["sessions"]]
        for one in found["requests"]:
            one["session"] = session_id(one["session"])
        found |= {
            "model": server.model_name,
            "tenant": caller.tenant,
            "is_admin": caller.is_admin,
            "counters": _counters(server, caller, stats, found),
            "cost_ms": {"engine": round(engine_s * 1e3, 2)},
        }
        text = dump(found)
        return text.encode(), engine_s + time.thread_time() - start

    def _text(self, tokens: list[int]) -> str | None:
        tokenizer = self._server.runtime.tokenizer
        if tokenizer is None:
            return None
        key = tuple(tokens)
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = tokenizer.decode(tokens, keep_special=True)
            while len(self._texts) > _MAX_TEXTS:
                self._texts.popitem(last=False)
        return text


def session_id(name: str) -> str:
    """The client's own id in the name that `SessionTable` gave to a cache session."""
    length, colon, rest = name.partition(":")
    if colon and length.isdigit() and rest[int(length) : int(length) + 1] == ":":
        return rest[int(length) + 1 :]
    return name


def _counters(
    server: Server, caller: Caller, stats: Any, found: dict[str, Any]
) -> dict[str, int | float]:
    """An admin gets the counters of all requests, a tenant those of its own ended ones."""
    if caller.is_admin:
        return {name: stats[name] for name in _COUNTERS if name in stats}
    own = server.tenant_usage.of(caller.tenant)
    locked = [space["num_locked"] or 0 for space in found["namespaces"]]
    return {
        "prompted_tokens": int(own["prompt_tokens"]),
        "reused_tokens": int(own["cached_tokens"]),
        "computed_tokens": int(own["computed_tokens"]),
        "generated_tokens": int(own["completion_tokens"]),
        "finished": int(own["requests"]),
        "pages_tree": sum(space["num_pages"] for space in found["namespaces"]),
        "pages_locked": sum(locked),
        "pages_private": found["pages"]["private"],
    }
