"""Usage in OpenAI's format: the token counts of whole answers and of streams."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from radixserve.arrays import IntArray
from radixserve.output import Chunk, Completion
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


def loaded_field(loaded: int, name: str = "loaded_tokens") -> dict[str, int]:
    """The tokens among the cached ones that came from the kv_store, where there are any."""
    return {name: loaded} if loaded else {}


class StreamUsage:
    """The usage in a stream's events.

    With `include_usage`, it is in a separate event after the last choice; with
    `continuous_usage_stats`, also in every event; else in the event that ends the last choice.
    """

    def __init__(
        self, options: StreamOptions | None, prompts: Sequence[IntArray], num_samples: int
    ) -> None:
        self._has_own_event = options is not None and options.include_usage is True
        self._is_unwanted = options is not None and options.include_usage is False
        self._is_continuous = options is not None and options.continuous_usage_stats
        self._num_prompt = [len(prompt) for prompt in prompts]
        self._num_samples = num_samples
        self.num_missing = 0  # choices that a beam search did not find
        self._generated: dict[int, int] = {}  # tokens by index
        self._done: dict[int, Completion] = {}  # by index

    def add(self, chunks: Sequence[tuple[int, Chunk]]) -> None:
        """Count new chunks, each with the index of its choice."""
        for index, chunk in chunks:
            if self._is_continuous:
                self._generated[index] = self._generated.get(index, 0) + len(chunk.token_ids)
            if chunk.completion is not None:
                self._done[index] = chunk.completion

    def field(self, index: int, chunk: Chunk) -> str:
        """The JSON text `,"usage":...` for an event of a choice, or ""."""
        is_last = chunk.completion is not None and self._is_last(index)
        if is_last and not self._has_own_event and not self._is_unwanted:
            return f',"usage":{dump(completion_usage(grouped(self._done, self._num_samples)))}'
        if self._is_continuous:
            cached = self._done[index].usage.cached_tokens if index in self._done else None
            return f',"usage":{dump(self._choice_usage(index, cached))}'
        return ',"usage":null' if self._has_own_event else ""

    def empty_field(self) -> str:
        """The JSON text for the event that opens a choice."""
        return ',"usage":null' if self._has_own_event else ""

    def last_event(self, groups: Sequence[Group]) -> dict[str, Any] | None:
        """The usage of the separate event; None if it was not requested."""
        return completion_usage(groups) if self._has_own_event else None

    def _is_last(self, index: int) -> bool:
        """Whether all choices have ended, and this one is sent last."""
        num_choices = len(self._num_prompt) * self._num_samples - self.num_missing
        return len(self._done) == num_choices and index == next(reversed(self._done))

    def _choice_usage(self, index: int, cached: int | None) -> dict[str, Any]:
        """The usage of one choice so far. `cached`: its cached tokens, known at its end."""
        body = usage_body(
            self._num_prompt[index // self._num_samples], cached or 0, self._generated[index]
        )
        if cached is None:
            del body["prompt_tokens_details"]
        return body
