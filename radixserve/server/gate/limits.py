"""Limits whose excess is answered 429: waiting requests (`Limits`), grammars that wait to be
compiled (`GrammarThreads`), and costly reads of the cache (`Ration`)."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import NoReturn

from radixserve.reports import EngineStatus
from radixserve.server.config import ServerConfig
from radixserve.server.wire.errors import ApiError

_WINDOW_S = 30.0  # over which the rate of served requests is measured
_MAX_RETRY_AFTER_S = 60
_UNKNOWN_RETRY_AFTER_S = 5  # before a request has been served
_GRAMMAR_THREADS = 4
_GRAMMARS_PER_TENANT = 2  # compiled at the same time, so that other tenants find a free thread
_MAX_WAITING_GRAMMARS = 32  # per tenant
SHARE = 0.01  # the part of the time that costly reads of the cache may take
LONGEST_S = 5.0  # longest pause between two of them: a garbage collection may make one expensive
_MAX_WAITING_READS = 32


class Limits:
    """Decides whether the engine's queue has room for more requests. Owned by the event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._finished: deque[tuple[float, int, int]] = deque()  # time, requests, prompt tokens
        self._sums = [0, 0]  # of `_finished`: requests, prompt tokens

    def check(
        self,
        status: EngineStatus,
        num_requests: int,
        num_tokens: int,
        *,
        share: float = 1.0,
        own_waiting: int = 0,
    ) -> None:
        """Raise ApiError 429 if the queue does not have room for these requests now, 400 if it
        never has.

        status        of the engine
        num_requests  engine requests: one for each sample of each prompt
        num_tokens    tokens of all prompts; an empty queue takes any number of them, since they
                      could never be served otherwise
        share         see `Tenants.share`: the tenant's part of the queue once that is half full
        own_waiting   requests of the tenant that have not generated a token
        """
        config = self._config
        max_requests = max(config.max_queued_requests, config.max_n)
        if num_requests > max_requests:
            raise ApiError(
                400,
                f"the prompts and their samples are {num_requests} requests; at most "
                f"{max_requests} are "
                "taken at once (max_queued_requests)",
                param="n",
            )
        waiting = status.waiting
        is_contended = waiting + num_requests > config.max_queued_requests // 2
        own_limit = max(1, int(config.max_queued_requests * share))
        own_waiting = min(own_waiting, waiting)  # some of them are running
        if own_waiting and share < 1.0 and is_contended and own_waiting + num_requests > own_limit:
            self._refuse(own_waiting, num_requests, f"your share of the queue, {own_limit}", 0)
        if waiting and waiting + num_requests > config.max_queued_requests:
            limit = f"max_queued_requests={config.max_queued_requests}"
            self._refuse(waiting, num_requests, limit, 0)
        tokens = status.waiting_tokens
        if tokens and tokens + num_tokens > config.max_queued_tokens:
            self._refuse(tokens, num_tokens, f"max_queued_tokens={config.max_queued_tokens}", 1)

    def _refuse(self, waiting: int, new: int, limit: str, kind: int) -> NoReturn:
        seconds = self.wait_s(waiting, kind)
        raise ApiError(
            429,
            f"the queue is full: {waiting} + {new} is more than {limit}; try again in {seconds} s",
            code="queue_full",
            headers={"retry-after": str(seconds)},
        )

    def note_finished(self, num_requests: int, num_tokens: int) -> None:
        """Count engine requests that have ended, and the tokens of their prompts."""
        now = time.monotonic()
        self._finished.append((now, num_requests, num_tokens))
        self._sums[0] += num_requests
        self._sums[1] += num_tokens
        self._forget(now)

    def wait_s(self, waiting: int, kind: int) -> int:
        """The seconds after which a refused client should retry, 1 to 60: until half of `waiting`
        requests (`kind` 0) or prompt tokens (`kind` 1) are served at the rate of the last 30 s.

        If it were until the first free place, all refused clients would retry at the same time.
        """
        now = time.monotonic()
        self._forget(now)
        if not self._finished or not self._sums[kind]:
            return _UNKNOWN_RETRY_AFTER_S
        elapsed = max(0.1, now - self._finished[0][0])
        return max(1, min(_MAX_RETRY_AFTER_S, math.ceil(waiting / 2 * elapsed / self._sums[kind])))

    def _forget(self, now: float) -> None:
        while self._finished and self._finished[0][0] < now - _WINDOW_S:
            _, requests, tokens = self._finished.popleft()
            self._sums[0] -= requests
            self._sums[1] -= tokens


class GrammarThreads:
    """Compiles grammars in threads of its own, a few of each tenant at a time. Owned by the event
    loop. asyncio's threads stay free for lookups."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(
            _GRAMMAR_THREADS, thread_name_prefix="radixserve-compile"
        )
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_GRAMMARS_PER_TENANT)
        )
        self._num_waiting: defaultdict[str, int] = defaultdict(int)

    async def run(self, tenant: str, compile_grammar: Callable[[], None]) -> None:
        """Call `compile_grammar` in a thread. Raises its errors, and ApiError 429 if too many
        grammars of the tenant are waiting."""
        if self._num_waiting[tenant] >= _MAX_WAITING_GRAMMARS:
            raise ApiError(
                429,
                f"{_MAX_WAITING_GRAMMARS} of your grammars wait to be compiled",
                code="grammars_full",
                headers={"retry-after": "5"},
            )
        self._num_waiting[tenant] += 1
        try:
            async with self._slots[tenant]:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._threads, compile_grammar)
        finally:
            self._num_waiting[tenant] -= 1

    def close(self) -> None:
        """Stop the threads. Grammars whose compilation has not begun are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Ration:
    """Rate limiter of costly reads of the cache: one runs at a time, and all of them together take
    at most `SHARE` of the time. Owned by the event loop.

    A reader enters `turn`, awaits `pause`, reads, and reports the cost to `spend`. The next read
    may begin `cost / SHARE` seconds later, but at most `LONGEST_S` seconds later.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self.next_at = 0.0  # by the clock: when the next read may begin
        self.cost_s = 0.0  # of all reads so far

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until no other read is running. Raises ApiError 429 if too many are waiting."""
        if self._num_waiting >= _MAX_WAITING_READS:
            message = "too many requests are reading the cache"
            headers = {"retry-after": str(int(LONGEST_S))}
            raise ApiError(429, message, code="too_many_viewers", headers=headers)
        self._num_waiting += 1
        try:
            async with self._lock:
                yield
        finally:
            self._num_waiting -= 1

    async def pause(self) -> None:
        """Wait until the next read may begin."""
        await asyncio.sleep(self.next_at - self._clock())

    def spend(self, cost_s: float) -> None:
        """Count a read that took `cost_s` seconds of processor time."""
        self.cost_s += cost_s
        self.next_at = self._clock() + min(cost_s / SHARE, LONGEST_S)
