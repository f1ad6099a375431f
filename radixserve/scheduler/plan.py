"""`BatchBuilder`: a step being put together, row by row."""

from __future__ import annotations

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence
from radixserve.schedule import UNKNOWN, SampleSpec, ScheduledRequest, SchedulerOutput, Twin
from radixserve.scheduler.job import RequestState

_UNKNOWN_TOKEN: IntArray = np.array([UNKNOWN], np.int32)


class BatchBuilder:
    """Collects rows; the prefill budget is what is left of `chunked_prefill_size`."""

    def __init__(self, step: int, budget: int) -> None:
        self.budget = budget
        self.is_short = False  # somebody had no room: nobody new is admitted
        self.num_ending = 0  # running jobs that have no row since the step in flight is their last
        self.jobs: list[tuple[RequestState, CacheSequence]] = []  # of each row
        self.twin_jobs: list[tuple[RequestState, RequestState]] = []  # each twin and its first one
        self._step = step
        self._rows: list[ScheduledRequest] = []
        self._twins: list[Twin] = []
        self._arrivals: set[int] = set()
        self._num_decode = 0
        self._copies: list[tuple[int, int, int]] = []

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def has(self, job: RequestState) -> bool:
        return job.arrival in self._arrivals

    def add(
        self, job: RequestState, num_tokens: int, *, is_decode: bool, future_index: int = -1
    ) -> None:
        """Compute `num_tokens` more tokens of `job`, for which its sequence has room.

        `future_index`: of a job whose last token is not known yet, the output that it is.
        """
        sequence = job.sequence
        assert sequence is not None
        end = sequence.length
        start = end - num_tokens
        assert start >= sequence.committed_len
        if is_decode:
            self._num_decode += 1
        else:
            self.budget -= num_tokens
        targets = _targets(job, start, end)
        request = job.request
        num_known = len(job.tokens)
        is_sampled = end >= num_known and (request.logprob_targets is None or request.also_generate)
        if is_sampled:
            at = len(self._rows)
            for twin in job.twins:
                self._twins.append(Twin(twin.request.request_id, at, _sample_spec(twin)))
                self.twin_jobs.append((twin, job))
        self._arrivals.add(job.arrival)
        self.jobs.append((job, sequence))
        if (
            sequence.cow_copies and start == sequence.committed_len
        ):  # else a step in flight makes them
            self._copies += sequence.cow_copies
        spec = _sample_spec(job, end - num_known) if is_sampled else None
        tokens = job.tokens.view(start, end) if future_index < 0 else _UNKNOWN_TOKEN
        pages, first_new = sequence.page_table_delta()
        name = request.request_id
        row = ScheduledRequest(
            name, tokens, start, pages, spec, targets, 0, future_index, first_new
        )
        if targets is not None and request.also_generate:
            row = row._replace(num_top_logprobs=request.params.prompt_logprobs or 0)
        self._rows.append(row)

    def build(self) -> SchedulerOutput:
        num_tokens = sum(len(row.token_ids) for row in self._rows)
        return SchedulerOutput(
            step=self._step,
            rows=tuple(self._rows),
            cow_copies=np.asarray(self._copies, np.int32).reshape(-1, 3),
            num_prefill_tokens=num_tokens - self._num_decode,
            num_decode_tokens=self._num_decode,
            twins=tuple(self._twins),
        )


def _targets(job: RequestState, start: int, end: int) -> IntArray | None:
    """What is to be scored behind the last of the tokens [start, end), and was not yet."""
    targets = job.request.logprob_targets
    if targets is None:
        return None
    first = job.request.score_start
    wanted = targets[max(start - first, job.num_scored) : max(0, end - first)]
    return wanted if len(wanted) else None


def _sample_spec(job: RequestState, num_unknown: int = 0) -> SampleSpec:
    """Of a plain request always the same one, from min_tokens on. `num_unknown` tokens are drawn by
    the step in flight."""
    if job.greedy_only_spec is not None:
        return job.greedy_only_spec
    request = job.request
    banned: tuple[int, ...] = ()
    is_short = job.num_output + num_unknown < request.params.min_tokens
    if is_short:
        banned = tuple(sorted(request.end_ids))
    is_greedy_only = request.params.is_greedy_only and not is_short and job.head is None
    spec = SampleSpec(
        params=request.params,
        seed=request.seed,
        num_prompt=job.num_prompt,
        token_ids=job.tokens.view(),
        banned_ids=banned,
        num_candidates=0 if job.head is None else job.num_candidates,
        num_unknown=0 if is_greedy_only else num_unknown,
    )
    if is_greedy_only:
        job.greedy_only_spec = spec
    return spec
