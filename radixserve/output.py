"""Outputs of steps, from the scheduler up: `RequestOutput` and `Finish`, with usage and times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from radixserve.cache.lookup import Lookup


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
    # Guessed tokens that were computed, and the right ones, each of which saved a step. They depend
    # on the load. See docs/drafts.md.
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0

    def with_answer(self, num_tokens: int) -> Usage:
        """Returns the usage of the same prompt with an answer of `num_tokens` tokens."""
        return replace(self, completion_tokens=num_tokens)

    def with_prompt_of(self, other: Usage) -> Usage:
        """Returns the usage of the same answer after the prompt that `other` counts."""
        return replace(
            self,
            prompt_tokens=other.prompt_tokens,
            cached_tokens=other.cached_tokens,
            computed_tokens=other.computed_tokens,
            missing_state_tokens=other.missing_state_tokens,
            loaded_tokens=other.loaded_tokens,
        )

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
        sum(usage.drafted_tokens for usage in usages),
        sum(usage.accepted_draft_tokens for usage in usages),
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
    weight_epochs: tuple[Any, ...] = ()  # `WeightEpoch`s of its tokens


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
