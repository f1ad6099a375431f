"""`StreamUsage`: token counts in a stream, where each kind of client looks for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixserve.arrays import IntArray
from radixserve.output import Chunk, Completion
from radixserve.server.json_response import dump
from radixserve.server.schema import StreamOptions
from radixserve.server.usage import Group, grouped, usage_body, usage_of


class StreamUsage:
    """With include_usage they come in an event of their own after the last choice, with
    continuous_usage_stats in every event besides; unasked in the event that ends the last choice.
    """

    def __init__(
        self, options: StreamOptions | None, prompts: Sequence[IntArray], num_samples: int
    ) -> None:
        self._has_own_event = options is not None and options.include_usage
        self._is_continuous = options is not None and options.continuous_usage_stats
        self._num_prompt = [len(prompt) for prompt in prompts]
        self._num_samples = num_samples
        self._generated: dict[int, int] = {}  # tokens by index
        self._done: dict[int, Completion] = {}  # by index

    def add(self, found: Sequence[tuple[int, Chunk]]) -> None:
        for at, chunk in found:
            if self._is_continuous:
                self._generated[at] = self._generated.get(at, 0) + len(chunk.token_ids)
            if chunk.completion is not None:
                self._done[at] = chunk.completion

    def field(self, at: int, chunk: Chunk) -> str:
        """`,"usage":...` of a choice's event, or nothing."""
        is_last = chunk.completion is not None and self._is_last(at)
        if is_last and not self._has_own_event:
            return f',"usage":{dump(usage_of(grouped(self._done, self._num_samples)))}'
        if self._is_continuous:
            cached = self._done[at].usage.cached_tokens if at in self._done else None
            return f',"usage":{dump(self._so_far(at, cached))}'
        return ',"usage":null' if self._has_own_event else ""

    def empty_field(self) -> str:
        """The field of an event that opens a choice."""
        return ',"usage":null' if self._has_own_event else ""

    def last_event(self, groups: Sequence[Group]) -> dict[str, Any] | None:
        """The usage of an event of its own, where it was asked for."""
        return usage_of(groups) if self._has_own_event else None

    def _is_last(self, at: int) -> bool:
        """All have ended, and this one is the last in the order in which they are sent."""
        num_choices = len(self._num_prompt) * self._num_samples
        return len(self._done) == num_choices and at == next(reversed(self._done))

    def _so_far(self, at: int, cached: int | None) -> dict[str, Any]:
        """The usage of one choice. What was cached of its prompt is told when it has ended."""
        body = usage_body(
            self._num_prompt[at // self._num_samples], cached or 0, self._generated[at]
        )
        if cached is None:
            del body["prompt_tokens_details"]
        return body
