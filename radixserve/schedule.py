"""Records exchanged by scheduler and model runner: one step's work and its result.

Plain numpy. The scheduler fills a `SchedulerOutput`, whose rows are stored as columns; the runner
returns a `ModelRunnerOutput`.

A schedule's arrays may be views of the scheduler's own: a runner reads them before `launch`
returns. With overlap the next schedule is made while a step is still being computed. Steps are
computed in order, each one's copies before its rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.request import AdapterUse, SamplingParams
from radixserve.structured_outputs import Matcher

PLACEHOLDER = -1  # in place of a token id that only the device has


class SampleSpec(NamedTuple):
    """The sampler's input for the token after a row's last token."""

    params: SamplingParams
    seed: int  # of the request's own random stream, 64 bits
    num_prompt: int  # `token_ids[:num_prompt]` is the prompt, the rest was generated
    token_ids: IntArray  # [n] prompt and output so far; a view, valid within the step. It may lack
    # the latest tokens if params.is_greedy_only
    banned_ids: tuple[int, ...]  # end tokens that min_tokens still forbids
    num_candidates: int = 0  # for a beam: number of best tokens to return; no token is sampled
    num_placeholders: int = 0  # tokens missing in `token_ids`, which the step before samples
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token ids of each of params.bad_words
    matcher: Matcher | None = None  # of params.structured; only the sampler moves it
    is_greedy_only: bool = False  # the best logit decides. It follows from the other fields, and is
    # stored since it is read for hundreds of rows per step

    @property
    def num_sampled(self) -> int:
        """Number of tokens sampled before this one; not valid if params.is_greedy_only, see
        `token_ids`."""
        return len(self.token_ids) + self.num_placeholders - self.num_prompt

    def after(self, *token_ids: int) -> SampleSpec:
        """Returns the input for the token after those, once they are sampled here."""
        if self.is_greedy_only:
            return self
        is_pending = self.num_sampled + len(token_ids) < self.params.min_tokens
        return self._replace(
            token_ids=np.append(self.token_ids, np.array(token_ids, np.int32)),
            banned_ids=self.banned_ids if is_pending else (),
        )

    @property
    def on_host(self) -> bool:
        """Whether the output is made on the host, which needs all earlier tokens."""
        params = self.params
        # With jump_forward a sample may decide which tokens follow it.
        return self.num_candidates > 0 or params.jumps_forward or bool(params.logits_processors)


class ScheduledRequest(NamedTuple):
    """One sequence's part of a step: the tokens at positions [start, start + len(token_ids))."""

    request_id: str
    token_ids: IntArray  # [n] tokens to compute, n >= 1
    start: int  # position of the first one; K/V of [0, start) is in the pages already
    page_ids: IntArray  # [ceil((start + n) / page_size)] pages of positions [0, start + n)
    sample: SampleSpec | None  # None: a prefill chunk that does not reach the last token
    logprob_targets: IntArray | None = None
    # [k] token ids to score, one after each of the row's last k tokens; where a token is sampled as
    # well, after each of the k tokens before the last one
    num_top_logprobs: int = 0  # number of best tokens to report with each score
    wants_ranks: bool = False  # whether to report each target's rank
    future_index: int = -1
    # index into the previous step's outputs of the token to feed as the row's only token, which is
    # PLACEHOLDER here; -1 where all tokens are known
    first_new_page: int = 0
    # page_ids before this index did not change since the last row of this slot and request; 0 in
    # the first row after the request got the slot
    slot: int = 0  # slot in the page table, 0 <= slot < max_running_requests;
    # distinct within a step

    num_drafts: int = 0
    # number of the row's last tokens that are drafts: guesses of what is sampled. A token is
    # sampled before the first of them, and after each one that equals the sample before it
    state_id: int = -1  # of a model with recurrent layers: the state before the first token, zeros
    # at start 0
    checkpoints: tuple[tuple[int, int], ...] = ()  # (length, state id): also store the state after
    # `length` tokens of the sequence, start < length <= end, under that id
    written_state_id: int = -1  # the state after the last token. It is state_id, or in a row of one
    # token another id, so that the state before the token is kept

    adapter: AdapterUse | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class LogprobTargets(NamedTuple):
    """`ScheduledRequest.logprob_targets` and what to report of them, of a row that has targets."""

    token_ids: IntArray  # [k]
    num_top_logprobs: int
    wants_ranks: bool
    num_after: int = 0  # later tokens of the row, after which nothing is scored or sampled


class RowStates(NamedTuple):
    """The recurrent states of a row, as `ScheduledRequest` has them."""

    state_id: int = -1
    checkpoints: tuple[tuple[int, int], ...] = ()
    written_state_id: int = -1


