"""`BatchBuilder`: a step being put together, row by row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, PrefixCache
from radixserve.cache.sequence import NO_STATE
from radixserve.schedule import (
    PLACEHOLDER,
    SampleSpec,
    ScheduledRequest,
    SchedulerOutput,
    new_tuple,
)
from radixserve.scheduler.request_state import RequestState

_PLACEHOLDER_TOKEN: IntArray = np.array([PLACEHOLDER], np.int32)


class BatchBuilder:
    """Collects rows. `token_budget`: prefill tokens left of `chunked_prefill_size`."""

    def __init__(self, step: int, token_budget: int) -> None:
        self.token_budget = token_budget
        self.is_out_of_pages = False  # a request found no free page: none is admitted
        self.num_ending = 0  # running requests whose last row is in flight
        self.states: list[RequestState] = []  # of each row
        self.sequences: list[CacheSequence] = []  # of each row
        self.on_host: list[tuple[RequestState, CacheSequence]] = []  # of rows that sample there
        self._step = step
        self._rows: list[ScheduledRequest] = []
        self._planned: set[RequestState] = set()  # see `has`
        self._num_decode = self._num_prefill = 0  # tokens
        self._copies: list[tuple[int, int, int]] = []
        self._state_copies: list[tuple[int, int]] = []

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def has(self, state: RequestState) -> bool:
        if len(self._planned) < len(self.states):
            self._planned = set(self.states)
        return state in self._planned

    def add(self, state: RequestState, num_tokens: int, *, is_decode: bool) -> None:
        """Compute `num_tokens` more tokens of `state`, for which its sequence has room."""
        sequence = state.sequence
        assert sequence is not None
        end = sequence.length
        start = end - num_tokens
        assert start >= sequence.committed_len
        if is_decode:
            assert self._num_decode == len(self._rows), "decodes come first"
            self._num_decode += 1
        else:
            self._num_prefill += num_tokens
            self.token_budget -= num_tokens
        request = state.request
        targets = None if request.logprob_targets is None else _targets(state, start, end)
        num_known, spec = state.tokens.size, None
        if end >= num_known and (request.logprob_targets is None or request.also_generate):
            spec = state.greedy_only_spec or self._make_spec(state, sequence, end - num_known)
        self.states.append(state)
        self.sequences.append(sequence)
        if sequence.cow_copies and start == sequence.committed_len:  # else a step in flight copies
            self._copies += sequence.cow_copies
        pages, first_new = sequence.take_page_table_delta()
        first_new = first_new if state.is_in_page_table else 0
        state.is_in_page_table = True
        row = ScheduledRequest(
            state.request_id, state.tokens.view(start, end), start, pages, spec, targets, 0, -1,
            first_new, state.req_pool_idx,
        )  # fmt: skip
        if targets is not None and request.also_generate:
            row = row._replace(num_top_logprobs=request.params.prompt_logprobs or 0)
        self._rows.append(row)

    def add_states(self, cache: PrefixCache) -> None:
        """Name the recurrent state of each row and those that are kept of it. After all rows."""
        rows = list(zip(self._rows, self.sequences, strict=True))
        kept = [sequence.take_checkpoints(row.start) for row, sequence in rows]
        # Last of all: what `take_checkpoints` evicts no row of this step may read.
        states = [sequence.step_states(is_ahead=row.future_index >= 0) for row, sequence in rows]
        self._rows = [
            row._replace(state_id=read, checkpoints=checkpoints, written_state_id=written)
            for (row, _), (read, written), checkpoints in zip(rows, states, kept, strict=True)
        ]
        self._state_copies = cache.take_state_copies()

    def add_placeholders(
        self,
        states: Sequence[RequestState],
        sequences: Sequence[CacheSequence],
        future_indices: Sequence[int],
    ) -> None:
        """Compute the last token of each state's sequence, a placeholder: the token that output
        `future_indices[i]` of the step in flight samples. Before all other rows."""
        assert not self._rows
        self._num_decode = len(states)
        self.states += states
        self.sequences += sequences
        append = self._rows.append
        for state, sequence, future_index in zip(states, sequences, future_indices, strict=True):
            pages, first_new = sequence.take_page_table_delta()
            spec = state.greedy_only_spec or self._make_spec(state, sequence, 1)
            values = (
                state.request_id, _PLACEHOLDER_TOKEN, sequence.length - 1, pages, spec, None, 0,
                future_index, first_new, state.req_pool_idx, NO_STATE, (), NO_STATE,
            )  # fmt: skip
            append(new_tuple(ScheduledRequest, values))

    def _make_spec(
        self, state: RequestState, sequence: CacheSequence, num_placeholders: int
    ) -> SampleSpec:
        spec = _sample_spec(state, num_placeholders)
        if spec.on_host:
            self.on_host.append((state, sequence))
        return spec

    def build(self, cache: PrefixCache) -> SchedulerOutput:
        return SchedulerOutput(
            step=self._step,
            rows=tuple(self._rows),
            cow_copies=np.asarray(self._copies, np.int32).reshape(-1, 3),
            num_prefill_tokens=self._num_prefill,
            num_decode_tokens=self._num_decode,
            state_copies=self._state_copies,
            windows=cache.take_window_updates(),
        )


def _targets(state: RequestState, start: int, end: int) -> IntArray | None:
    """Targets after the tokens [start, end) that have not been scored yet."""
    targets, scores = state.request.logprob_targets, state.scores
    if targets is None or scores is None:
        return None
    first = state.request.score_start
    wanted = targets[max(start - first, scores.num_scored) : max(0, end - first)]
    return wanted if len(wanted) else None


def _sample_spec(state: RequestState, num_placeholders: int = 0) -> SampleSpec:
    """The sampler's input; kept in `greedy_only_spec` for a greedy request from min_tokens on.
    `num_placeholders` tokens are sampled by the step in flight."""
    request = state.request
    banned: tuple[int, ...] = ()
    min_tokens_pending = state.num_output + num_placeholders < request.params.min_tokens
    if min_tokens_pending:
        banned = tuple(sorted(request.end_ids))
    if request.grammar is not None and state.matcher is None:
        state.matcher = request.grammar.matcher(request.end_ids)
    is_plain = state.search is None and not min_tokens_pending
    is_greedy_only = is_plain and request.params.is_greedy_only
    spec = SampleSpec(
        params=request.params,
        seed=request.seed,
        num_prompt=state.num_prompt,
        token_ids=state.tokens.view(),
        banned_ids=banned,
        num_candidates=request.num_candidates,
        num_placeholders=0 if is_greedy_only else num_placeholders,
        bad_words_ids=request.bad_words_ids,
        matcher=state.matcher,
        is_greedy_only=is_greedy_only,
    )
    if is_greedy_only:
        state.greedy_only_spec = spec
    return spec
