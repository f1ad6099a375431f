"""How an answer looks in Anthropic's protocol, whole and as events."""

from __future__ import annotations

import json
from typing import Any

from radixserve.output import Completion, Usage
from radixserve.server.answer_parts import AnswerParts, Part, PartEvent, parts_of, reasoning_of
from radixserve.server.output_parser import Delta, ParsedAnswer
from radixserve.server.reasoning_tokens import count_reasoning
from radixserve.server.sse import named_event
from radixserve.text.tokenizer import Tokenizer

PING = named_event("ping", {"type": "ping"})


class MessageBuilder:
    """The message that answers one request."""

    def __init__(self, message_id: str, model: str, max_tokens: int) -> None:
        self._id = message_id
        self._model = model
        self._max_tokens = max_tokens
        self._parts = AnswerParts()

    # -- whole answers ------------------------------------------------------------------------

    def message(
        self, answer: ParsedAnswer, one: Completion, num_thinking: int, num_retained: int
    ) -> dict[str, Any]:
        """`num_retained`: leading tokens of the prompt that cache_control marks keep."""
        parts = parts_of(answer)
        usage = usage_of(one.usage, num_thinking, num_retained)
        return self._message([_block(part) for part in parts], self._end(parts, one), usage)

    def _message(
        self, content: list[dict[str, Any]], end: dict[str, Any], usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **end,
            "usage": usage,
        }

    def _end(self, parts: list[Part], one: Completion) -> dict[str, Any]:
        """stop_reason and stop_sequence."""
        reason, sequence = "end_turn", None
        if one.finish_reason == "length":
            is_full = len(one.token_ids) < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif isinstance(one.stop_reason, str):
            reason, sequence = "stop_sequence", one.stop_reason
        elif any(part.kind == "tool_call" for part in parts):
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}

    # -- streams ------------------------------------------------------------------------------

    def begin(self, num_prompt: int) -> str:
        """How much of the prompt was cached is told at the end."""
        usage = {"input_tokens": num_prompt, "output_tokens": 0}
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        return _event({"type": "message_start", "message": message}) + PING

    def more(self, delta: Delta) -> str:
        return "".join(map(_part_event, self._parts.push(delta)))

    def end(self, one: Completion, tokenizer: Tokenizer, num_retained: int) -> str:
        frames = [_part_event(found) for found in self._parts.finish()]
        parts = self._parts.parts
        num_thinking = count_reasoning(tokenizer, reasoning_of(parts), one)
        delta = {
            "type": "message_delta",
            "delta": self._end(parts, one),
            "usage": usage_of(one.usage, num_thinking, num_retained),
        }
        return "".join([*frames, _event(delta), _event({"type": "message_stop"})])


def usage_of(usage: Usage, num_thinking: int, num_retained: int) -> dict[str, Any]:
    """The three counts of the prompt add up to it, exactly: what was cached, what was computed and
    is retained by a mark, and what was computed besides, which stays cached while there is room."""
    prompt, cached = usage.prompt_tokens, usage.cached_tokens
    created = max(0, min(num_retained, prompt) - cached)
    return {
        "input_tokens": prompt - cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": num_thinking},
    }


def _block(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    arguments = json.loads(part.text)
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": arguments}


def _part_event(found: PartEvent) -> str:
    part = found.part
    if found.kind == "close":
        return _event({"type": "content_block_stop", "index": part.index})
    if found.kind == "open":
        block = _block(Part(part.kind, part.index, part.call_id, part.name, _EMPTY[part.kind]))
        start = {"type": "content_block_start", "index": part.index, "content_block": block}
        return _event(start)
    kind, name = _DELTAS[part.kind]
    delta = {"type": kind, name: found.piece}
    return _event({"type": "content_block_delta", "index": part.index, "delta": delta})


_EMPTY: dict[str, list[str]] = {"reasoning": [], "text": [], "tool_call": ["{}"]}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_call": ("input_json_delta", "partial_json"),
}


def _event(value: dict[str, Any]) -> str:
    return named_event(value["type"], value)
