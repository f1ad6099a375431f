"""Results that callers get: `Completion`, its stream of `Chunk`s, and `Score`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.diagnosis import Decode, Diagnosis, diagnose
from radixserve.cache.lookup import Lookup
from radixserve.errors import InvalidRequest
from radixserve.output import Metrics, Usage

FinishReason = Literal["stop", "length", "abort"]


class WeightEpoch(NamedTuple):
    """A range of an answer's tokens, and the weights that sampled them."""

    start: int  # the answer's tokens [start, end)
    end: int
    epoch: int  # number of the weights, see `Runtime.update_weights`
    kv: str  # K/V of the tokens before: "computed" by these weights from the start, "recompute":
    # again after an update, or "stale": by earlier weights


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
                    first one, for those up to logprob_start_len, and for those that an aborted
                    request did not reach
    prompt_top_logprobs  {token id: logprob} of the best ones in their places, if requested
    prompt_ranks    with prompt_logprobs: each token's place among all by probability, from 1
    score           of a beam: what the answers of the search are ranked by
    miss            how much of the prompt was cached at admission, and why not more
    digest          a hash of the logits' bits behind each token, when asked for: equal where the
                    answers are equal to the bit. None where another process sampled tokens
    weight_epochs   which weights sampled which tokens, and what became of the K/V before an update
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
    weight_epochs: tuple[WeightEpoch, ...] = ()
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
