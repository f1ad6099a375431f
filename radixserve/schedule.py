"""Records exchanged by scheduler and model runner: one step's work and its result.

Plain numpy. The scheduler fills a `SchedulerOutput`, the runner answers it with a
`ModelRunnerOutput`. Records of one row are NamedTuples: they take a third of a frozen dataclass's
time to make.

A schedule's arrays may be views of the scheduler's own: a runner reads them before `launch`
returns. With overlap the next schedule is made while a step is still being computed. Steps are
computed in order, each one's copies before its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.request import SamplingParams
from radixserve.structured_output import Matcher

PLACEHOLDER = -1  # placeholder of a token id that only the device has
new_tuple = tuple.__new__  # of a NamedTuple and all its values: half the price of its constructor


class SampleSpec(NamedTuple):
    """Input of the sampler for the token that follows a row."""

    params: SamplingParams
    seed: int  # of the request's own random stream, 64 bits
    num_prompt: int  # `token_ids[:num_prompt]` is the prompt, the rest was generated
    token_ids: IntArray  # [n] prompt and output so far; a view, read it within the step. Where
    # params.is_greedy_only it may lack the latest ones
    banned_ids: tuple[int, ...]  # end tokens that min_tokens still forbids
    num_candidates: int = 0  # of a beam: the best tokens wanted; none is sampled then
    num_placeholders: int = 0  # tokens that `token_ids` lacks: the step before samples them
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token ids of each of params.bad_words
    matcher: Matcher | None = None  # of params.structured; the sampler alone moves it
    is_greedy_only: bool = False  # the best logit decides and nothing else is asked for, which the
    # other fields tell as well: hundreds of rows are asked in each step

    @property
    def num_sampled(self) -> int:
        """Tokens sampled before this one; wrong where params.is_greedy_only, see `token_ids`."""
        return len(self.token_ids) + self.num_placeholders - self.num_prompt

    @property
    def on_host(self) -> bool:
        """Whether its output is made on the host, which must know all tokens before it."""
        structured = self.params.structured_output
        # With jump_forward a sample may bring several tokens.
        jumps = structured is not None and structured.jump_forward
        return self.num_candidates > 0 or jumps or bool(self.params.logits_processors)


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
    num_top_logprobs: int = 0  # best tokens to report with each score
    future_index: int = -1
    # index into the previous step's outputs of the token to feed as the row's only token, which is
    # PLACEHOLDER here; -1 where all tokens are known
    first_new_page: int = 0
    # page_ids before this index are as in the last row of this slot, which was of this request; 0
    # in the first row after the request got the slot
    req_pool_idx: int = 0  # slot in the page table, 0 <= req_pool_idx < max_running_requests;
    # distinct within a step

    state_id: int = -1  # of a model with recurrent layers: the state before the first token, zeros
    # at start 0
    checkpoints: tuple[tuple[int, int], ...] = ()  # (length, state id): keep the state after so
    # many tokens of the sequence, start < length <= end, in that one, too
    written_state_id: int = -1  # the state after the last token; state_id, or in a row of one token
    # another one, so that the state before it stays as it is

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class WindowLayers(NamedTuple):
    """Layers that see a window of positions only, where their K and V have pages of their own."""

    num_pages: int  # window pages in their memory
    window_size: int  # positions that a query sees, its own one of them, where it sees most


class WindowUpdates(NamedTuple):
    """What changes of window pages before a step."""

    pages: IntArray  # [n, 2] a page and its window page from this step on, -1: it has none
    copies: Sequence[tuple[int, int, int]]  # as `SchedulerOutput.cow_copies`, of window pages; to
    # be made one after the other


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: the copies, then one forward over all rows, then a token for each sampled row."""

    step: int
    rows: tuple[ScheduledRequest, ...]
    # [num_copies, 3] (source page, destination page, tokens from the page's start)
    cow_copies: IntArray
    num_prefill_tokens: int
    num_decode_tokens: int
    state_copies: Sequence[tuple[int, int]] = ()  # (source, destination), one after the other
    windows: WindowUpdates | None = None  # of a cache with windows


class Candidates(NamedTuple):
    """The best next tokens of a beam, best first; K is num_candidates or all there are."""

    token_ids: IntArray  # [K]
    scores: NDArray[np.float32]  # [K] log-probabilities after penalties and bans, not renormalised
    logprobs: NDArray[np.float32]  # [K] of the model's own distribution


class SampleOutput(NamedTuple):
    """A row's result: a token, or scores. Logprobs are of the model's own distribution."""

    token_id: int
    logprob: float | None  # when the request asked for logprobs
    top_logprobs: tuple[tuple[int, float], ...]  # best first, as many as asked for
    error: str | None = None  # why no token could be sampled; the row's K/V is not to be kept
    scores: tuple[float, ...] = ()  # log-probabilities of the row's targets; token_id is -1 where
    # nothing else was asked for
    top_scores: tuple[tuple[tuple[int, float], ...], ...] = ()  # the best tokens in their places
    candidates: Candidates | None = None  # of a beam; then token_id is -1
    cause: BaseException | None = None  # of the error, where a caller's function raised it
    is_complete: bool = False  # nothing can follow the token: the answer's grammar is at its end
    # Tokens that have to follow it, with params.structured_output.jump_forward.
    forced_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The answer to a `SchedulerOutput`: one entry a row, None where nothing was to be sampled or
    scored."""

    outputs: tuple[SampleOutput | None, ...]
    seconds: dict[str, float]  # prepare, forward, sample
