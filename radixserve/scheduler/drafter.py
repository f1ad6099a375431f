"""`Drafter`: the plug point that guesses the next tokens of running requests.

A decode row with drafts computes the request's last token and the guesses after it. The sampler
keeps a guess only if the request's own sample equals it, so that answers do not change. Rejected
tokens leave the sequence before anything else happens to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from radixserve.cache import PrefixCache
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.stats import SchedulerStats


class Drafter:
    """Proposes nothing. A drafter belongs to one scheduler, which makes all calls."""

    def attach(
        self, cache: PrefixCache, clock: Callable[[], float], counts: SchedulerStats
    ) -> None:
        """Called once, before all others. `clock`: the scheduler's, in seconds. `counts`: its own,
        to be read."""

    def propose(self, decodes: Sequence[RequestState]) -> Mapping[RequestState, Sequence[int]]:
        """Returns drafts for some of the requests that decode in the next step, which is about to
        be planned. No step is in flight. What is kept of a request is in `RequestState.drafts`.

        The drafts of a request are token ids, one at least. None of them ends the request, and
        with one more token it stays within its `length_limit`. Only requests with an output token
        have drafts; members of a group have none.
        """
        del decodes
        return {}

    def needs_output(self, num_running: int) -> bool:
        """Whether it may propose drafts for so many running requests, so that their next step is
        not scheduled before the output of the one in flight."""
        del num_running
        return False

    def note_verified(self, state: RequestState, num_drafts: int, num_accepted: int) -> None:
        """The first `num_drafts` tokens of the request's proposal were computed, and the first
        `num_accepted` of these were right: all where no others can follow. They, and the sample
        after them, are about to be appended."""

    def note_ended(self, state: RequestState) -> None:
        """A request is about to be removed. It still has its sequence, if it had one."""
