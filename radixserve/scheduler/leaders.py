"""Who is computing, right now, the tokens that a waiting request needs next."""

from __future__ import annotations

import math
from collections.abc import Iterable

from radixserve.scheduler.job import RequestState


class Leaders:
    """The running requests of one pass, by the tokens that they are about to publish.

    A waiting request whose cached prefix ends at position m follows a running one when both agree
    on [0, m] and the running one still has to compute position m.
    """

    def __init__(self, running: Iterable[RequestState]) -> None:
        self._prefilling: list[RequestState] = []
        self._decoding: dict[int, list[RequestState]] = {}  # by the position that they compute
        for job in running:
            self.add(job)

    def add(self, job: RequestState) -> None:
        sequence = job.sequence
        assert sequence is not None
        if sequence.is_stale:  # what it computes will not be found
            return
        if job.is_decoding:
            self._decoding.setdefault(len(job.tokens) - 1, []).append(job)
        else:
            self._prefilling.append(job)

    def is_following(self, job: RequestState) -> bool:
        """Whether `job` should wait for tokens of a running request; remembers which.

        It then follows until `free_followers` lets it go.
        """
        if job.follows is not None:
            return True
        wanted = job.num_reusable
        at = job.probe.cached_len
        if at >= wanted:
            return False
        for leader in (*self._prefilling, *self._decoding.get(at, ())):
            agreed = _agreed(job, leader, at, wanted)
            if agreed > max(at, leader.committed):
                job.follows, job.follows_until = leader, agreed
                leader.followers.append(job)
                return True
        return False


def free_followers(leader: RequestState) -> list[RequestState]:
    """Let those go that have what they waited for, all of them when `leader` runs no more."""
    if not leader.followers:
        return []
    reached = math.inf if leader.sequence is None else leader.committed
    done = [job for job in leader.followers if job.follows_until <= reached]
    if done:
        leader.followers = [job for job in leader.followers if job.follows_until > reached]
        for job in done:
            job.follows = None
    return done


def _agreed(job: RequestState, leader: RequestState, at: int, limit: int) -> int:
    """Leading tokens that both share, at most `limit`; 0 unless they share more than `at`."""
    if job.request.params.namespace != leader.request.params.namespace:
        return 0
    mine, theirs = job.tokens.view(), leader.tokens.view()
    if len(theirs) <= at or mine[at] != theirs[at]:
        return 0
    size = min(limit, len(theirs))
    differs = mine[:size] != theirs[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
