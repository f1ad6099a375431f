"""Limits on waiting requests, on grammars being compiled, and on costly reads of the cache."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import NoReturn

from radixserve.output import EngineStatus
from radixserve.server.config import ServerConfig
from radixserve.server.wire.errors import ApiError

_WINDOW_S = 30.0  # over which the present rate is measured
_LONGEST_WAIT_S = 60
_UNKNOWN_WAIT_S = 5  # before anything has been served
_GRAMMAR_THREADS = 4
_GRAMMARS_OF_A_TENANT = 2  # at the same time, so that others find a free thread
_MAX_WAITING_GRAMMARS = 32  # of a tenant
SHARE = 0.01  # of the time, at most, for costly reads of the cache
LONGEST_S = 5.0  # the longest wait for the next read: a garbage collection can make one cost a lot
_MAX_VIEWERS = 32  # that wait for their turn


class Limits:
    """Owned by the event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._finished: deque[tuple[float, int, int]] = deque()  # time, requests, prompt tokens
        self._sums = [0, 0]

    def check(
        self,
        status: EngineStatus,
        num_requests: int,
        num_tokens: int,
        *,
        share: float = 1.0,
        own_waiting: int = 0,
    ) -> None:
        """Raise ApiError 429 where so much more would not fit into the queue, 400 where it never
        could.

        num_requests  of the engine: samples of each prompt
        num_tokens    of all prompts. An empty queue takes any: they could never be served otherwise
        share         of the tenant, see `Tenants.share`: its part of a queue that is half full
        own_waiting   requests of the tenant without a token yet
        """
        config = self._config
        most = max(config.max_queued_requests, config.max_n)
        if num_requests > most:
            raise ApiError(
                400,
                f"the prompts and their samples are {num_requests} requests; at most {most} are "
                "taken at once (max_queued_requests)",
                param="n",
            )
        waiting = status.waiting
        is_contended = waiting + num_requests > config.max_queued_requests // 2
        own_limit = max(1, int(config.max_queued_requests * share))
        own_waiting = min(own_waiting, waiting)  # some of them run already
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
        now = time.monotonic()
        self._finished.append((now, num_requests, num_tokens))
        self._sums[0] += num_requests
        self._sums[1] += num_tokens
        self._forget(now)

    def wait_s(self, waiting: int, kind: int) -> int:
        """Whole seconds until half of so many requests (kind 0) or prompt tokens (1) that wait are
        served, at the rate of the last half minute; between 1 and 60.

        Half: if they waited for a single free place, all refused clients would retry at once.
        """
        now = time.monotonic()
        self._forget(now)
        if not self._finished or not self._sums[kind]:
            return _UNKNOWN_WAIT_S
        elapsed = max(0.1, now - self._finished[0][0])
        return max(1, min(_LONGEST_WAIT_S, math.ceil(waiting / 2 * elapsed / self._sums[kind])))

    def _forget(self, now: float) -> None:
        while self._finished and self._finished[0][0] < now - _WINDOW_S:
            _, requests, tokens = self._finished.popleft()
            self._sums[0] -= requests
            self._sums[1] -= tokens


class GrammarThreads:
    """Compiles grammars in its own threads, few of each tenant at a time. Owned by the event loop.

    asyncio's threads stay free for look-ups.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(
            _GRAMMAR_THREADS, thread_name_prefix="radixserve-compile"
        )
        self._slots: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_GRAMMARS_OF_A_TENANT)
        )
        self._num_waiting: defaultdict[str, int] = defaultdict(int)

    async def run(self, tenant: str, compile_grammar: Callable[[], None]) -> None:
        """Call the function in a thread. Raises its errors, and ApiError 429 if many grammars of
        the tenant wait."""
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
        """Stop; drops grammars whose compilation has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class Ration:
    """Lets costly reads of the cache run one at a time, within a share of the time. Owned by the
    event loop.

    Enter `turn`, wait in `pause` before the work, then report its cost to `spend`. The next work
    begins when all work together is below `SHARE` of the time again, after `LONGEST_S` at the
    latest.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self.next_at = 0.0  # when the next work may begin
        self.cost_s = 0.0  # of all of it

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Raises ApiError 429 where many wait for their turn."""
        if self._num_waiting >= _MAX_VIEWERS:
            message = "many others look at the cache"
            headers = {"retry-after": str(int(LONGEST_S))}
            raise ApiError(429, message, code="too_many_viewers", headers=headers)
        self._num_waiting += 1
        try:
            async with self._lock:
                yield
        finally:
            self._num_waiting -= 1

    async def pause(self) -> None:
        """Wait until the next work may begin."""
        await asyncio.sleep(self.next_at - self._clock())

    def spend(self, cost_s: float) -> None:
        """Work that took `cost_s` seconds of processor time has ended."""
        self.cost_s += cost_s
        self.next_at = self._clock() + min(cost_s / SHARE, LONGEST_S)
