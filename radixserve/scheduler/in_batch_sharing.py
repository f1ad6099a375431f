"""In-batch prefix sharing: a waiting request waits for tokens that a running one is computing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from radixserve.scheduler.request_state import RequestState


class InBatchSharing:
    """The running requests of one scheduling pass, by the tokens that they are about to publish.

    A waiting request whose cached prefix ends at position m waits for a running one (its producer)
    when both agree on [0, m] and the producer still has to compute position m.
    """

    def __init__(
        self,
        running: Iterable[RequestState],
        usable_len: Callable[[RequestState], int] | None = None,
    ) -> None:
        """`usable_len`: of a cache that may hold a prefix that no sequence can go on from, how much
        a request can go on from. O(its tokens)."""
        self._usable_len = usable_len
        self._prefilling: list[RequestState] = []
        self._decoding: dict[int, list[RequestState]] = {}  # by the position that they compute
        for state in running:
            self.add(state)

    def add(self, state: RequestState) -> None:
        sequence = state.sequence
        assert sequence is not None
        if sequence.is_stale:  # its namespace was reset: no lookup finds what it computes
            return
        if state.is_decoding:
            self._decoding.setdefault(len(state.tokens) - 1, []).append(state)
        else:
            self._prefilling.append(state)

    def must_wait(self, state: RequestState) -> bool:
        """Whether `state` should wait for tokens of a running request; registers it as a waiter.

        It then waits until `wake_waiters` releases it.
        """
        if state.producer is not None:
            return True
        limit = state.num_reusable
        start = state.prefix_watch.cached_len
        if self._usable_len is not None and self._is_computed_again(state, start, limit):
            start = self._usable_len(state)
        if start >= limit:
            return False
        for producer in (*self._prefilling, *self._decoding.get(start, ())):
            agreed = _num_agreed(state, producer, start, limit)
            if agreed > max(start, producer.committed):
                state.producer, state.awaited_len = producer, agreed
                producer.waiters.append(state)
                if producer.sequence is not None:
                    producer.sequence.want_checkpoint(agreed)
                return True
        return False

    def _is_computed_again(self, state: RequestState, cached_len: int, limit: int) -> bool:
        """Whether a producer computes tokens of `state` that are cached."""
        return any(
            (done := producer.committed) < cached_len
            and _num_agreed(state, producer, done, limit) > done
            for producer in self._prefilling
        )


def wake_waiters(producer: RequestState) -> list[RequestState]:
    """Release the waiters whose tokens are committed; all when `producer` has stopped running."""
    if not producer.waiters:
        return []
    reached = math.inf if producer.sequence is None else producer.committed
    woken = [state for state in producer.waiters if state.awaited_len <= reached]
    if woken:
        producer.waiters = [state for state in producer.waiters if state.awaited_len > reached]
        for state in woken:
            state.producer = None
    return woken


def _num_agreed(state: RequestState, producer: RequestState, start: int, limit: int) -> int:
    """Leading tokens that both share, at most `limit`; 0 unless they share more than `start`."""
    if state.request.params.namespace != producer.request.params.namespace:
        return 0
    mine, theirs = state.tokens.view(), producer.tokens.view()
    if len(theirs) <= start or mine[start] != theirs[start]:
        return 0
    size = min(limit, len(theirs))
    differs = mine[:size] != theirs[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
