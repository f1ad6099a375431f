"""A request for a response as a chat in OpenAI's older format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixserve.checks import shown
from radixserve.server.errors import ApiError
from radixserve.server.items import read_item, read_list, same_fields
from radixserve.server.responses.schema import (
    CallItem,
    FunctionTool,
    MessageItem,
    NamedTool,
    OutputItem,
    PlainFormat,
    ReasoningItem,
    ResponseRequest,
    SchemaFormat,
    TextOptions,
    TextPart,
)
from radixserve.server.schema import Body
from radixserve.server.tool_parsers.calls import read_json

Message = dict[str, Any]
_ITEMS: dict[str, type[Body]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}
_FORMATS: dict[str, type[Body]] = {
    "text": PlainFormat,
    "json_object": PlainFormat,
    "json_schema": SchemaFormat,
}
_INPUT: dict[str, type[Body]] = {"input_text": TextPart, "text": TextPart}
_SAID: dict[str, type[Body]] = {**_INPUT, "output_text": TextPart}


def chat_fields(body: ResponseRequest, messages: Sequence[Message]) -> dict[str, Any]:
    """Fields of a ChatRequest for all messages but the instructions. Raises ApiError."""
    said = [] if body.instructions is None else [_message("system", body.instructions)]
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort == "none":
        variables.setdefault("enable_thinking", False)
    fields = {
        **same_fields(body),
        "messages": [*said, *messages],
        "max_tokens": body.max_output_tokens,
        "tools": _tools(body.tools) or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": variables or None,
        "response_format": _response_format(body.text),
    }
    return {name: value for name, value in fields.items() if value is not None}


def read_input(given: object) -> tuple[list[Body], list[Message]]:
    """The items of an input, and the messages that they are. Raises ApiError."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    where = "input"
    items = [
        read_item(_ITEMS, one, f"{where}[{at}]", default="message")
        for at, one in enumerate(read_list(given, where))
    ]
    turns = _Turns()
    for at, item in enumerate(items):
        turns.add(item, f"{where}[{at}]")
    return items, turns.messages


class _Turns:
    """Items one after another; those that are one turn of the assistant become one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def add(self, item: Body, where: str) -> None:
        if isinstance(item, MessageItem):
            if item.role == "assistant":
                said = self._message({"content", "tool_calls"})
                said["content"] = _text(item.content, f"{where}.content", _SAID)
            else:
                text = _text(item.content, f"{where}.content", _INPUT)
                self.messages.append(_message(item.role, text))
        elif isinstance(item, CallItem):
            said = self._message(set())
            said.setdefault("tool_calls", []).append(_call(item, where))
        elif isinstance(item, OutputItem):
            text = _text(item.output, f"{where}.output", _INPUT)
            message = {"role": "tool", "tool_call_id": item.call_id, "content": text}
            self.messages.append(message)
        else:
            assert isinstance(item, ReasoningItem)
            said = self._message({"content", "tool_calls"})
            text = "".join(one.text for one in item.content or [])
            said["reasoning_content"] = said.get("reasoning_content", "") + text

    def _message(self, ends: set[str]) -> Message:
        """The assistant's present message; a new one after any that has one of `ends`."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in ends):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last


def check_calls(known: Sequence[Message], items: Sequence[Body]) -> None:
    """Each output belongs to a call before it: of the input, or of the `known` messages of the
    response that it goes on from. Raises ApiError."""
    calls = {call["id"] for message in known for call in message.get("tool_calls", ())}
    for at, item in enumerate(items):
        if isinstance(item, CallItem):
            calls.add(item.call_id)
        if isinstance(item, OutputItem) and item.call_id not in calls:
            param = f"input[{at}].call_id"
            raise ApiError(
                400, f"{param} {shown(item.call_id)} names no function_call before it", param=param
            )


def shown_items(items: Sequence[Body], response_id: str) -> list[dict[str, Any]]:
    """As GET .../input_items lists them: with ids, texts as parts."""
    found = []
    for at, item in enumerate(items):
        one = {"id": f"{response_id}_{at}", **item.model_dump(exclude_none=True)}
        if isinstance(one.get("content"), str):
            kind = "output_text" if one["role"] == "assistant" else "input_text"
            one["content"] = [{"type": kind, "text": one["content"]}]
        found.append(one)
    return found


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _text(content: object, where: str, kinds: dict[str, type[Body]]) -> str:
    if isinstance(content, str):
        return content
    parts = read_list(content, where, may_be_empty="output_text" in kinds)
    found = [read_item(kinds, one, f"{where}[{at}]") for at, one in enumerate(parts)]
    separator = "" if "output_text" in kinds else "\n"  # an answer's parts are one text
    return separator.join(one.text for one in found if isinstance(one, TextPart))


def _call(item: CallItem, where: str) -> Message:
    try:
        is_object = isinstance(read_json(item.arguments), dict)
    except ValueError:
        is_object = False
    if not is_object and item.arguments.strip():
        param = f"{where}.arguments"
        raise ApiError(
            400,
            f"{param} must be the JSON text of an object, got {shown(item.arguments)}",
            param=param,
        )
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _tools(tools: object) -> list[dict[str, Any]]:
    found = []
    given_tools = [] if tools is None else read_list(tools, "tools", may_be_empty=True)
    for at, given in enumerate(given_tools):
        tool = read_item({"function": FunctionTool}, given, f"tools[{at}]")
        function = tool.model_dump(exclude={"type"}, exclude_none=True)
        found.append({"type": "function", "function": function})
    return found


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    found = read_item(_FORMATS, text.format, "text.format")
    if not isinstance(found, SchemaFormat):
        return found.model_dump()
    schema = found.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
    return {"type": "json_schema", "json_schema": schema}


def _tool_choice(given: object) -> Any:
    if given is None or given in ("auto", "none", "required"):
        return given
    if not isinstance(given, dict):
        raise ApiError(
            400,
            'tool_choice must be "auto", "none", "required" or {"type": "function", "name": ...}, '
            f"got {shown(given)}",
            param="tool_choice",
        )
    choice = read_item({"function": NamedTool}, given, "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}