class ScheduledRows:
    """The R rows of a step as columns. Item i of each list is a field of row i, see
    `ScheduledRequest`. The tokens of all rows are concatenated in `input_ids`.

    Indexing and iteration return rows as `ScheduledRequest`s, made when they are read.
    """

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self.input_ids: array[int] = array("i")  # [T] int32
        self.num_tokens: list[int] = []
        self.starts: list[int] = []
        self.page_ids: list[IntArray] = []
        self.samples: list[SampleSpec | None] = []
        self.first_new_pages: list[int] = []
        self.slots: list[int] = []
        self.future_indices: list[int] = []  # [] if all tokens are known
        self.targets: dict[int, LogprobTargets] = {}  # by row
        # by row: `ScheduledRequest.num_drafts`; never beside targets
        self.drafts: dict[int, int] = {}
        self.states: list[RowStates] = []  # [] if the model has no states
        self.adapters: dict[int, AdapterUse] = {}  # by row, of rows that have one

    @classmethod
    def of(cls, rows: Iterable[ScheduledRequest]) -> ScheduledRows:
        """Returns the columns of `rows`."""
        columns, rows = cls(), tuple(rows)
        for number, row in enumerate(rows):
            columns.request_ids.append(row.request_id)
            columns.input_ids.extend(row.token_ids.tolist())
            columns.num_tokens.append(len(row.token_ids))
            columns.starts.append(row.start)
            columns.page_ids.append(row.page_ids)
            columns.samples.append(row.sample)
            columns.first_new_pages.append(row.first_new_page)
            columns.slots.append(row.slot)
            columns.states.append(RowStates(row.state_id, row.checkpoints, row.written_state_id))
            if row.logprob_targets is not None:
                columns.targets[number] = LogprobTargets(
                    row.logprob_targets, row.num_top_logprobs, row.wants_ranks
                )
            if row.num_drafts:
                columns.drafts[number] = row.num_drafts
            if row.adapter is not None:
                columns.adapters[number] = row.adapter
        if any(row.future_index >= 0 for row in rows):
            columns.future_indices = [row.future_index for row in rows]
        return columns

    def __len__(self) -> int:
        return len(self.request_ids)

    def __getitem__(self, row: int) -> ScheduledRequest:
        """O(rows). Raises IndexError."""
        row = range(len(self.request_ids))[row]
        return self._row(row, sum(self.num_tokens[:row]))

    def __iter__(self) -> Iterator[ScheduledRequest]:
        first = 0
        for row, num_tokens in enumerate(self.num_tokens):
            yield self._row(row, first)
            first += num_tokens

    def _row(self, row: int, first: int) -> ScheduledRequest:
        """first: the index of the row's first token in `input_ids`."""
        targets = self.targets.get(row, LogprobTargets(np.empty(0, np.int32), 0, False))
        states = self.states[row] if self.states else RowStates()
        return ScheduledRequest(
            request_id=self.request_ids[row],
            token_ids=np.frombuffer(self.input_ids, np.int32)[first : first + self.num_tokens[row]],
            start=self.starts[row],
            page_ids=self.page_ids[row],
            sample=self.samples[row],
            logprob_targets=targets.token_ids if row in self.targets else None,
            num_top_logprobs=targets.num_top_logprobs,
            wants_ranks=targets.wants_ranks,
            future_index=self.future_indices[row] if self.future_indices else -1,
            first_new_page=self.first_new_pages[row],
            slot=self.slots[row],
            num_drafts=self.drafts.get(row, 0),
            state_id=states.state_id,
            checkpoints=states.checkpoints,
            written_state_id=states.written_state_id,
            adapter=self.adapters.get(row),
        )


class WindowLayers(NamedTuple):
    """Layers that see a window of positions only, where their K and V have pages of their own."""

    num_pages: int  # number of window pages
    window_size: int  # most positions that a query sees, its own included


class WindowUpdates(NamedTuple):
    """The changes of window pages to apply before a step."""

    pages: IntArray  # [n, 2] (page, its window page from this step on, or -1 for none)
    copies: Sequence[tuple[int, int, int]]  # like `SchedulerOutput.cow_copies`, but of window
    # pages; to be made in order


class SchedulerOutput(NamedTuple):
    """One step: the copies, then one forward over all rows, then a token for each sampled row."""

    step: int
    rows: ScheduledRows
    # [num_copies, 3] (source page, destination page, tokens from the page's start)
    cow_copies: IntArray
    num_prefill_tokens: int
    num_decode_tokens: int
    state_copies: Sequence[tuple[int, int]] = ()  # (source, destination), to be made in order
    windows: WindowUpdates | None = None  # for a cache with window pages


class Candidates(NamedTuple):
    """The best next tokens of a beam, best first; K is num_candidates or all there are."""

    token_ids: IntArray  # [K]
    scores: NDArray[np.float32]  # [K] log-probabilities after penalties and bans, not renormalised
    logprobs: NDArray[np.float32]  # [K] of the model's own distribution


class SampleOutput(NamedTuple):
    """A row's result: a token, or scores. Logprobs are of the model's own distribution."""

    token_id: int
    logprob: float | None = None  # if the request has logprobs
    top_logprobs: tuple[tuple[int, float], ...] = ()  # best first, as many as requested
    error: str | None = None  # why no token could be sampled; the row's K/V must not be kept
    scores: tuple[float, ...] = ()  # log-probabilities of the row's targets; token_id is -1 if no
    # token was to be sampled
    top_scores: tuple[tuple[tuple[int, float], ...], ...] = ()  # best tokens at their positions
    ranks: tuple[int, ...] = ()  # of the row's targets, if asked for: 1 is the most likely token
    candidates: Candidates | None = None  # for a beam; token_id is -1 then
    cause: BaseException | None = None  # the exception of a caller's function behind `error`
    is_complete: bool = False  # the answer's grammar is at its end: no token can follow
    more: tuple[SampleOutput, ...] = ()  # the samples after it, of a row with drafts: one for each
    # draft that equals the sample before it, as far as these are equal


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of a `SchedulerOutput`."""

    outputs: tuple[SampleOutput | None, ...]  # one per row; None if it samples and scores nothing
    seconds: dict[str, float]  # by part of the step: "prepare", "forward", "sample"
