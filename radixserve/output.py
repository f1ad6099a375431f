"""Results of requests: the output of a step, `Chunk`, `Completion`, and `Lookup` of the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.diagnosis import Decode, Diagnosis, diagnose
from radixserve.cache.lookup import Lookup
from radixserve.errors import InvalidRequest
from radixserve.schedule import SampleOutput

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; cached_tokens + computed_tokens == prompt_tokens, always.

    A prompt token counts as cached if this request never computed it, else as computed: once, even
    if it was computed again after a preemption. A request that ended before its prompt was
    processed counts the processed tokens only. missing_state_tokens: the computed tokens of
    `Lookup.missing_state_tokens`.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    missing_state_tokens: int = 0
    loaded_tokens: int = 0  # cached tokens that were read from the kv_store for this request
    # Tokens of the prediction that the answer has in their places, and the others.
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    def with_answer(self, num_tokens: int) -> Usage:
        """Returns the usage of the same prompt with an answer of `num_tokens` tokens."""
        return replace(self, completion_tokens=num_tokens)

    def of_other_answer(self, num_tokens: int) -> Usage:
        """Returns the usage of a further answer: the whole prompt counts as cached."""
        return Usage(self.prompt_tokens, self.prompt_tokens, 0, num_tokens)


def add_usages(usages: Sequence[Usage]) -> Usage:
    """Returns the sum of usages."""
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        sum(usage.computed_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.missing_state_tokens for usage in usages),
        sum(usage.loaded_tokens for usage in usages),
        sum(usage.accepted_prediction_tokens for usage in usages),
        sum(usage.rejected_prediction_tokens for usage in usages),
    )


@dataclass(frozen=True, slots=True)
class Metrics:
    """Times of a request in seconds since it was queued; None for stages that it did not reach."""

    queue_s: float | None  # until it was admitted
    ttft_s: float | None  # until its first token
    total_s: float

    @property
    def prefill_s(self) -> float | None:
        """Seconds from admission to the first token."""
        if self.queue_s is None or self.ttft_s is None:
            return None
        return self.ttft_s - self.queue_s

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the end."""
        return None if self.ttft_s is None else self.total_s - self.ttft_s


class PromptScore(NamedTuple):
    """How likely the model finds a token of the prompt, given those before it."""

    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]  # the best tokens at its position, best first
    rank: int  # 1: it is the most likely one


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended."""

    reason: str  # "stop", "length", "abort" or "error"
    usage: Usage
    metrics: Metrics
    miss: Lookup | None  # the cache's answer when it was admitted
    error: BaseException | None = None
    prompt_scores: tuple[PromptScore, ...] = ()  # from the prompt's second token on, when asked for


class Beam(NamedTuple):
    """One answer of a beam search."""

    token_ids: list[int]
    reason: str  # "stop", "length" or "abort"
    score: float  # by which the answers are ranked
    logprobs: tuple[float, ...]  # of each token, of the model's own distribution
    top_logprobs: tuple[dict[int, float], ...]


class RequestOutput(NamedTuple):
    """One step's output for a request: tokens that a grammar forces, if any, then a sampled token;
    `finish` in the last output."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # one per token if requested, else empty
    top_logprobs: tuple[dict[int, float], ...]
    finish: Finish | None
    beams: tuple[Beam, ...] = ()  # the answers of a beam search, best first, when it has ended
    beam_samples: tuple[SampleOutput, ...] = ()  # for a beam search: one sample per beam
    cached_tokens: int = 0  # `Usage.cached_tokens` so far


def single_tokens(output: RequestOutput) -> Iterator[RequestOutput]:
    """Yields an output of several tokens as outputs of one token each; the last one has
    `finish`."""
    last = len(output.token_ids) - 1
    for index, token_id in enumerate(output.token_ids):
        yield output._replace(
            token_ids=(token_id,),
            logprobs=output.logprobs[index : index + 1],
            top_logprobs=output.top_logprobs[index : index + 1],
            finish=output.finish if index == last else None,
        )


