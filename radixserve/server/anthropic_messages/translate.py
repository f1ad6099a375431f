"""Anthropic's request as a chat in OpenAI's format."""

from __future__ import annotations

import json
from typing import Any

from radixserve.checks import shown
from radixserve.server.anthropic_messages.cache_control import retain_hints
from radixserve.server.anthropic_messages.schema import (
    Message,
    MessagesRequest,
    PromptFields,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from radixserve.server.errors import ApiError
from radixserve.server.items import read_as, read_item, read_list, same_fields
from radixserve.server.schema import Body

_TEXT: dict[str, type[Body]] = {"text": TextBlock}
_BLOCKS: dict[str, dict[str, type[Body]]] = {
    "system": _TEXT,
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_ERROR = "Error: "  # before the result of a tool that failed: OpenAI's format has no flag


def chat_fields(body: MessagesRequest) -> dict[str, Any]:
    """Fields of a ChatRequest. Raises ApiError."""
    fields = {**prompt_fields(body), **same_fields(body)}
    fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    if body.output_config is not None and body.output_config.format is not None:
        schema = {"name": "answer", "schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    fields["cache_hints"] = retain_hints(body) or None
    return {name: value for name, value in fields.items() if value is not None}


def prompt_fields(body: PromptFields) -> dict[str, Any]:
    """The fields that become the prompt."""
    messages = chat_messages(body.system, body.messages)
    fields: dict[str, Any] = {"messages": messages}
    if messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise ApiError(
                400, "the last message is a tool_use: its tool_result has to follow",
                param="messages",
            )  # fmt: skip
        fields |= {"add_generation_prompt": False, "continue_final_message": True}
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None and body.thinking.type == "disabled":
        variables.setdefault("enable_thinking", False)
    if variables:
        fields["chat_template_kwargs"] = variables
    tools = _tools(body.tools)
    if tools:
        fields["tools"] = tools
    return fields | _tool_choice(body.tool_choice)


def chat_messages(system: object, messages: object) -> list[dict[str, Any]]:
    """Messages of one role that follow each other are one turn. Raises ApiError."""
    turns: list[tuple[str, list[Body]]] = []
    if system is not None:
        turns.append(("system", _blocks("system", system, "system")))
    for at, given in enumerate(read_list(messages, "messages")):
        message = read_as(Message, given, f"messages[{at}]")
        where = f"messages[{at}].content"
        blocks = _blocks(message.role, message.content, where)
        _check_results(turns, blocks, where)
        if len(turns) > (system is not None) and turns[-1][0] == message.role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    return [found for role, blocks in turns for found in _messages(role, blocks)]


def _blocks(role: str, content: object, where: str) -> list[Body]:
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    blocks = read_list(content, where, may_be_empty=role == "assistant")
    return [_block(_BLOCKS[role], one, f"{where}[{at}]") for at, one in enumerate(blocks)]


def _block(kinds: dict[str, type[Body]], given: object, where: str) -> Body:
    """The content of a tool_result as one text."""
    block = read_item(kinds, given, where)
    if isinstance(block, ToolResultBlock):
        content = [] if block.content is None else block.content
        if not isinstance(content, str):
            where = f"{where}.content"
            parts = read_list(content, where, may_be_empty=True)
            found = [read_item(_TEXT, one, f"{where}[{at}]") for at, one in enumerate(parts)]
            content = "\n".join(one.text for one in found if isinstance(one, TextBlock))
        block.content = content
    return block


def _check_results(turns: list[tuple[str, list[Body]]], blocks: list[Body], where: str) -> None:
    """Each tool_result belongs to a tool_use of the assistant's last turn."""
    said = next((blocks for role, blocks in reversed(turns) if role == "assistant"), [])
    calls = {one.id for one in said if isinstance(one, ToolUseBlock)}
    for at, one in enumerate(blocks):
        if isinstance(one, ToolResultBlock) and one.tool_use_id not in calls:
            param = f"{where}[{at}].tool_use_id"
            raise ApiError(
                400, f"{param} {shown(one.tool_use_id)} names no tool_use of the turn before",
                param=param,
            )  # fmt: skip


def _messages(role: str, blocks: list[Body]) -> list[dict[str, Any]]:
    """A turn: results of tools are messages of their own."""
    if role == "assistant":
        return [_message(blocks)]
    found: list[dict[str, Any]] = []
    for one in blocks:
        if isinstance(one, ToolResultBlock):
            text = (_ERROR if one.is_error else "") + one.content
            found.append({"role": "tool", "tool_call_id": one.tool_use_id, "content": text})
            continue
        assert isinstance(one, TextBlock)
        if not found or found[-1]["role"] != role:
            found.append({"role": role, "content": one.text})
        else:
            found[-1]["content"] += "\n" + one.text
    return found


def _message(blocks: list[Body]) -> dict[str, Any]:
    """What the assistant said: the parts of one text are joined as they are."""
    text = "".join(one.text for one in blocks if isinstance(one, TextBlock))
    thinking = "".join(one.thinking for one in blocks if isinstance(one, ThinkingBlock))
    calls = [
        {
            "id": one.id,
            "type": "function",
            "function": {"name": one.name, "arguments": _json(one.input)},
        }
        for one in blocks
        if isinstance(one, ToolUseBlock)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
    return message


def _tools(tools: object) -> list[dict[str, Any]]:
    found = []
    given_tools = [] if tools is None else read_list(tools, "tools", may_be_empty=True)
    for at, given in enumerate(given_tools):
        tool = read_item({"custom": Tool}, given, f"tools[{at}]", default="custom")
        function = {"name": tool.name, "parameters": tool.input_schema}
        for name in ("description", "strict"):
            value = getattr(tool, name)
            if value is not None:
                function[name] = value
        found.append({"type": "function", "function": function})
    return found


def _tool_choice(choice: ToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    if (choice.type == "tool") != (choice.name is not None):
        raise ApiError(
            400,
            "tool_choice.name belongs to the type tool, and to no other",
            param="tool_choice.name",
        )
    named = {"type": "function", "function": {"name": choice.name}}
    fields: dict[str, Any] = {"tool_choice": _CHOICES.get(choice.type, named)}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _json(value: Any) -> str:
    """As the parsers of calls write it, so that a call that comes back is the same text."""
    return json.dumps(value, ensure_ascii=False)
