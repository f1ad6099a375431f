"""How a response looks, whole and as events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from radixserve.output import Completion, Usage
from radixserve.request import SamplingParams
from radixserve.server.answer_parts import AnswerParts, Part, PartEvent
from radixserve.server.errors import ApiError
from radixserve.server.output_parser import Delta
from radixserve.server.responses.schema import FunctionTool, ResponseRequest
from radixserve.server.sse import named_event

_PREFIXES = {"reasoning": "rs", "text": "msg", "tool_call": "fc"}
_STATUSES = {"length": "incomplete"}  # by finish_reason; all others are completed


class ResponseBuilder:
    """The response to one request."""

    def __init__(
        self, request_id: str, model: str, body: ResponseRequest, params: SamplingParams,
        *, stores: bool,
    ) -> None:  # fmt: skip
        self._request_id = request_id
        self._number = 0  # of the next event
        self._parts = AnswerParts()
        tools = [FunctionTool.model_validate(tool) for tool in body.tools or []]
        self._head: dict[str, Any] = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "store": stores,
            "temperature": params.temperature,
            "text": {"format": (body.text and body.text.format) or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in tools],
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    @property
    def response_id(self) -> str:
        return str(self._head["id"])

    # -- whole answers ------------------------------------------------------------------------

    def response(
        self, parts: Sequence[Part], one: Completion, num_reasoning: int
    ) -> dict[str, Any]:
        """The last item of an answer that was cut is incomplete; calls are whole."""
        status = _STATUSES.get(one.finish_reason, "completed")
        parts = parts or [Part("text", 0)]
        cut = max((part.index for part in parts if part.kind != "tool_call"), default=None)
        items = [self._item(part, status if part.index == cut else "completed") for part in parts]
        found = self._response(status, items)
        if status == "incomplete":
            found["incomplete_details"] = {"reason": "max_output_tokens"}
        usage = usage_of(one.usage, num_reasoning)
        return {**found, "completed_at": int(time.time()), "usage": usage}

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "status": status, "output": output, "usage": None}

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        found: dict[str, Any] = {"id": self._id(part), "status": status}
        if part.kind == "tool_call":
            if status == "incomplete":
                found["status"] = "completed"
            call = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
            return {**found, "type": "function_call", **call}
        content = [] if status == "in_progress" else [_content(part, part.text)]
        if part.kind == "reasoning":
            return {**found, "type": "reasoning", "summary": [], "content": content}
        return {**found, "type": "message", "role": "assistant", "content": content}

    def _id(self, part: Part) -> str:
        return f"{_PREFIXES[part.kind]}_{self._request_id}_{part.index}"

    # -- streams ------------------------------------------------------------------------------

    def begin(self) -> str:
        found = self._response("in_progress", [])
        return self._event("created", response=found) + self._event("in_progress", response=found)

    def more(self, delta: Delta) -> str:
        return "".join(self._frames(self._parts.push(delta), "completed"))

    def end_parts(self, one: Completion) -> tuple[str, list[Part]]:
        """The last events before that of the whole, and the parts of the answer."""
        status = _STATUSES.get(one.finish_reason, "completed")
        frames = self._frames(self._parts.finish(), status)
        if not self._parts.parts:
            empty = Part("text", 0)
            frames = self._frames([PartEvent("open", empty), PartEvent("close", empty)], status)
        return "".join(frames), self._parts.parts

    def end(self, response: dict[str, Any]) -> str:
        return self._event(response["status"], response=response)

    def failed(self, error: ApiError) -> str:
        output = [self._item(part, "incomplete") for part in self._parts.parts]
        found = self._response("failed", output)
        found["error"] = {"code": "server_error", "message": error.message}
        return self._event("failed", response=found)

    def _frames(self, events: Iterable[PartEvent], status: str) -> Iterator[str]:
        for kind, part, piece in events:
            if kind == "open":
                yield from self._opened(part)
            elif kind == "close":
                yield from self._closed(part, status)
            else:
                name = f"{_NAMES[part.kind]}.delta"
                yield self._of_part(name, part, delta=piece, **_MORE.get(part.kind, {}))

    def _opened(self, part: Part) -> Iterator[str]:
        item = self._item(part, "in_progress")
        yield self._event("output_item.added", output_index=part.index, item=item)
        if part.kind != "tool_call":
            yield self._of_part("content_part.added", part, part=_content(part, ""))

    def _closed(self, part: Part, status: str) -> Iterator[str]:
        text, name = part.text, f"{_NAMES[part.kind]}.done"
        if part.kind == "tool_call":
            yield self._of_part(name, part, name=part.name, arguments=text)
        else:
            yield self._of_part(name, part, text=text, **_MORE.get(part.kind, {}))
            yield self._of_part("content_part.done", part, part=_content(part, text))
        item = self._item(part, status)
        yield self._event("output_item.done", output_index=part.index, item=item)

    def _of_part(self, kind: str, part: Part, /, **fields: Any) -> str:
        place: dict[str, Any] = {"item_id": self._id(part), "output_index": part.index}
        if part.kind != "tool_call":
            place["content_index"] = 0
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, /, **fields: Any) -> str:
        name, number = f"response.{kind}", self._number
        self._number += 1
        return named_event(name, {"type": name, "sequence_number": number, **fields})


_NAMES = {
    "reasoning": "reasoning_text",
    "text": "output_text",
    "tool_call": "function_call_arguments",
}
_MORE: dict[str, dict[str, Any]] = {"text": {"logprobs": []}}


def _content(part: Part, text: str) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_of(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    """input_tokens counts what was cached too, as OpenAI has it."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def said(parts: Iterable[Part]) -> dict[str, Any]:
    """The answer as a message of a chat."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for part in parts:
        if part.kind == "text":
            message["content"] += part.text
        elif part.kind == "reasoning":
            message["reasoning_content"] = message.get("reasoning_content", "") + part.text
        else:
            function = {"name": part.name, "arguments": part.text}
            call = {"id": part.call_id, "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
    return message