class PromptTokens:
    """A prompt's token ids and how to decode them. A copy or pickle has the ids only."""

    __slots__ = ("decode", "token_ids")

    def __init__(self, token_ids: IntArray, decode: Decode | None = None) -> None:
        self.token_ids = token_ids
        self.decode = decode

    def __reduce__(self) -> tuple[type[PromptTokens], tuple[IntArray]]:
        return PromptTokens, (self.token_ids,)


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """The answer to one prompt.

    finish_reason   "stop" (end token or stop string), "length" or "abort"
    stop_reason     the stop string, or the id in stop_token_ids, that ended it; else None: also for
                    the model's own end tokens
    logprobs        of each generated token, if requested: of the model's own distribution
    top_logprobs    {token id: logprob} of the best ones at each position, if requested
    cumulative_logprob  their sum over the generated tokens, when asked for and where a prompt was
                    completed several times
    prompt_logprobs  of each token of the prompt given those before it, when asked for: None for the
                    first one, and for those that an aborted request did not reach
    prompt_top_logprobs  {token id: logprob} of the best ones in their places, if requested
    prompt_ranks    with prompt_logprobs: each token's place among all by probability, from 1
    score           of a beam: what the answers of the search are ranked by
    miss            how much of the prompt was cached at admission, and why not more
    digest          a hash of the logits' bits behind each token, when asked for: equal where the
                    answers are equal to the bit. None where another process sampled tokens or a
                    grammar forced them
    prompt          the prompt's token ids: `prompt_token_ids`
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    metrics: Metrics
    miss: Lookup | None
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    cumulative_logprob: float | None = None
    score: float | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    prompt_ranks: list[int | None] | None = None
    stop_reason: str | int | None = None
    digest: str | None = None
    prompt: PromptTokens | None = field(default=None, compare=False)

    @property
    def prompt_token_ids(self) -> IntArray:
        """The prompt's token ids. Raises InvalidRequest for a completion made without its
        prompt."""
        if self.prompt is None:
            raise InvalidRequest(f"the completion {self.request_id} was made without its prompt")
        return self.prompt.token_ids

    def sequence(self) -> tuple[IntArray, int]:
        """Returns the token ids of prompt and answer, and the number of them whose K/V was
        computed: all but the answer's last token."""
        prompt, answer = self.prompt_token_ids, np.asarray(self.token_ids, np.int32)
        num_computed = self.usage.prompt_tokens + max(0, len(answer) - 1)
        return np.concatenate([prompt, answer]), num_computed

    def diagnosis(self, previous: Completion) -> Diagnosis:
        """Tells why this prompt found fewer cached tokens than `previous` had left: the first lost
        token, the texts that differ, and the number of tokens that were computed again.

        `previous`: a request that ended before, such as the turn before. O(tokens)."""
        return diagnose(
            self.prompt_token_ids,
            self.usage.cached_tokens,
            "" if self.miss is None else self.miss.reason,
            *previous.sequence(),
            None if self.prompt is None else self.prompt.decode,
        )

    def __repr__(self) -> str:
        """One line: long texts are cut, tokens are counted."""
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        usage = self.usage
        end = self.finish_reason if self.stop_reason is None else f"stop at {self.stop_reason!r}"
        return (
            f"Completion({text!r}, {len(self.token_ids)} tokens, {end}, prompt "
            f"{usage.prompt_tokens} = cached {usage.cached_tokens} + computed "
            f"{usage.computed_tokens}{'' if self.score is None else f', score {self.score:.4g}'})"
        )


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a model finds a continuation of a prompt."""

    logprob: float  # of the continuation: the sum of `logprobs`
    logprobs: list[float]  # of each token, given all tokens before it
    token_ids: list[int]
    usage: Usage  # counts the continuation, except its last token, as part of the prompt


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer; the last one has the whole `completion`.

    `logprobs` and `top_logprobs`: of `token_ids`, if the request asked for them. `cached_tokens`:
    of the prompt, as in `Usage`.
    """

    request_id: str
    text: str
    token_ids: list[int]
    completion: Completion | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    cached_tokens: int = 0


def join_chunks(first: Chunk, second: Chunk) -> Chunk:
    """Returns two consecutive chunks of an answer as one."""
    logprobs = top_logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    if first.top_logprobs is not None and second.top_logprobs is not None:
        top_logprobs = first.top_logprobs + second.top_logprobs
    text, token_ids = first.text + second.text, first.token_ids + second.token_ids
    return Chunk(
        first.request_id,
        text,
        token_ids,
        second.completion,
        logprobs,
        top_logprobs,
        second.cached_tokens,
    )


class EngineStatus(NamedTuple):
    """The state of the engine's thread, read without waiting for it."""

    is_alive: bool
    is_idle: bool  # whether it has no request to compute
    stepped_at: float  # time.monotonic() after the last step; now, while it is idle
    running: int  # requests
    waiting: int  # requests, including those that the thread has not read yet
    waiting_tokens: int  # prompt tokens of the waiting requests
    stats: Mapping[str, Any]  # see `Runtime.cache_stats`; at most 0.25 s old while it steps
