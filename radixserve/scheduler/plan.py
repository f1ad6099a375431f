"""`StepPlan`: a step being put together, row by row."""

from __future__ import annotations

import numpy as np

from radixserve.arrays import IntArray
from radixserve.schedule import Row, SampleSpec, Schedule, Twin
from radixserve.scheduler.job import Job


class StepPlan:
    """Collects rows; the prefill budget is what is left of `chunk_size`."""

    def __init__(self, step: int, budget: int) -> None:
        self.budget = budget
        self.is_short = False  # somebody had no room: nobody new is admitted
        self._step = step
        self._rows: list[Row] = []
        self._twins: list[Twin] = []
        self._arrivals: set[int] = set()
        self._num_decode = 0
        self._copies: list[tuple[int, int, int]] = []

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def has(self, job: Job) -> bool:
        return job.arrival in self._arrivals

    def add(self, job: Job, num_tokens: int, *, is_decode: bool) -> None:
        """Compute `num_tokens` more tokens of `job`, for which its sequence has room."""
        sequence = job.sequence
        assert sequence is not None
        end = sequence.length
        start = end - num_tokens
        assert start == sequence.committed_len
        if is_decode:
            self._num_decode += 1
        else:
            self.budget -= num_tokens
        targets = _targets(job, start, end)
        request = job.request
        is_sampled = end == len(job.tokens) and (request.targets is None or request.draws)
        if is_sampled:
            at = len(self._rows)
            for twin in job.twins:
                self._twins.append(Twin(twin.request.request_id, at, _sample_spec(twin)))
        self._arrivals.add(job.arrival)
        if sequence.copies:
            self._copies += sequence.copies
        spec = _sample_spec(job) if is_sampled else None
        tokens, pages = job.tokens.view(start, end), sequence.pages
        row = Row(request.request_id, tokens, start, pages, spec, targets)
        if targets is not None and request.draws:
            row = row._replace(num_top=request.params.prompt_logprobs or 0)
        self._rows.append(row)

    def build(self) -> Schedule:
        num_tokens = sum(len(row.token_ids) for row in self._rows)
        return Schedule(
            step=self._step,
            rows=tuple(self._rows),
            copies=np.asarray(self._copies, np.int32).reshape(-1, 3),
            num_prefill_tokens=num_tokens - self._num_decode,
            num_decode_tokens=self._num_decode,
            twins=tuple(self._twins),
        )


def _targets(job: Job, start: int, end: int) -> IntArray | None:
    """What is to be scored behind the last of the tokens [start, end), and was not yet."""
    targets = job.request.targets
    if targets is None:
        return None
    first = job.request.score_start
    wanted = targets[max(start - first, job.num_scored) : max(0, end - first)]
    return wanted if len(wanted) else None


def _sample_spec(job: Job) -> SampleSpec:
    """Of a plain request always the same one, from min_tokens on."""
    if job.plain_spec is not None:
        return job.plain_spec
    request = job.request
    banned: tuple[int, ...] = ()
    is_short = job.num_output < request.params.min_tokens
    if is_short:
        banned = tuple(sorted(request.end_ids))
    spec = SampleSpec(
        params=request.params,
        seed=request.seed,
        num_prompt=job.num_prompt,
        token_ids=job.tokens.view(),
        banned_ids=banned,
        num_candidates=0 if job.head is None else job.num_candidates,
    )
    if request.params.is_plain and not is_short and job.head is None:
        job.plain_spec = spec
    return spec
