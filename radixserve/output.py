"""Results: per-step output of a request, and the finished `Completion`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.diagnosis import Decode, Diagnosis, diagnose
from radixserve.errors import InvalidRequest
from radixserve.schedule import SampleOutput

FinishReason = Literal["stop", "length", "abort"]
MissReason = Literal[
    "full",
    "diverged",
    "evicted",
    "namespace",
    "no_checkpoint",
    "window_evicted",
    "never_seen",
]


class StoredLookup(NamedTuple):
    """How much of a prompt the kv_store holds, and what its missing tokens cost, by what was
    measured since the start: of the tokens that are stored and neither cached nor the last one."""

    stored_len: int  # leading tokens, cached or not
    load_tokens: int  # those that could be loaded
    load_s: float  # seconds until they are loaded
    compute_s: float | None  # seconds to compute them; None until prompts were computed


class Lookup(NamedTuple):
    """How much of a prompt is cached, and why not more.

    reason is one of
      full        all that may be reused is cached
      diverged    cached sequences continue with another token at `position`
      evicted     the next tokens were cached and have been evicted
      namespace   another namespace holds more of these tokens
      no_checkpoint  the K/V of more is cached, up to `position`, but the deepest recurrent state
                  kept on the way is after cached_len tokens; models with such layers only
      window_evicted  more is cached, up to `position`, but of layers that see a window of positions
                  only the K/V before it were dropped; models with such layers only
      never_seen  no cached or remembered sequence continues from here

    cached_len is less than position, by a part of a page, where no page is free for the copy of
    that page's prefix. A reset forgets; evicted tokens are remembered up to a bound.
    """

    cached_len: int  # tokens that acquire() would reuse now
    reason: MissReason
    position: int  # first position at which the prompt and the cached tokens differ
    expected: int | None = None  # for diverged: a token cached at that position
    found: int | None = None  # for diverged: the prompt's token there
    stored: StoredLookup | None = None  # of an engine with a kv_store

    @property
    def missing_state_tokens(self) -> int:
        """Tokens whose K/V is cached and which acquire() would compute again nevertheless, because
        no recurrent state, or K/V of layers with windows, was kept from which to continue."""
        lacks_state = self.reason in ("no_checkpoint", "window_evicted")
        return self.position - self.cached_len if lacks_state else 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts; cached_tokens + computed_tokens == prompt_tokens, always.

    A prompt token counts as cached when this request never computed it, as computed otherwise
    (once, also when a preemption made it necessary again). A request that ended before its prompt
    was processed counts only what was. missing_state_tokens: of the computed ones those that
    `Lookup.missing_state_tokens` counts.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    completion_tokens: int
    missing_state_tokens: int = 0
    loaded_tokens: int = 0  # of cached_tokens: read from the kv_store for this request

    def with_answer(self, num_tokens: int) -> Usage:
        """The same prompt, with an answer of that length."""
        return replace(self, completion_tokens=num_tokens)

    def of_other_answer(self, num_tokens: int) -> Usage:
        """The usage of a further answer: all of the prompt counts as cached."""
        return Usage(self.prompt_tokens, self.prompt_tokens, 0, num_tokens)


def add_usages(usages: Sequence[Usage]) -> Usage:
    """Their sum."""
    return Usage(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        sum(usage.computed_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
        sum(usage.missing_state_tokens for usage in usages),
        sum(usage.loaded_tokens for usage in usages),
    )


@dataclass(frozen=True, slots=True)
class Metrics:
    """Seconds since the request was queued; None for stages that it did not reach."""

    queue_s: float | None  # until it was admitted
    ttft_s: float | None  # until its first token
    total_s: float


class PromptScore(NamedTuple):
    """How likely the model finds a token of the prompt, given those before it."""

    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]  # the best ones in its place, best first


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
    """One step's output for a request: a token, after those that a grammar forces if any, and
    `finish` at the end."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # one per token if requested, else empty
    top_logprobs: tuple[dict[int, float], ...]
    finish: Finish | None
    beams: tuple[Beam, ...] = ()  # the answers of a beam search, best first, when it has ended
    beam_samples: tuple[SampleOutput, ...] = ()  # of a beam search: the sample of each of its beams


class PromptTokens:
    """A prompt's token ids and how to read them. A copy or pickle of it has the ids alone."""

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
    stop_reason: str | int | None = None
    digest: str | None = None
    prompt: PromptTokens | None = field(default=None, compare=False)

    @property
    def prompt_token_ids(self) -> IntArray:
        """Raises InvalidRequest for a completion that was made without its prompt."""
        if self.prompt is None:
            raise InvalidRequest(f"the completion {self.request_id} was made without its prompt")
        return self.prompt.token_ids

    def sequence(self) -> tuple[IntArray, int]:
        """The token ids of prompt and answer, and of how many the K/V was computed: not of the
        answer's last one."""
        prompt, answer = self.prompt_token_ids, np.asarray(self.token_ids, np.int32)
        num_computed = self.usage.prompt_tokens + max(0, len(answer) - 1)
        return np.concatenate([prompt, answer]), num_computed

    def diagnosis(self, previous: Completion) -> Diagnosis:
        """Why this prompt found less in the cache than `previous` had left there: the first token
        that was lost, the texts that differ, and the tokens that had to be computed again.

        `previous`: a request that had ended before, such as the turn before. O(tokens)."""
        return diagnose(
            self.prompt_token_ids,
            self.usage.cached_tokens,
            "" if self.miss is None else self.miss.reason,
            *previous.sequence(),
            None if self.prompt is None else self.prompt.decode,
        )

    def __repr__(self) -> str:
        """In one line: long texts are cut, tokens and log-probabilities counted."""
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

    logprob: float  # of all of it: the sum of `logprobs`
    logprobs: list[float]  # of each token, given all before it
    token_ids: list[int]
    usage: Usage  # the prompt here is the prompt and the continuation but for its last token


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer; the last one carries the whole `completion`.

    `logprobs` and `top_logprobs`: of `token_ids`, where the request asked for them.
    """

    request_id: str
    text: str
    token_ids: list[int]
    completion: Completion | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None


def join_chunks(first: Chunk, second: Chunk) -> Chunk:
    """Two pieces of an answer that follow each other as one."""
    logprobs = top_logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = first.logprobs + second.logprobs
    if first.top_logprobs is not None and second.top_logprobs is not None:
        top_logprobs = first.top_logprobs + second.top_logprobs
    text, token_ids = first.text + second.text, first.token_ids + second.token_ids
    return Chunk(first.request_id, text, token_ids, second.completion, logprobs, top_logprobs)


class EngineStatus(NamedTuple):
    """The state of the engine's thread, read without waiting for it."""

    is_alive: bool
    is_idle: bool  # nothing to compute
    stepped_at: float  # time.monotonic() after the last step; now, while it is idle
    running: int  # requests
    waiting: int  # requests, those that the thread has not read yet included
    waiting_tokens: int  # of these requests
    stats: Mapping[str, Any]  # see `Runtime.cache_stats`; at most a quarter of a second older
