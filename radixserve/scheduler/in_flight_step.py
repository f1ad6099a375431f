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

    def active_rows(self) -> Iterator[RequestState]:
        """Requests whose sequence is still that of the row; ending one may end others."""
        return (state for state, sequence in self.rows if state.sequence is sequence)

    def future_indices(self) -> dict[RequestState, int] | None:
        """Index of each drawing request's next token in this step's outputs.

        None where it has beams, which begin, end and share pages by what was drawn, or draws by a
        caller's function: the next step cannot be planned before this one's output. All other
        sampling depends only on the number of tokens before, penalties on token counts that the
        runner keeps, and bad words on a last token that the device compares.
        """
        found = {}
        for at, (state, sequence) in enumerate(self.rows):
            spec = self.schedule.rows[at].sample
            if spec is None or state.sequence is not sequence:
                continue
            if spec is not state.greedy_only_spec and spec.on_host:
                return None
            found[state] = at
        return found


def plan_ahead(
    step: InFlightStep, plan: BatchBuilder, running: RunningRequests, cache: PrefixCache
) -> bool:
    """Schedule the running requests assuming that `step` ends only those that reach their length
    limit: decodes, then prefill chunks, by priority.

    False, and nothing is planned, if the step's output is needed first (see
    `InFlightStep.future_indices`) or pages are short: which requests continue and what is free is
    known only from the output, so none is preempted here.
    """
    future_indices = step.future_indices()
    if future_indices is None:
        return False
    rows, num_pages, budget, size = [], 0, plan.budget, cache.page_size
    for is_prefill, _, state, left in _in_order(running):
        assert state.sequence is not None
        length = state.sequence.length
        if not is_prefill:
            num_pages += length % size == 0
            rows.append((state, 1, False, left))
        elif count := min(budget, left):
            num_pages += -(-(length + count) // size) - -(-length // size)
            budget -= count
            rows.append((state, count, True, left))
    if num_pages > cache.num_available:
        return False
    for state, count, is_prefill, left in rows:
        sequence = state.sequence
        assert sequence is not None
        if left:
            at = sequence.length
            sequence.extend(state.tokens.view(at, at + count))
            plan.add(state, count, is_decode=not is_prefill)
        else:
            sequence.append_placeholders(1)
            plan.add_unknown(state, sequence, future_indices[state])
    return True


def _in_order(
    running: RunningRequests,
) -> list[tuple[bool, tuple[int, int], RequestState, int]]:
    """(is_prefill, priority_key, state, tokens that no step computes yet) of those that continue.

    Where that number is 0 the step in flight draws the next token. Those that end have no slot."""
    order = []
    for state in running:
        if state.req_pool_idx >= 0:
            assert state.sequence is not None
            left = state.tokens.size - state.sequence.length
            is_prefill = left > 0 and (left > 1 or not state.is_scored)
            order.append((is_prefill, state.priority_key, state, left))
    order.sort()  # ranks differ: requests are never compared
    return order
