"""`InFlightStep`: a launched step that was not collected, and the step planned after it."""

from __future__ import annotations

from collections.abc import Iterator

from radixserve.cache import PrefixCache
from radixserve.schedule import SchedulerOutput
from radixserve.scheduler.batch_builder import BatchBuilder
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests


class InFlightStep:
    """Whose rows a step has, by identity: while it is computed a request may end, and another one
    come by the same id."""

    __slots__ = ("rows", "schedule")

    def __init__(self, schedule: SchedulerOutput, plan: BatchBuilder) -> None:
        self.schedule = schedule
        self.rows = plan.states  # the request of each row, and the sequence it had then

    def living_rows(self) -> Iterator[RequestState]:
        """The requests that still wait for their row; one that ends meanwhile may end others."""
        return (state for state, sequence in self.rows if state.sequence is sequence)

    def future_indices(self) -> dict[RequestState, int] | None:
        """Which output of this step is the next token of which request.

        None where it has beams, which begin, end and share pages by what was drawn: the next step
        cannot be planned before this one's answer. For other requests the runner counts tokens with
        penalties, and bans and random numbers go by how many tokens there were before.
        """
        found = {}
        for at, row in enumerate(self.schedule.rows):
            state, sequence = self.rows[at]
            if state.sequence is not sequence:
                continue
            if row.sample is not None:
                if row.sample.num_candidates:
                    return None
                found[state] = at
        return found


def plan_ahead(
    step: InFlightStep, plan: BatchBuilder, running: RunningRequests, cache: PrefixCache
) -> bool:
    """Rows of the running requests, as if `step` had been answered and nobody ended by it but those
    that reach their length: decodes first, then prefill chunks, each in order of rank.

    False, and nothing is planned, where the answer must come first: see
    `InFlightStep.future_indices`; or not all have room. Then pages would have to
    be taken from a request, but which go on and what is free shows only in the answer.
    """
    future_indices = step.future_indices()
    if future_indices is None:
        return False
    wanted, num_pages, budget = [], 0, plan.budget
    for is_prefill, _, state, left in _in_order(running, plan):
        count = min(budget, left) if is_prefill else 1
        if count:
            assert state.sequence is not None
            num_pages += state.sequence.pages_wanted(count)
            budget -= count if is_prefill else 0
            wanted.append((state, count, is_prefill, left))
    if num_pages > cache.num_available:
        return False
    for state, count, is_prefill, left in wanted:
        sequence = state.sequence
        assert sequence is not None
        if left:
            at = sequence.length
            sequence.extend(state.tokens.view(at, at + count))
        else:
            sequence.append_placeholders(1)
        plan.add(
            state,
            count,
            is_decode=not is_prefill,
            future_index=-1 if left else future_indices[state],
        )
    return True


def _in_order(
    running: RunningRequests, plan: BatchBuilder
) -> list[tuple[bool, tuple[int, int], RequestState, int]]:
    """(is_prefill, rank, state, number of tokens that no step computes yet) of those that go on.

    Where that number is 0 the step in flight draws the next token."""
    order = []
    for state in running:
        assert state.sequence is not None
        left = len(state.tokens) - state.sequence.length
        if not left and state.ends_next:
            plan.num_ending += 1
            running.free_slot(state)
        else:
            is_prefill = left > 1 or (left == 1 and not state.only_draws)
            order.append((is_prefill, state.rank, state, left))
    order.sort()  # ranks differ: requests are never compared
    return order
