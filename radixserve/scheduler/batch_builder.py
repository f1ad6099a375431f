"""`BatchBuilder`: a step being put together, row by row."""

from __future__ import annotations

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence
from radixserve.schedule import UNKNOWN, SampleSpec, ScheduledRequest, SchedulerOutput
from radixserve.scheduler.request_state import RequestState

_UNKNOWN_TOKEN: IntArray = np.array([UNKNOWN], np.int32)


class BatchBuilder:
    """Collects rows. `budget`: prefill tokens left of `chunked_prefill_size`."""

    def __init__(self, step: int, budget: int) -> None:
        self.budget = budget
        self.is_out_of_pages = False  # a request found no free page: none is admitted
        self.num_ending = 0  # running requests whose last row is in flight
        self.states: list[tuple[RequestState, CacheSequence]] = []  # of each row
        self._step = step
        self._rows: list[ScheduledRequest] = []
        self._arrivals: set[int] = set()
        self._num_decode = 0
        self._copies: list[tuple[int, int, int]] = []

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def has(self, state: RequestState) -> bool:
        return state.arrival in self._arrivals

    def add(
        self, state: RequestState, num_tokens: int, *, is_decode: bool, future_index: int = -1
    ) -> None:
        """Compute `num_tokens` more tokens of `state`, for which its sequence has room.

        `future_index`: of a request whose last token is not known yet, the output that it is.
        """
        sequence = state.sequence
        assert sequence is not None
        end = sequence.length
        start = end - num_tokens
        assert start >= sequence.committed_len
        if is_decode:
            self._num_decode += 1
        else:
            self.budget -= num_tokens
        targets = _targets(state, start, end)
        request = state.request
        num_known = len(state.tokens)
        is_sampled = end >= num_known and (request.logprob_targets is None or request.also_generate)
        self._arrivals.add(state.arrival)
        self.states.append((state, sequence))
        if sequence.cow_copies and start == sequence.committed_len:  # else a step in flight copies
            self._copies += sequence.cow_copies
        spec = _sample_spec(state, end - num_known) if is_sampled else None
        tokens = state.tokens.view(start, end) if future_index < 0 else _UNKNOWN_TOKEN
        pages, first_new = sequence.page_table_delta()
        first_new = first_new if state.is_in_page_table else 0
        state.is_in_page_table = True
        row = ScheduledRequest(
            request.request_id, tokens, start, pages, spec, targets, 0, future_index, first_new,
            state.req_pool_idx,
        )  # fmt: skip
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
        )


def _targets(state: RequestState, start: int, end: int) -> IntArray | None:
    """Targets after the tokens [start, end) that have not been scored yet."""
    targets = state.request.logprob_targets
    if targets is None:
        return None
    first = state.request.score_start
    wanted = targets[max(start - first, state.num_scored) : max(0, end - first)]
    return wanted if len(wanted) else None


def _sample_spec(state: RequestState, num_unknown: int = 0) -> SampleSpec:
    """The sampler's input; cached for a greedy request from min_tokens on. `num_unknown` tokens are
    drawn by the step in flight."""
    if state.greedy_only_spec is not None:
        return state.greedy_only_spec
    request = state.request
    banned: tuple[int, ...] = ()
    min_tokens_pending = state.num_output + num_unknown < request.params.min_tokens
    if min_tokens_pending:
        banned = tuple(sorted(request.end_ids))
    is_plain = state.search is None and not min_tokens_pending
    is_greedy_only = is_plain and request.params.is_greedy_only
    spec = SampleSpec(
        params=request.params,
        seed=request.seed,
        num_prompt=state.num_prompt,
        token_ids=state.tokens.view(),
        banned_ids=banned,
        num_candidates=request.num_candidates,
        num_unknown=0 if is_greedy_only else num_unknown,
    )
    if is_greedy_only:
        state.greedy_only_spec = spec
    return spec
