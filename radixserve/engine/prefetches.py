"""`Prefetches`: prompts that are computed while nothing else is at work, and stay cached."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache import PrefixCache
from radixserve.hint import Hint, HintAnswer
from radixserve.output import RequestOutput
from radixserve.request import Request, SamplingParams
from radixserve.scheduler import Scheduler

MAX_QUEUED = 64
MAX_QUEUED_OF_OWNER = 16
_LOWEST = -(2**31)
_ID = "#prefetch"  # no caller's request id begins so


class Prefetches:
    """A queue of requests of which one runs at a time, for as long as there are no others.

    As soon as another request arrives the running one is ended and queued again: what it has
    computed is cached by then. Each samples one token, which is dropped.
    """

    def __init__(self, scheduler: Scheduler, cache: PrefixCache) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._queue: deque[tuple[Request, str]] = deque()  # with its owner
        self._running: tuple[Request, str] | None = None
        self._number = 0

    def __len__(self) -> int:
        """Prefetches that have not ended."""
        return len(self._queue) + (self._running is not None)

    def add(self, hint: Hint) -> HintAnswer:
        """Queue a hint's prefix. O(tokens + queued ones)."""
        if hint.token_ids is None:
            reason = "prefetch takes a prefix: a session is computed already"
            return HintAnswer("prefetch", "rejected", reason=reason)
        cache, whole = self._cache, hint.token_ids
        if not cache.sharing_enabled:
            return HintAnswer("prefetch", "rejected", reason='nothing is kept with cache="off"')
        tokens = whole[: hint.max_tokens].copy()
        count, capacity = len(tokens), cache.num_pages * cache.page_size
        lookup = cache.lookup(tokens, hint.namespace, compare_namespaces=False)
        found = lookup.cached_len
        room = capacity - cache.stats()["pages_pinned"] * cache.page_size
        if count >= room:
            reason = f"beside the pins the pool takes prompts of up to {room - 1} tokens"
            return HintAnswer("prefetch", "rejected", found, reason=reason)
        if lookup.reason == "full":
            return HintAnswer("prefetch", "accepted", found, count)
        queued = [*self._queue, *([] if self._running is None else [self._running])]
        is_queued = any(
            request.params.namespace == hint.namespace and np.array_equal(request.token_ids, tokens)
            for request, _ in queued
        )
        if not is_queued:
            if len(queued) >= MAX_QUEUED:
                reason = f"{MAX_QUEUED} prefetches are queued already"
                return HintAnswer("prefetch", "rejected", found, reason=reason)
            if sum(owner == hint.owner for _, owner in queued) >= MAX_QUEUED_OF_OWNER:
                reason = f"{MAX_QUEUED_OF_OWNER} prefetches of this owner are queued already"
                return HintAnswer("prefetch", "rejected", found, reason=reason)
            self._number += 1
            self._queue.append((self._request(hint, tokens), hint.owner))
        if queued or self._scheduler.has_work:
            reason = "requests and earlier prefetches go first"
            return HintAnswer("prefetch", "deferred", found, count, reason=reason)
        return HintAnswer("prefetch", "accepted", found, count)

    def _request(self, hint: Hint, tokens: IntArray) -> Request:
        params = SamplingParams(
            max_tokens=1, temperature=0.0, priority=_LOWEST, namespace=hint.namespace
        )
        return Request(
            request_id=f"{_ID} {self._number}",
            token_ids=tokens,
            params=params,
            seed=0,
            end_ids=frozenset(),
            max_len=len(tokens) + 1,
            is_prefetch=True,
        )

    def take_turn(self) -> None:
        """Before a step: give way to other requests, or begin the next one."""
        scheduler, running = self._scheduler, self._running
        if running is not None:
            counts = scheduler.stats()
            if not scheduler.has_work:  # pins left no room for it
                self._running = None
            elif counts["running"] + counts["waiting"] > 1:
                self._running = None
                scheduler.finish(running[0].request_id, "abort")
                self._number += 1  # rows of the old one may be in flight
                again = replace(running[0], request_id=f"{_ID} {self._number}")
                self._queue.appendleft((again, running[1]))
        elif self._queue and not scheduler.has_work:
            self._running = self._queue.popleft()
            scheduler.add(self._running[0])

    def drop_outputs(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """`outputs` without those of prefetches; notes the end of the running one."""
        running = self._running
        if running is None or not outputs:
            return outputs
        name = running[0].request_id
        if any(one.request_id == name and one.finish is not None for one in outputs):
            self._running = None
        return [one for one in outputs if one.request_id != name]

    def forget(self, namespace: str | None) -> None:
        """Drop those of a namespace, or all, that have not begun."""
        kept = [one for one in self._queue if namespace not in (None, one[0].params.namespace)]
        self._queue = deque(kept)
