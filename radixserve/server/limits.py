"""Limits on what waits, checked before the engine sees a request, and when to come again."""

from __future__ import annotations

import math
import time
from collections import deque

from radixserve.output import EngineStatus
from radixserve.server.config import ServerConfig
from radixserve.server.errors import ApiError

_WINDOW_S = 30.0  # over which the present rate is measured
_LONGEST_WAIT_S = 60


class Limits:
    """Owned by the event loop."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._finished: deque[tuple[float, int, int]] = deque()  # time, requests, prompt tokens
        self._sums = [0, 0]

    def check(self, status: EngineStatus, num_requests: int, num_tokens: int) -> None:
        """Raise ApiError 429 where so much more would not fit into the queue.

        An empty queue takes any one request: it could never be served otherwise.
        """
        config = self._config
        for name, waiting, new, limit, kind in (
            ("max_queued_requests", status.waiting, num_requests, config.max_queued_requests, 0),
            ("max_queued_tokens", status.waiting_tokens, num_tokens, config.max_queued_tokens, 1),
        ):
            if waiting and waiting + new > limit:
                seconds = self.wait_s(waiting + new - limit, kind)
                raise ApiError(
                    429,
                    f"the queue is full: {waiting} + {new} is more than {name}={limit}; "
                    f"try again in {seconds} s",
                    code="queue_full",
                    headers={"retry-after": str(seconds)},
                )

    def note_finished(self, num_requests: int, num_tokens: int) -> None:
        now = time.monotonic()
        self._finished.append((now, num_requests, num_tokens))
        self._sums[0] += num_requests
        self._sums[1] += num_tokens
        self._forget(now)

    def wait_s(self, excess: int, kind: int) -> int:
        """Whole seconds until so many requests (kind 0) or prompt tokens (1) are served at the
        rate of the last half minute; between 1 and 60."""
        now = time.monotonic()
        self._forget(now)
        if not self._finished or not self._sums[kind]:
            return 1
        elapsed = max(0.1, now - self._finished[0][0])
        return max(1, min(_LONGEST_WAIT_S, math.ceil(excess * elapsed / self._sums[kind])))

    def _forget(self, now: float) -> None:
        while self._finished and self._finished[0][0] < now - _WINDOW_S:
            _, requests, tokens = self._finished.popleft()
            self._sums[0] -= requests
            self._sums[1] -= tokens
