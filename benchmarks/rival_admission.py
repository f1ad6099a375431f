"""Rules of others for closed loops, each outside of the server: who may send requests now.

    LiveSessions      a fixed number of sessions at a time, each from its first request to its last
    PauseResume       ThunderAgent's: sessions pause when the working sets of the running ones fill
                      95 % of the cache, and go on when they fill less than 80 %
    AdditiveIncrease  CONCUR's: the number of live sessions grows by one while less than 90 % of the
                      pages are in use, and is halved when none was free

Continuum's CacheTTL, which keeps a session's K/V for a time after each answer, is a lease.
"""

from __future__ import annotations

from collections import deque

from radixserve.replay.closed_loop import ClientGate, ClosedLoop
from radixserve.replay.trace import Ints
from radixserve.scheduler import Scheduler


class LiveSessions(ClientGate):
    """First come, first served among the sessions that wait."""

    def __init__(self, scheduler: Scheduler, loop: ClosedLoop, limit: int) -> None:
        super().__init__(scheduler, loop)
        self.limit = limit
        self.live: set[int] = set()
        self.waiting: deque[tuple[int, int]] = deque()  # (session, request)

    def arrive(self, session: int, index: int) -> list[int]:
        if session in self.live:
            return [index]
        self.waiting.append((session, index))
        return self.release()

    def end(self, session: int, index: int, *, is_last: bool) -> list[int]:
        del index
        if is_last:
            self.live.discard(session)
        return self.release()

    def release(self) -> list[int]:
        """The requests of sessions that become live now."""
        ready = []
        while self.waiting and len(self.live) < self.limit:
            session, index = self.waiting.popleft()
            self.live.add(session)
            ready.append(index)
        return ready


class PauseResume(ClientGate):
    """`lengths`: [requests] tokens of prompt and output."""

    def __init__(
        self, scheduler: Scheduler, loop: ClosedLoop, lengths: Ints, cache_tokens: int
    ) -> None:
        super().__init__(scheduler, loop)
        self.lengths, self.pause, self.resume = lengths, 0.95 * cache_tokens, 0.8 * cache_tokens
        self.live: dict[int, int] = {}  # session: tokens of its working set
        self.paused: deque[tuple[int, int]] = deque()

    def arrive(self, session: int, index: int) -> list[int]:
        others = sum(self.live.values()) - self.live.get(session, 0)
        size = int(self.lengths[index])
        if not others or others + size <= self.pause:
            self.live[session] = size
            return [index]
        self.live.pop(session, None)
        self.paused.append((session, index))
        return self.release()

    def end(self, session: int, index: int, *, is_last: bool) -> list[int]:
        del index
        if is_last:
            self.live.pop(session, None)
        return self.release()

    def release(self) -> list[int]:
        ready = []
        while self.paused:
            session, index = self.paused[0]
            used, size = sum(self.live.values()), int(self.lengths[index])
            if used and used + size > self.resume:
                break
            self.paused.popleft()
            self.live[session] = size
            ready.append(index)
        return ready


class AdditiveIncrease(LiveSessions):
    """The limit changes at most once for as many ends of requests as there are live sessions."""

    def __init__(
        self, scheduler: Scheduler, loop: ClosedLoop, lengths: Ints, cache_tokens: int
    ) -> None:
        super().__init__(scheduler, loop, limit=4)
        self.lengths, self.cache_tokens = lengths, cache_tokens
        self.sizes: dict[int, int] = {}
        self.num_ended = 0

    def end(self, session: int, index: int, *, is_last: bool) -> list[int]:
        self.sizes[session] = int(self.lengths[index])
        if is_last:
            del self.sizes[session]
        self.num_ended += 1
        if self.num_ended >= len(self.live):
            self.num_ended = 0
            used = sum(self.sizes.values())
            if used >= self.cache_tokens:
                self.limit = max(1, self.limit // 2)
            elif used < 0.9 * self.cache_tokens:
                self.limit += 1
        return super().end(session, index, is_last=is_last)
