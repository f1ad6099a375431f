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

    __slots__ = ("_on_host", "num_decode", "schedule", "sequences", "states")

    def __init__(self, schedule: SchedulerOutput, batch: BatchBuilder) -> None:
        self.schedule = schedule
        self.states = batch.states  # each row's request
        self.sequences = batch.sequences  # and its sequence at that time
        self.num_decode = schedule.num_decode_tokens  # leading rows, of one token each
        self._on_host = batch.on_host  # those that sample on the host

    def active_rows(self) -> Iterator[RequestState]:
        """Requests whose sequence is still that of the row; ending one may end others."""
        rows = zip(self.states, self.sequences, strict=True)
        return (state for state, sequence in rows if state.sequence is sequence)

    @property
    def decides_next(self) -> bool:
        """Whether the next step cannot be planned before this one's output.

        It has beams, which begin, end and share pages by what was sampled, or samples by a caller's
        function. All other sampling depends only on the number of tokens before, penalties on token
        counts that the runner keeps, and bad words on a last token that the device compares.
        """
        return any(state.sequence is sequence for state, sequence in self._on_host)


def plan_ahead(
    step: InFlightStep, batch: BatchBuilder, running: RunningRequests, cache: PrefixCache
) -> bool:
    """Schedule the running requests assuming that `step` ends only those that reach their length
    limit: decodes, then prefill chunks, by priority.

    False, and nothing is planned, if the step's output is needed first (see
    `InFlightStep.decides_next`) or pages are short: which requests continue and what is free is
    known only from the output, so none is preempted here.
    """
    if step.decides_next:
        return False
    sampled: list[RequestState] = []  # the step in flight samples the next token
    decodes: list[RequestState] = []
    prefills: list[tuple[RequestState, int]] = []
    num_pages, size = 0, cache.page_size
    for state in running.by_priority():
        sequence = state.sequence
        assert sequence is not None
        length = sequence.length
        left = state.tokens.size - length  # tokens that no step computes yet
        if left <= 0 and state.is_ending:  # by the step in flight
            running.free_slot(state)
            batch.num_ending += 1
        elif left <= 0:
            sampled.append(state)
            num_pages += length % size == 0
        elif left == 1 and state.is_scored:
            decodes.append(state)
            num_pages += length % size == 0
        else:
            prefills.append((state, left))
    chunks, token_budget = [], batch.token_budget
    for state, left in prefills:
        if count := min(token_budget, left):
            assert state.sequence is not None
            length = state.sequence.length
            num_pages += -(-(length + count) // size) - -(-length // size)
            token_budget -= count
            chunks.append((state, count))
    if num_pages > cache.num_obtainable(num_pages):
        return False
    sequences = [state.sequence for state in sampled if state.sequence is not None]
    cache.append_placeholder(sequences)
    output_of = dict(zip(step.states, range(len(step.states)), strict=True))
    batch.add_placeholders(sampled, sequences, [output_of[state] for state in sampled])
    for state in decodes:
        _extend(batch, state, 1, is_decode=True)
    for state, count in chunks:
        _extend(batch, state, count, is_decode=False)
    return True


def _extend(batch: BatchBuilder, state: RequestState, count: int, *, is_decode: bool) -> None:
    """Compute the next `count` tokens of `state`, which are known."""
    sequence = state.sequence
    assert sequence is not None
    at = sequence.length
    sequence.extend(state.tokens.view(at, at + count))
    batch.add(state, count, is_decode=is_decode)
