"""Translates Anthropic's request into a `TurnRequest`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from radixserve.checks import shown
from radixserve.server.answer.tool_choice import ChatTools, PlacedFunction
from radixserve.server.gate.state import AppState
from radixserve.server.prompt.rendering import template_variables
from radixserve.server.routes.anthropic_messages.schema import (
    AssistantBlock,
    CacheControl,
    ClearThinking,
    ImageBlock,
    MessagesRequest,
    PromptFields,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    UserBlock,
)
from radixserve.server.turn.cache_use import CacheUse
from radixserve.server.turn.chat_turn import TurnRequest
from radixserve.server.turn.structured_outputs import Constraint, json_schema
from radixserve.server.wire.cache_fields import CacheHint
from radixserve.server.wire.errors import ApiError, wrong_field
from radixserve.server.wire.sampling import read_sampling
from radixserve.server.wire.schema import TemplateFields

# Choices of `ChatTools` by Anthropic's types.
_CHOICES = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
_SECONDS = {"5m": 300.0, "1h": 3600.0}  # of a cache_control mark
_ERROR = "Error: "  # prefix of a failed tool's result: messages of chats do not have `is_error`


def turn_request(server: AppState, body: MessagesRequest, cache: CacheUse) -> TurnRequest:
    """Translate a body. Raises ApiError."""
    messages = chat_messages(body)
    diagnostics = body.diagnostics
    params = read_sampling(
        server.runtime,
        body,
        cache.namespace,
        server.config,
        renamed={"stop": "stop_sequences"},
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
    )
    return TurnRequest(
        messages=messages,
        template=template_of(body, messages),
        tools=tools_of(body),
        params=params,
        max_tokens=body.max_tokens,
        constraint=_constraint(body),
        stream=bool(body.stream),
        compare_with=None if diagnostics is None else diagnostics.previous_message_id,
        cache=cache,
    )


def template_of(body: PromptFields, messages: Sequence[dict[str, Any]]) -> TemplateFields:
    """The template's fields. A message of the assistant at the end is continued. Raises
    ApiError."""
    continues = messages[-1]["role"] == "assistant"
    if continues and "tool_calls" in messages[-1]:
        raise ApiError(
            400, "the last message is a tool_use: its tool_result has to follow", param="messages"
        )
    variables = template_variables(
        body.chat_template_kwargs,
        effort=body.output_config.effort if body.output_config is not None else None,
        thinking=body.thinking,
    )
    return TemplateFields(
        add_generation_prompt=False if continues else None,
        continue_final_message=True if continues else None,
        chat_template_kwargs=variables,
    )


def chat_messages(body: PromptFields) -> list[dict[str, Any]]:
    """The system prompt and the messages as chat messages. Adjacent messages of the same role are
    joined into one turn. Raises ApiError."""
    turns: list[tuple[str, list[Any]]] = []
    calls: set[str] = set()  # of the assistant's last turn
    if body.system is not None:
        turns.append(("system", _blocks(body.system)))
    num_before = len(turns)
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        blocks = _blocks(message.content)
        if not blocks and message.role != "assistant":
            raise ApiError(400, f"{where} must be a list with at least one item", param=where)
        _check_results(calls, blocks, where)
        is_more = len(turns) > num_before and turns[-1][0] == message.role
        if message.role == "assistant":
            new_calls = {block.id for block in blocks if isinstance(block, ToolUseBlock)}
            if not is_more:
                calls.clear()
            calls |= new_calls
        if is_more:
            turns[-1][1].extend(blocks)
        else:
            turns.append((message.role, blocks))
    _clear_thinking(turns, body)
    return [message for role, blocks in turns for message in _messages(role, blocks)]


def _blocks(content: str | Sequence[Any]) -> list[Any]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else [*content]


def _check_results(calls: Collection[str], blocks: list[Any], where: str) -> None:
    """Raise ApiError unless each tool_result belongs to one of `calls`, those of the assistant's
    last turn."""
    for index, block in enumerate(blocks):
        if isinstance(block, ToolResultBlock) and block.tool_use_id not in calls:
            problem = f"{shown(block.tool_use_id)} does not name a tool_use of the turn before"
            raise wrong_field(f"{where}[{index}].tool_use_id", problem)


def _clear_thinking(turns: list[tuple[str, list[Any]]], body: PromptFields) -> None:
    """Remove reasoning from turns, as `context_management` asks."""
    edits = body.context_management.edits if body.context_management is not None else []
    for edit in edits:
        num_kept = _num_kept(edit)
        thoughtful = [
            blocks
            for role, blocks in turns
            if role == "assistant" and any(isinstance(block, ThinkingBlock) for block in blocks)
        ]
        for blocks in thoughtful[: max(0, len(thoughtful) - num_kept)]:
            blocks[:] = [block for block in blocks if not isinstance(block, ThinkingBlock)]


def _num_kept(edit: ClearThinking) -> int:
    """The number of turns that keep their reasoning; Anthropic's default is 1."""
    if edit.keep is None:
        return 1
    return 2**31 if isinstance(edit.keep, str) else edit.keep.value


