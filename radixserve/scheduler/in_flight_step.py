"""`InFlightStep`: a launched step that was not collected, and the step planned after it."""

from __future__ import annotations

from collections.abc import Iterator

from radixserve.cache import CacheSequence, PrefixCache
from radixserve.schedule import SchedulerOutput
from radixserve.scheduler.batch_builder import BatchBuilder
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests


class InFlightStep:
    """Requests of a step's rows, by object identity: an id may be reused while the step runs."""

    __slots__ = ("_on_host", "rows", "schedule")

    def __init__(self, schedule: SchedulerOutput, batch: BatchBuilder) -> None:
        self.schedule = schedule
        self.rows = batch.states  # each row's request and its sequence at that time
        self._on_host = batch.on_host  # those that draw on the host

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
        if any(state.sequence is sequence for state, sequence in self._on_host):
            return None
        pairs = zip(self.rows, self.schedule.rows, strict=True)
        return {
            state: at
            for at, ((state, sequence), row) in enumerate(pairs)
            if row.sample is not None and state.sequence is sequence
        }


def plan_ahead(
    step: InFlightStep, batch: BatchBuilder, running: RunningRequests, cache: PrefixCache
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
    decodes, prefills, num_pages, size = [], [], 0, cache.page_size
    for state in running:
        if state.req_pool_idx < 0:  # the step in flight ends it
            continue
        sequence = state.sequence
        assert sequence is not None
        length = sequence.length
        left = state.tokens.size - length  # tokens that no step computes yet
        if left > 0 and (left > 1 or not state.is_scored):
            prefills.append((state.priority_key, state, sequence, left))
        else:
            num_pages += length % size == 0
            decodes.append((state.priority_key, state, sequence, left))
    decodes.sort()  # keys differ: requests are never compared
    chunks, budget = [], batch.budget
    for _, state, sequence, left in sorted(prefills):
        if count := min(budget, left):
            length = sequence.length
            num_pages += -(-(length + count) // size) - -(-length // size)
            budget -= count
            chunks.append((state, sequence, count))
    if num_pages > cache.num_obtainable(num_pages):
        return False
    for _, state, sequence, left in decodes:
        if left:
            _extend(batch, state, sequence, 1, is_decode=True)
        else:  # the step in flight draws its next token
            sequence.append_placeholders(1)
            batch.add_placeholder(state, sequence, future_indices[state])
    for state, sequence, count in chunks:
        _extend(batch, state, sequence, count, is_decode=False)
    return True


def _extend(
    batch: BatchBuilder,
    state: RequestState,
    sequence: CacheSequence,
    count: int,
    *,
    is_decode: bool,
) -> None:
    """Compute the next `count` tokens of `state`, which are known."""
    at = sequence.length
    sequence.extend(state.tokens.view(at, at + count))
    batch.add(state, count, is_decode=is_decode)
