"""`MessageBuilder`: formats messages of Anthropic's protocol, whole and as events."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from radixserve.completion import Completion
from radixserve.output import Usage
from radixserve.server.answer.content_blocks import ContentBlock, ContentBlockEvent
from radixserve.server.routes.anthropic_messages.schema import MessagesRequest
from radixserve.server.turn.answer_builder import BlocksBuilder
from radixserve.server.turn.cache_diagnosis import (
    TurnDiagnosis,
    anthropic_diagnostics,
    begun_anthropic_diagnostics,
)
from radixserve.server.turn.chat_turn import ChatTurn
from radixserve.server.turn.http_generation import HttpGeneration
from radixserve.server.wire.errors import ApiError, anthropic_error_body
from radixserve.server.wire.json_response import named_event
from radixserve.server.wire.usage import loaded_field


class MessageBuilder(BlocksBuilder):
    """Formats messages, whole and as events."""

    def __init__(self, turn: ChatTurn, request_id: str, body: MessagesRequest) -> None:
        super().__init__(turn)
        self._request_id = request_id
        self._request = body

    def message(
        self, blocks: Sequence[ContentBlock], completion: Completion, num_reasoning: int
    ) -> dict[str, Any]:
        message = self._message(
            [_block(block) for block in blocks],
            self._stop(blocks, completion),
            message_usage(completion.usage, num_reasoning, num_retained(self.generation)),
        )
        return {**message, **self._final_members()}

    def opening(self) -> str:
        """The event message_start and a ping. The cached tokens are reported at the end."""
        usage = {"input_tokens": len(self._turn.prompt.token_ids), "output_tokens": 0}
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        message |= self._diagnostics(begun_anthropic_diagnostics)
        return _event({"type": "message_start", "message": message}) + self.ping()

    def ping(self) -> str:
        return _event({"type": "ping"})

    def block_event(self, block_event: ContentBlockEvent, completion: Completion | None) -> str:
        del completion  # Anthropic's blocks have no status
        block = block_event.block
        if block_event.kind == "stop":
            return _event({"type": "content_block_stop", "index": block.index})
        if block_event.kind == "start":
            empty = replace(block, pieces=_EMPTY[block.kind])
            start = {"type": "content_block_start", "index": block.index}
            return _event({**start, "content_block": _block(empty)})
        kind, name = _DELTAS[block.kind]
        delta = {"type": kind, name: block_event.delta}
        return _event({"type": "content_block_delta", "index": block.index, "delta": delta})

    def closing(
        self, blocks: Sequence[ContentBlock], completion: Completion, num_reasoning: int
    ) -> str:
        delta = {
            "type": "message_delta",
            "delta": self._stop(blocks, completion),
            "usage": message_usage(completion.usage, num_reasoning, num_retained(self.generation)),
            **self._final_members(),
        }
        return _event(delta) + _event({"type": "message_stop"})

    def failed(self, error: ApiError) -> str:
        return named_event("error", anthropic_error_body(error, self._request_id))

    def _message(
        self, content: list[dict[str, Any]], stop: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.generation.model,
            "content": content,
            **stop,
            "usage": usage,
        }

    def _stop(self, blocks: Sequence[ContentBlock], completion: Completion) -> dict[str, Any]:
        """The members stop_reason and stop_sequence."""
        reason, sequence = "end_turn", None
        if completion.finish_reason == "length":
            is_full = len(completion.token_ids) < self._request.max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif isinstance(completion.stop_reason, str):
            reason, sequence = "stop_sequence", completion.stop_reason
        elif any(block.kind == "tool_call" for block in blocks):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _final_members(self) -> dict[str, Any]:
        """The answers to the actions of `kv_hints`, and the diagnostics. The effect of
        `cache_control` is in the usage."""
        envelope = self.generation.hint_answers.kv_hints
        kv_hints = {} if envelope is None else {"kv_hints": envelope}
        return {**kv_hints, **self._diagnostics(anthropic_diagnostics)}

    def _diagnostics(
        self, formatted: Callable[[TurnDiagnosis | None], dict[str, Any] | None]
    ) -> dict[str, Any]:
        """The member `diagnostics`, if it was requested. `formatted`: formats a diagnosis."""
        asked = self._request.diagnostics
        if asked is None:
            return {}
        is_first = asked.previous_message_id is None
        return {"diagnostics": None if is_first else formatted(self._turn.diagnosis())}


def message_usage(usage: Usage, num_thinking: int, num_retained: int) -> dict[str, Any]:
    """The `usage` of a message. Three counts add up to the prompt: cached tokens
    (cache_read_input_tokens), computed tokens that a mark retains (cache_creation_input_tokens),
    and other computed tokens (input_tokens), which stay cached until they are evicted."""
    prompt, cached = usage.prompt_tokens, usage.cached_tokens
    created = max(0, min(num_retained, prompt) - cached)
    return {
        "input_tokens": prompt - cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        **loaded_field(usage.loaded_tokens, "loaded_input_tokens"),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": num_thinking},
    }


def num_retained(generation: HttpGeneration) -> int:
    """The number of the prompt's first tokens that the marks retain; 0 before the answer's end."""
    answers = generation.hint_answers.cache_hints
    return max((answer["tokens_covered"] for answer in answers), default=0)


def _block(block: ContentBlock) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    arguments = json.loads(block.text)
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


_EMPTY: dict[str, list[str]] = {"reasoning": [], "text": [], "tool_call": ["{}"]}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_call": ("input_json_delta", "partial_json"),
}


def _event(value: dict[str, Any]) -> str:
    return named_event(value["type"], value)
