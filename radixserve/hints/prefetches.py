"""`Prefetches`: computes hinted prompts into the cache while no other request is open."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.namespace import as_namespace, is_within
from radixserve.engine.engine import Engine
from radixserve.engine.extension import EngineExtension
from radixserve.hints.hint import Hint, HintAnswer
from radixserve.output import RequestOutput
from radixserve.request import FIRST_PICTURE_ID, LEAST_PRIORITY, Request, SamplingParams

MAX_QUEUED = 64
MAX_QUEUED_OF_OWNER = 16
_ID = "#prefetch"  # no caller's request id begins so


class Prefetches(EngineExtension):
    """A queue of requests that run one at a time while callers have no open request.

    When another request arrives, the running prefetch is ended and queued again; the K/V that it
    has computed is cached by then. Each prefetch samples one token, which is dropped. It is an
    extension of the engine while there are prefetches.
    """

    name = "prefetches"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scheduler, self._cache = engine.scheduler, engine.cache
        self._queue: deque[tuple[Request, str]] = deque()  # with its owner
        self._running: tuple[Request, str] | None = None
        self._number = 0

    def __len__(self) -> int:
        """Prefetches that have not ended."""
        return len(self._queue) + (self._running is not None)

    def add(self, hint: Hint) -> HintAnswer:
        """Queue a hint's prefix. Returns the answer to the hint. O(tokens + queued prefetches)."""
        if hint.token_ids is None:
            reason = "prefetch takes a prefix: a session is computed already"
            return HintAnswer("prefetch", "rejected", reason=reason)
        if as_namespace(hint.namespace).adapter:
            return HintAnswer("prefetch", "rejected", reason="not built for adapters")
        cache, whole = self._cache, hint.token_ids
        if not cache.sharing_enabled:
            return HintAnswer("prefetch", "rejected", reason='nothing is kept with cache="off"')
        tokens = whole[: hint.max_tokens].copy()
        if tokens.max(initial=0) >= FIRST_PICTURE_ID:
            return HintAnswer("prefetch", "rejected", reason="not built for pictures")
        count, capacity = len(tokens), cache.num_pages * cache.page_size
        lookup = cache.lookup(tokens, hint.namespace, compare_namespaces=False)
        num_cached = lookup.cached_len
        room = capacity - cache.stats()["pages_pinned"] * cache.page_size
        if count >= room:
            reason = f"beside the pins the pool takes prompts of up to {room - 1} tokens"
            return HintAnswer("prefetch", "rejected", num_cached, reason=reason)
        if lookup.reason == "full":
            return HintAnswer("prefetch", "accepted", num_cached, count)
        queued = list(self._queue)
        if self._running is not None:
            queued.append(self._running)
        is_queued = any(
            request.params.namespace == hint.namespace and np.array_equal(request.token_ids, tokens)
            for request, _ in queued
        )
        if not is_queued:
            if len(queued) >= MAX_QUEUED:
                reason = f"{MAX_QUEUED} prefetches are queued already"
                return HintAnswer("prefetch", "rejected", num_cached, reason=reason)
            if sum(owner == hint.owner for _, owner in queued) >= MAX_QUEUED_OF_OWNER:
                reason = f"{MAX_QUEUED_OF_OWNER} prefetches of this owner are queued already"
                return HintAnswer("prefetch", "rejected", num_cached, reason=reason)
            self._number += 1
            self._queue.append((self._request(hint, tokens), hint.owner))
            if self not in self._engine.extensions.live:
                self._engine.extend(self)
        if queued or self._scheduler.has_work:
            reason = "requests and earlier prefetches go first"
            return HintAnswer("prefetch", "deferred", num_cached, count, reason=reason)
        return HintAnswer("prefetch", "accepted", num_cached, count)

    def _request(self, hint: Hint, tokens: IntArray) -> Request:
        params = SamplingParams(
            max_tokens=1, temperature=0.0, priority=LEAST_PRIORITY, namespace=hint.namespace
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

    # -- of the engine -------------------------------------------------------------------------

    def before_step(self, *, may_wait: bool) -> None:  # noqa: ARG002
        """End the running prefetch if other requests are open, else begin the next one."""
        scheduler, running = self._scheduler, self._running
        if running is not None:
            depths = scheduler.queue_depths()
            if not scheduler.has_work:  # pins left no room for it
                self._running = None
            elif depths["running"] + depths["waiting"] > 1:
                self._running = None
                scheduler.finish(running[0].request_id, "abort")
                self._number += 1  # rows of the old one may be in flight
                again = replace(running[0], request_id=f"{_ID} {self._number}")
                self._queue.appendleft((again, running[1]))
        elif self._queue and not scheduler.has_work:
            self._running = self._queue.popleft()
            scheduler.add(self._running[0])
        self._leave_if_empty()

    def end_running(self) -> bool:
        """End the running prefetch, for which no caller waits: a request finds no page. What it
        computed is cached. False where none runs."""
        running = self._running
        if running is None:
            return False
        return self._scheduler.finish(running[0].request_id, "abort") is not None

    def on_outputs(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Returns `outputs` without those of the running prefetch, and notes its end."""
        running = self._running
        if running is None or not outputs:
            return outputs
        name = running[0].request_id
        if any(output.request_id == name and output.finish is not None for output in outputs):
            self._running = None
            self._leave_if_empty()
        return [output for output in outputs if output.request_id != name]

    @property
    def has_work(self) -> bool:
        return len(self) > 0

    def on_reset(self, namespace: str | None) -> None:
        """Drop the queued prefetches of a namespace, or all if None."""
        self._queue = deque(
            (request, owner)
            for request, owner in self._queue
            if not is_within(request.namespace, namespace)
        )
        self._leave_if_empty()

    def close(self, timeout_s: float) -> None:  # noqa: ARG002
        self._queue.clear()
        if self._running is not None:
            self._scheduler.finish(self._running[0].request_id, "abort")
            self._running = None

    def _leave_if_empty(self) -> None:
        if not len(self):
            self._engine.extensions.remove(self)