def _messages(role: str, blocks: Sequence[UserBlock | AssistantBlock]) -> list[dict[str, Any]]:
    """A turn as chat messages. Each tool result is a message of its own."""
    if role == "assistant":
        return [_assistant_message(blocks)]
    messages: list[dict[str, Any]] = []
    said: list[Any] = []  # texts and pictures that follow each other
    for block in blocks:
        if isinstance(block, TextBlock | ImageBlock):
            said.append(block)
            continue
        assert isinstance(block, ToolResultBlock)
        if said:
            messages.append({"role": role, "content": _content(said)})
            said = []
        error = [TextBlock(type="text", text=_ERROR)] if block.is_error else []
        content = _content(_blocks(block.content or ""), error)
        messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    if said:
        messages.append({"role": role, "content": _content(said)})
    return messages


def _content(
    blocks: Sequence[TextBlock | ImageBlock], before: Sequence[TextBlock] = ()
) -> str | list[dict[str, Any]]:
    """Texts as one, or with pictures as parts. `before`: texts without a line break after them."""
    if all(isinstance(block, TextBlock) for block in blocks):
        texts = (block.text for block in blocks if isinstance(block, TextBlock))
        return "".join(block.text for block in before) + "\n".join(texts)
    return [block.model_dump(exclude={"cache_control"}) for block in (*before, *blocks)]


def _assistant_message(blocks: Sequence[Any]) -> dict[str, Any]:
    """A turn of the assistant as a chat message. Text blocks are joined without a separator."""
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": _json(block.input)},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message |= {"content": text or None, "tool_calls": calls}
    return message


def tools_of(body: PromptFields) -> ChatTools:
    """The checked tools and tool choice. Raises ApiError and InvalidRequest."""
    functions = []
    for index, tool in enumerate(body.tools or ()):
        if isinstance(tool, Tool):
            function = {"name": tool.name, "parameters": tool.input_schema}
            if tool.description is not None:
                function["description"] = tool.description
            functions.append(PlacedFunction(f"tools[{index}]", "input_schema", function))
    choice = body.tool_choice
    if choice is None:
        return ChatTools.read(functions)
    if (choice.type == "tool") != (choice.name is not None):
        raise ApiError(
            400,
            "tool_choice.name is required for the type tool, and refused for others",
            param="tool_choice.name",
        )
    return ChatTools.read(
        functions,
        _CHOICES[choice.type],
        choice.name,
        parallel=not choice.disable_parallel_tool_use,
        name_place="tool_choice.name",
    )


def _constraint(body: MessagesRequest) -> Constraint | None:
    config = body.output_config
    if config is None or config.format is None:
        return None
    return json_schema("output_config.format", config.format.schema_)


def _json(value: Any) -> str:
    """JSON as the tool parsers write it, so that a call has the same text when it is sent back."""
    return json.dumps(value, ensure_ascii=False)


def retain_hints(body: PromptFields) -> list[CacheHint]:
    """A `retain` hint for Anthropic's `cache_control` marks; [] without a mark.

    The whole prompt, and so each of its prefixes, is retained for the longest time among the marks.
    """
    seconds = [_SECONDS[mark.ttl or "5m"] for mark in _marks(body)]
    return [CacheHint(verb="retain", seconds=max(seconds))] if seconds else []


def _marks(body: PromptFields) -> Iterator[CacheControl]:
    """The `cache_control` marks of the body, its tools, and its blocks."""
    contents = (message.content for message in body.messages)
    parts: list[Any] = [body, *(body.tools or ())]
    for content in (body.system, *contents):
        blocks = content if isinstance(content, list) else []
        parts.extend(blocks)
        for block in blocks:
            results = getattr(block, "content", None)
            parts.extend(results if isinstance(results, list) else ())
    for part in parts:
        mark = getattr(part, "cache_control", None)
        if isinstance(mark, CacheControl):
            yield mark
