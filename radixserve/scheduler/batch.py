"""`Batch`: a step's rows, collected column by column, and their requests while it is in flight."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, PrefixCache
from radixserve.cache.layers import CacheLayers
from radixserve.request import FIRST_PICTURE_ID, unmarked
from radixserve.schedule import (
    PLACEHOLDER,
    LogprobTargets,
    SampleOutput,
    SampleSpec,
    ScheduledRows,
    SchedulerOutput,
)
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.running_requests import RunningRequests

# Tokens of the budget that a token takes beside decode rows if it is scored. Its logits and their
# sum take about as long as the rest of its pass through a small model.
_SCORED_COST = 2
_NO_COPIES: IntArray = np.empty((0, 3), np.int32)


class Batch:
    """One step. Rows are added while it is planned; `schedule` is what the runner gets.

    Decode rows come first. A row's request is known by object identity: another request may use its
    id while the step is in flight. `token_budget`: prefill tokens left of `chunked_prefill_size`.
    Drafts take of it, too, and guesses at most half, so that no step is larger than with prefill
    alone.
    """

    def __init__(self, step: int, token_budget: int) -> None:
        self.token_budget = token_budget
        self.guess_budget = token_budget // 2
        self.is_out_of_pages = False  # a request found no free page: none is admitted
        self.begun_at = 0.0  # when it was dispatched, on the scheduler's clock
        self.num_ending_in_flight = 0  # running requests whose last row is in flight
        self.states: list[RequestState] = []  # [R] each row's request
        self.sequences: list[CacheSequence] = []  # [R] and its sequence at that time
        self.schedule: SchedulerOutput | None = None  # set by `build`
        self._step = step
        self._rows = ScheduledRows()
        self._planned: set[RequestState] = set()  # see `has`
        self.num_decode_rows = 0  # rows of one token that decode
        self.forced: dict[int, IntArray] = {}  # by row its drafts, where no others can follow
        # Rows that are sampled on the host, or sample an unknown number of tokens.
        self._deciding_rows: list[tuple[RequestState, CacheSequence]] = []
        self._num_decode = self._num_prefill = 0  # tokens
        self._copies: list[tuple[int, int, int]] = []

    # -- planning -----------------------------------------------------------------------------

    def has_slots(self, running: RunningRequests) -> bool:
        """Whether it has prefill tokens and a slot left for a waiting request."""
        num_running = len(running) - self.num_ending_in_flight
        return self.token_budget > 0 and num_running < running.max_requests

    def has(self, state: RequestState) -> bool:
        """Whether the request has a row."""
        if len(self._planned) < len(self.states):
            self._planned = set(self.states)
        return state in self._planned

    def tokens_left(self, state: RequestState, num_kept: int = 0) -> int:
        """Prefill tokens of a request that the budget, but for `num_kept` of it, is enough for."""
        cost = _token_cost(state, has_decodes=self._num_decode > 0)
        return (self.token_budget - num_kept) // cost

    def add(self, state: RequestState, num_tokens: int, *, is_decode: bool) -> None:
        """Compute the last `num_tokens` tokens of the request's sequence."""
        sequence, tokens, rows = state.sequence, state.tokens, self._rows
        assert sequence is not None
        end = sequence.length
        start = end - num_tokens
        assert start >= sequence.committed_len
        if is_decode:
            assert self.num_decode_rows == len(self.states), "decodes come first"
            self.num_decode_rows += 1
            self._num_decode += 1
        else:
            self._num_prefill += num_tokens
            self.token_budget -= num_tokens * _token_cost(state, has_decodes=self._num_decode > 0)
        if num_tokens == 1 and end == tokens.size:
            rows.input_ids.append(tokens.last)
        else:
            rows.input_ids.frombytes(tokens.view(start, end).tobytes())
        if state.scores is not None:
            self._add_targets(state, start, end)
        spec, request = None, state.request
        if end >= tokens.size and request.has_answer:
            spec = state.greedy_only_spec or self._make_spec(state, sequence, end - tokens.size)
        self._add_row(state, sequence, num_tokens, spec)

    def add_drafted(self, state: RequestState, num_drafts: int, *, is_forced: bool) -> None:
        """Compute the request's last token and the drafts after it, its sequence's last tokens.

        Drafts are verified. is_forced: no other tokens can follow, so that one token is sampled,
        after the last of them.
        """
        sequence, rows = state.sequence, self._rows
        assert sequence is not None
        start = state.tokens.size - 1
        assert sequence.committed_len == start == sequence.length - num_drafts - 1
        assert start >= state.num_prompt
        tokens = sequence.tokens[start:]
        rows.input_ids.frombytes(tokens.tobytes())
        self._num_decode += 1 + num_drafts
        self.token_budget -= num_drafts
        self._deciding_rows.append((state, sequence))
        spec = state.greedy_only_spec or self._make_spec(state, sequence, 0)
        if is_forced:
            self.forced[len(self.states)] = tokens[1:].copy()
            spec = spec.after(*tokens[1:].tolist())
        else:
            self.guess_budget -= num_drafts
            rows.drafts[len(self.states)] = num_drafts
        self._add_row(state, sequence, 1 + num_drafts, spec)

    def _add_row(
        self,
        state: RequestState,
        sequence: CacheSequence,
        num_tokens: int,
        spec: SampleSpec | None,
    ) -> None:
        rows, start = self._rows, sequence.length - num_tokens
        if sequence.cow_copies and start == sequence.committed_len:  # else a step in flight copies
            self._copies += sequence.cow_copies
        pages, first_new_page = sequence.take_page_table_delta()
        self.states.append(state)
        self.sequences.append(sequence)
        rows.request_ids.append(state.request_id)
        rows.num_tokens.append(num_tokens)
        rows.starts.append(start)
        rows.page_ids.append(pages)
        rows.samples.append(spec)
        rows.first_new_pages.append(first_new_page)
        rows.slots.append(state.slot)
        if rows.future_indices:
            rows.future_indices.append(-1)

    def add_decodes(
        self,
        states: Sequence[RequestState],
        sequences: Sequence[CacheSequence],
        future_indices: Sequence[int] | None = None,
    ) -> None:
        """Compute the last token of each sequence. Before all other rows.

        future_indices: that token is a placeholder, which output `future_indices[i]` of the step in
        flight samples; None: all tokens are known.
        """
        assert not self.states
        self.states += states
        self.sequences += sequences
        self._num_decode = self.num_decode_rows = num_rows = len(states)
        rows = self._rows
        rows.num_tokens = [1] * num_rows
        num_placeholders = 0
        if future_indices is not None:
            rows.input_ids = array("i", (PLACEHOLDER,)) * num_rows
            rows.future_indices += future_indices
            num_placeholders = 1
        for state, sequence in zip(states, sequences, strict=True):
            pages, first_new_page = sequence.take_page_table_delta()
            rows.request_ids.append(state.request_id)
            rows.starts.append(sequence.length - 1)
            rows.page_ids.append(pages)
            rows.samples.append(
                state.greedy_only_spec or self._make_spec(state, sequence, num_placeholders)
            )
            rows.first_new_pages.append(first_new_page)
            rows.slots.append(state.slot)
            if not num_placeholders:
                rows.input_ids.append(state.tokens.last)
                if sequence.cow_copies:  # of a fork; else a step in flight has made them
                    self._copies += sequence.cow_copies

    def build(self, layers: CacheLayers | None, *, has_adapters: bool = False) -> SchedulerOutput:
        """Set and return `schedule`, with what the cache's `layers` need of the step.
        has_adapters: requests may have some."""
        copies, updates = self._copies, {}
        if has_adapters:
            self._name_adapters()
        if layers is not None:
            updates = layers.plan_step(self.sequences, self._rows)
        self.schedule = SchedulerOutput(
            step=self._step,
            rows=self._rows,
            cow_copies=np.array(copies, np.int32) if copies else _NO_COPIES,
            num_prefill_tokens=self._num_prefill,
            num_decode_tokens=self._num_decode,
            **updates,
        )
        return self.schedule

    def _name_adapters(self) -> None:
        """Name the adapters of the rows, and take their marks off the tokens."""
        rows = self._rows
        for row, state in enumerate(self.states):
            if (adapter := state.request.adapter) is not None:
                rows.adapters[row] = adapter
        if any(adapter.mark for adapter in rows.adapters.values()):
            input_ids = np.frombuffer(rows.input_ids, np.int32)
            input_ids[:] = unmarked(input_ids)

    # -- in flight ----------------------------------------------------------------------------

    def active_rows(self) -> Iterator[RequestState]:
        """Requests whose sequence is still that of their row; ending one may end others."""
        rows = zip(self.states, self.sequences, strict=True)
        return (state for state, sequence in rows if state.sequence is sequence)

    @property
    def decides_next(self) -> bool:
        """Whether the next step cannot be planned before this one's output.

        It has rows of a `RequestGroup`, whose members begin, end and share pages by what was
        sampled, rows with drafts, which sample an unknown number of tokens, or samples by a
        caller's function. All other sampling depends only on the number of tokens before, penalties
        on token counts that the runner keeps, and bad words on a last token that the device
        compares.
        """
        return any(state.sequence is sequence for state, sequence in self._deciding_rows)

    # -- inside -------------------------------------------------------------------------------

    def _make_spec(
        self, state: RequestState, sequence: CacheSequence, num_placeholders: int
    ) -> SampleSpec:
        spec = _sample_spec(state, num_placeholders)
        if spec.on_host:
            self._deciding_rows.append((state, sequence))
        return spec

    def _add_targets(self, state: RequestState, start: int, end: int) -> None:
        """Score the tokens after [start, end) that have not been scored yet, in the next row."""
        request, scores = state.request, state.scores
        assert request.logprob_targets is not None
        assert scores is not None
        first = request.score_start
        wanted = request.logprob_targets[
            max(start - first, scores.num_scored) : max(0, end - first)
        ]
        if len(wanted):
            is_sampled = request.has_answer and end >= state.tokens.size
            num_after = end - first - len(request.logprob_targets) - is_sampled
            self._rows.targets[len(self.states)] = LogprobTargets(
                *(wanted, request.num_top_logprobs, request.also_generate), max(0, num_after)
            )


