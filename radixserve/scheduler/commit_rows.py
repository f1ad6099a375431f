"""`commit_rows`: a step's answer, published row by row and sorted by what is left to be done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixserve.cache import CacheSequence, PrefixCache
from radixserve.schedule import SampleOutput, ScheduledRequest
from radixserve.scheduler.in_batch_sharing import wake_waiters
from radixserve.scheduler.in_flight_step import InFlightStep
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.stats import SchedulerStats
from radixserve.scheduler.waiting_queue import WaitingQueue

Scored = tuple[RequestState, ScheduledRequest, SampleOutput]


class CommittedRows(NamedTuple):
    """The rows of a step whose requests had not ended, by what is left to be done for them."""

    states: list[RequestState]  # those that sampled
    samples: list[SampleOutput]  # what each of them sampled
    scored: list[Scored]  # those whose targets were scored; they may have sampled, too
    failed: list[tuple[RequestState, SampleOutput]]  # nothing was published of them


def commit_rows(
    step: InFlightStep,
    sampled: Sequence[SampleOutput | None],
    cache: PrefixCache,
    waiting: WaitingQueue,
    counts: SchedulerStats,
) -> CommittedRows:
    """Publish the tokens that a step has computed; wakes the requests that wait for them.

    Rows of one generated token, nearly all of most steps, go to the cache in one call.
    """
    states: list[RequestState] = []
    decodes: list[CacheSequence] = []
    samples: list[SampleOutput] = []
    others: list[int] = []  # rows
    num_decode = step.num_decode
    rows = zip(range(num_decode), step.states, step.sequences, sampled, strict=False)
    for at, state, sequence, one in rows:
        if (
            state.sequence is sequence
            and one is not None
            and one.error is None
            and sequence.committed_len >= state.num_prompt
        ):
            states.append(state)
            decodes.append(sequence)
            samples.append(one)
        else:
            others.append(at)
    cache.commit_next(decodes, [state.tokens.last for state in states])
    counts.decoded_tokens += len(decodes)
    for state in states:
        if state.waiters:
            waiting.note_woken(wake_waiters(state))
    found = CommittedRows(states, samples, [], [])
    others += range(num_decode, len(step.states))
    for at in others:
        state, row, other = step.states[at], step.schedule.rows[at], sampled[at]
        if state.sequence is not step.sequences[at]:  # it has ended
            counts.discarded_tokens += len(row.token_ids)
        elif other is not None and other.error is not None:
            found.failed.append((state, other))
        else:
            _commit_row(state, row, counts)
            if state.waiters:
                waiting.note_woken(wake_waiters(state))
            if other is not None and row.logprob_targets is not None:
                found.scored.append((state, row, other))
            if other is not None and row.sample is not None:
                states.append(state)
                samples.append(other)
    return found


def _commit_row(state: RequestState, row: ScheduledRequest, counts: SchedulerStats) -> None:
    """A row of the prompt, or one that is computed once more after a preemption."""
    assert state.sequence is not None
    num_tokens, end = len(row.token_ids), row.end
    state.sequence.commit(end)
    if num_tokens == 1 and end > state.num_prompt:
        counts.decoded_tokens += 1
    else:
        counts.count_prefill(row.start, num_tokens, state.num_prompt_done)
        state.note_committed(end)
