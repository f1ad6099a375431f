"""`InFlightStep`: a launched step that was not collected, and the step planned after it."""

from __future__ import annotations

from collections.abc import Iterator

from radixserve.cache import PrefixCache
from radixserve.schedule import SchedulerOutput
from radixserve.scheduler.batch_builder import BatchBuilder
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests


class InFlightStep:
    """Requests of a step's rows, by object identity: an id may be reused while the step runs."""

    __slots__ = ("rows", "schedule")

    def __init__(self, schedule: SchedulerOutput, plan: BatchBuilder) -> None:
        self.schedule = schedule
        self.rows = plan.states  # each row's request and its sequence at that time

    def living_rows(self) -> Iterator[RequestState]:
        """Requests whose sequence is still that of the row; ending one may end others."""
        return (state for state, sequence in self.rows if state.sequence is sequence)

    def future_indices(self) -> dict[RequestState, int] | None:
        """Index of each drawing request's next token in this step's outputs.

        None where it has beams, which begin, end and share pages by what was drawn: the next step
        cannot be planned before this one's output. All other sampling depends only on the number of
        tokens before, and penalties on token counts that the runner keeps.
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
    """Schedule the running requests assuming that `step` ends only those that reach their length
    limit: decodes, then prefill chunks, by rank.

    False, and nothing is planned, if the step's output is needed first (see
    `InFlightStep.future_indices`) or pages are short: which requests continue and what is free is
    known only from the output, so none is preempted here.
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
    """(is_prefill, rank, state, number of tokens that no step computes yet) of those that continue.

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