def after_forced(drafts: IntArray, sample: SampleOutput) -> SampleOutput:
    """Returns the samples of a row whose drafts were forced: those, then `sample`."""
    first, *more = map(SampleOutput, drafts.tolist())
    return first._replace(more=(*more, sample))


def _token_cost(state: RequestState, *, has_decodes: bool) -> int:
    """What a prefill token of a request takes of the budget of a step with, or without, decodes."""
    return _SCORED_COST if has_decodes and not state.is_scored else 1


def _sample_spec(state: RequestState, num_placeholders: int = 0) -> SampleSpec:
    """The sampler's input; kept in `greedy_only_spec` for a greedy request from min_tokens on.

    `num_placeholders`: tokens of the request that the step in flight samples.
    """
    request = state.request
    banned: tuple[int, ...] = ()
    min_tokens_pending = state.num_output + num_placeholders < request.params.min_tokens
    if min_tokens_pending:
        banned = tuple(sorted(request.end_ids))
    if request.grammar is not None and state.matcher is None:
        state.matcher = request.grammar.matcher(request.end_ids)
    is_plain = state.group is None and not min_tokens_pending
    is_greedy_only = is_plain and request.params.is_greedy_only
    token_ids = state.tokens.view()
    if state.token_mark:
        token_ids = unmarked(token_ids)
    if pictures := request.pictures:
        token_ids = np.where(token_ids < FIRST_PICTURE_ID, token_ids, pictures[0].placeholder_id)
    spec = SampleSpec(
        params=request.params,
        seed=request.seed,
        num_prompt=state.num_prompt,
        token_ids=token_ids,
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


def plan_ahead(
    step: Batch,
    batch: Batch,
    running: RunningRequests,
    cache: PrefixCache,
    tokens_to_keep: Callable[[Batch, Sequence[RequestState]], int],
) -> bool:
    """Add the rows of the running requests to `batch`, assuming that `step`, which is in flight,
    ends only those that reach their length limit: decodes, then prefill chunks, by priority.

    tokens_to_keep(batch, prefills): tokens that the chunks leave to waiting requests.

    False, and nothing is planned, if the step's output is needed first (see `Batch.decides_next`)
    or pages are short: which requests continue and what is free is known only from the output, so
    none is preempted here.
    """
    if step.decides_next:
        return False
    sampled: list[RequestState] = []  # the step in flight samples the next token
    decodes: list[RequestState] = []
    prefills: list[RequestState] = []
    num_pages, size = 0, cache.page_size
    for state in running.by_priority():
        sequence = state.sequence
        assert sequence is not None
        length = sequence.length
        left = state.tokens.size - length  # tokens that no step computes yet
        if left <= 0 and state.is_ending:  # by the step in flight
            running.free_slot(state)
            batch.num_ending_in_flight += 1
        elif left <= 0:
            sampled.append(state)
            num_pages += length % size == 0
        elif left == 1 and state.is_scored:
            decodes.append(state)
            num_pages += length % size == 0
        else:
            prefills.append(state)
    chunks, token_budget = [], batch.token_budget - tokens_to_keep(batch, prefills)
    for state in running.prefill_order(prefills, token_budget):
        assert state.sequence is not None
        length = state.sequence.length
        cost = _token_cost(state, has_decodes=bool(sampled or decodes))
        count = min(token_budget // cost, state.tokens.size - length)
        if count > 0:
            count = state.chunk_len(length, count)
            num_pages += -(-(length + count) // size) - -(-length // size)
            token_budget -= count * cost
            chunks.append((state, count))
    if num_pages > cache.num_obtainable(num_pages):
        return False
    sequences = [state.sequence for state in sampled if state.sequence is not None]
    cache.append_next(sequences)
    output_of = dict(zip(step.states, range(len(step.states)), strict=True))
    batch.add_decodes(sampled, sequences, [output_of[state] for state in sampled])
    for state in decodes:
        _extend(batch, state, 1, is_decode=True)
    for state, count in chunks:
        _extend(batch, state, count, is_decode=False)
    return True


def _extend(batch: Batch, state: RequestState, count: int, *, is_decode: bool) -> None:
    """Compute the next `count` tokens of the request, which are known."""
    sequence = state.sequence
    assert sequence is not None
    start = sequence.length
    sequence.extend(state.tokens.view(start, start + count))
    batch.add(state, count, is_decode=is_decode)
