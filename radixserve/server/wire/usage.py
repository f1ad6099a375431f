"""Usage in OpenAI's format: the token counts of whole answers and of streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from radixserve.arrays import IntArray
from radixserve.completion import Chunk, Completion
from radixserve.server.wire.json_response import dump
from radixserve.server.wire.schema import StreamOptions

Group = Sequence[Completion]  # the completions of a prompt


def as_groups(
    answers: Sequence[Completion | list[Completion] | tuple[Completion, ...]],
) -> list[list[Completion]]:
    """The completions of each prompt, from one completion or several for each."""
    return [list(answer) if isinstance(answer, list | tuple) else [answer] for answer in answers]


def grouped(completions: Mapping[int, Completion], size: int) -> list[list[Completion]]:
    """The completions of each prompt. `completions` are by index, with `size` indexes for each
    prompt; missing ones are left out."""
    starts = range(0, max(completions, default=-1) + 1, size)
    return [
        [completions[index] for index in range(first, first + size) if index in completions]
        for first in starts
    ]


def epochs_body(completion: Completion) -> list[dict[str, Any]]:
    """Which weights sampled which tokens of an answer."""
    return [epoch._asdict() for epoch in completion.weight_epochs]


def completion_usage(groups: Iterable[Group]) -> dict[str, Any]:
    """The usage of a request. A prompt counts once, with the usage of its first completion; the
    generated tokens of all completions count.

    cached_tokens is exact: the prompt tokens that were not computed for this request. loaded_tokens
    (cached tokens that were read from the kv_store) and missing_state_tokens are members only if
    they are not 0.
    """
    prompt = cached = generated = missing = loaded = 0
    for group in groups:
        prompt += group[0].usage.prompt_tokens
        cached += group[0].usage.cached_tokens
        missing += group[0].usage.missing_state_tokens
        loaded += group[0].usage.loaded_tokens
        generated += sum(completion.usage.completion_tokens for completion in group)
    body = usage_body(prompt, cached, generated, loaded)
    if missing:
        body["prompt_tokens_details"]["missing_state_tokens"] = missing
    return body


def usage_body(prompt: int, cached: int, generated: int, loaded: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached, **loaded_field(loaded)},
    }


def prediction_details(groups: Iterable[Group]) -> dict[str, int]:
    """OpenAI's counts of the tokens of a prediction, over all completions."""
    usages = [completion.usage for group in groups for completion in group]
    return {
        "accepted_prediction_tokens": sum(usage.accepted_prediction_tokens for usage in usages),
        "rejected_prediction_tokens": sum(usage.rejected_prediction_tokens for usage in usages),
    }


def loaded_field(loaded: int, name: str = "loaded_tokens") -> dict[str, int]:
    """The tokens among the cached ones that came from the kv_store, where there are any."""
    return {name: loaded} if loaded else {}


def request_metrics(completion: Completion, token_s: float) -> dict[str, float | None]:
    """vLLM's `metrics` of an answer: its times in milliseconds, None for what did not happen, and
    its tokens per second from admission on; ours: the time that caching saved. `token_s`: seconds
    of a computed prompt token."""
    times, num_tokens = completion.metrics, len(completion.token_ids)
    prefill_s, decode_s = times.prefill_s, times.decode_s
    computed_s = None if times.queue_s is None else times.total_s - times.queue_s
    mean_s = decode_s / (num_tokens - 1) if decode_s is not None and num_tokens > 1 else None
    return {
        "time_to_first_token_ms": _ms(prefill_s),
        "generation_time_ms": _ms(decode_s),
        "queue_time_ms": _ms(times.queue_s),
        "mean_itl_ms": _ms(mean_s),
        "tokens_per_second": num_tokens / computed_s if computed_s else None,
        "saved_by_cache_ms": 1e3 * token_s * completion.usage.cached_tokens,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


class StreamUsage:
    """The usage in a stream's events.

    Without `stream_options`, it is in the event that ends the last choice. With `include_usage`, it
    is in a separate event after the last choice; with `continuous_usage_stats` beside it, also in
    every event. Other options ask for no usage.
    """

    def __init__(
        self,
        options: StreamOptions | None,
        prompts: Sequence[IntArray],
        num_samples: int,
        usage_of: Callable[[Sequence[Group]], dict[str, Any]],
        *,
        is_forced: bool,
    ) -> None:
        """
        usage_of   returns the usage of completions
        is_forced  every stream has `include_usage` and `continuous_usage_stats`
        """
        if is_forced:
            options = StreamOptions(include_usage=True, continuous_usage_stats=True)
        self._usage_of = usage_of
        self._has_own_event = options is not None and options.include_usage is True
        self._is_unasked = options is None
        self.is_continuous = self._has_own_event and bool(
            options is not None and options.continuous_usage_stats
        )
        self._num_prompt = [len(prompt) for prompt in prompts]
        self._num_samples = num_samples
        self.num_missing = 0  # choices that a beam search did not find
        self._generated: dict[int, int] = {}  # tokens by index
        self._done: dict[int, Completion] = {}  # by index

    def add(self, chunks: Sequence[tuple[int, Chunk]]) -> None:
        """Count new chunks, each with the index of its choice."""
        for index, chunk in chunks:
            if self.is_continuous:
                self._generated[index] = self._generated.get(index, 0) + len(chunk.token_ids)
            if chunk.completion is not None:
                self._done[index] = chunk.completion

    def field(self, index: int, chunk: Chunk) -> str:
        """The JSON text `,"usage":...` for an event of a choice, or ""."""
        if self.is_continuous:
            return self._of_choice(index, chunk, self._generated[index])
        is_last = chunk.completion is not None and self._is_last(index)
        if is_last and self._is_unasked:
            return f',"usage":{dump(self._usage_of(grouped(self._done, self._num_samples)))}'
        return ',"usage":null' if self._has_own_event else ""

    def opening_field(self, index: int, chunk: Chunk) -> str:
        """The JSON text for the event that opens a choice. `chunk`: the choice's first one."""
        if self.is_continuous:
            return self._of_choice(index, chunk, 0)
        return ',"usage":null' if self._has_own_event else ""

    def last_event(self) -> dict[str, Any] | None:
        """The usage of the separate event, after the last choice; None if it was not requested."""
        if not self._has_own_event:
            return None
        return self._usage_of(grouped(self._done, self._num_samples))

    def _is_last(self, index: int) -> bool:
        """Whether all choices have ended, and this one is sent last."""
        num_choices = len(self._num_prompt) * self._num_samples - self.num_missing
        return len(self._done) == num_choices and index == next(reversed(self._done))

    def _of_choice(self, index: int, chunk: Chunk, generated: int) -> str:
        """The JSON text for one choice so far."""
        num_prompt = self._num_prompt[index // self._num_samples]
        return f',"usage":{dump(usage_body(num_prompt, chunk.cached_tokens, generated))}'
