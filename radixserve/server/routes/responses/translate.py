"""Translates a request for a response into a `TurnRequest`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixserve.checks import shown
from radixserve.server.answer.tool_choice import ChatTools, PlacedFunction
from radixserve.server.answer.tool_parsers.base import read_json
from radixserve.server.gate.state import AppState
from radixserve.server.prompt.rendering import template_variables, thinks_at
from radixserve.server.routes.responses.schema import (
    CallItem,
    InputItem,
    MessageItem,
    OutputItem,
    Part,
    ReasoningItem,
    ResponseFunctionTool,
    ResponseImagePart,
    ResponseNamedTool,
    ResponseRequest,
    ResponseTextPart,
    SchemaFormat,
)
from radixserve.server.turn.cache_use import CacheUse
from radixserve.server.turn.chat_turn import TurnRequest
from radixserve.server.turn.structured_outputs import Constraint, json_schema
from radixserve.server.wire.errors import wrong_field
from radixserve.server.wire.sampling import read_sampling, token_limit
from radixserve.server.wire.schema import TemplateFields
from radixserve.text.template_traits import Message


def turn_request(
    server: AppState, body: ResponseRequest, messages: Sequence[Message], cache: CacheUse
) -> TurnRequest:
    """Translate a body. `messages`: the conversation without the instructions. Raises ApiError."""
    said = [] if body.instructions is None else [_message("system", body.instructions)]
    limit_name, max_tokens = token_limit(body, "max_output_tokens", "n_predict")
    effort = body.reasoning.effort if body.reasoning is not None else None
    options = body.prompt_cache_options
    params = read_sampling(
        server.runtime,
        body,
        cache.namespace,
        server.config,
        renamed={"max_tokens": limit_name, "logprobs": "top_logprobs"},
        max_tokens=server.runtime.max_seq_len if max_tokens is None else max_tokens,
        logprobs=body.num_logprobs,
    )
    return TurnRequest(
        messages=[*said, *messages],
        messages_name="input",
        template=TemplateFields(
            chat_template_kwargs=template_variables(
                body.chat_template_kwargs,
                effort=effort,
                enable_thinking=body.enable_thinking,
                thinking=body.thinking,
                thinks=thinks_at(effort),
                verbosity=body.text.verbosity if body.text is not None else None,
            )
        ),
        tools=_tools(body),
        params=params,
        max_tokens=max_tokens,
        constraint=_constraint(body),
        stream=bool(body.stream),
        background=bool(body.background),
        prewarm=options is not None and bool(options.prewarm),
        compare_with=None if options is None else options.comparison_response_id,
        cache=cache,
    )


def items_of(body: ResponseRequest) -> list[InputItem]:
    """The items of the input; a text is a message of the user."""
    if not isinstance(body.input, str):
        return body.input
    return [MessageItem(role="user", content=body.input)]


def messages_of(items: Sequence[InputItem]) -> list[Message]:
    """Items as chat messages. Raises ApiError."""
    turns = _Turns()
    for index, item in enumerate(items):
        turns.add(item, f"input[{index}]")
    return turns.all()


class _Turns:
    """Converts items to messages in order. The items of one turn of the assistant become a single
    message."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        # An assistant's message and its pieces of reasoning, by the number of messages up to it.
        self._thoughts: dict[int, tuple[Message, list[str]]] = {}

    def all(self) -> list[Message]:
        for said, thoughts in self._thoughts.values():
            said["reasoning_content"] = "".join(thoughts)
        return self._messages

    def add(self, item: InputItem, where: str) -> None:
        if isinstance(item, MessageItem):
            if item.role == "assistant":
                said = self._message({"content", "tool_calls"})
                said["content"] = _text(item.content, "")  # the parts of an answer are one text
            else:
                self._messages.append(_message(item.role, _content(item.content)))
        elif isinstance(item, CallItem):
            said = self._message(set())
            said.setdefault("tool_calls", []).append(_call(item, where))
        elif isinstance(item, OutputItem):
            content = _content(item.output)
            message = {"role": "tool", "tool_call_id": item.call_id, "content": content}
            self._messages.append(message)
        else:
            said = self._message({"content", "tool_calls"})
            self._thoughts.setdefault(len(self._messages), (said, []))[1].append(_thought(item))

    def _message(self, ends: set[str]) -> Message:
        """The assistant's message at the end of the conversation; a new one if the last message is
        not the assistant's or has one of the members `ends`."""
        last = self._messages[-1] if self._messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in ends):
            last = {"role": "assistant", "content": ""}
            self._messages.append(last)
        return last


def check_calls(known: Sequence[Message], items: Sequence[InputItem]) -> None:
    """Raise ApiError unless each output belongs to a call before it, in `items` or in the `known`
    messages of the response that they continue."""
    calls = {call["id"] for message in known for call in message.get("tool_calls", ())}
    for index, item in enumerate(items):
        if isinstance(item, CallItem):
            calls.add(item.call_id)
        if isinstance(item, OutputItem) and item.call_id not in calls:
            problem = f"{shown(item.call_id)} does not name a function_call before it"
            raise wrong_field(f"input[{index}].call_id", problem)


def listed_items(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """Items as GET .../input_items lists them, without ids; texts are lists of parts there."""
    listed = []
    for item in items:
        fields = item.model_dump(exclude_none=True)
        if isinstance(fields.get("content"), str):
            kind = "output_text" if fields["role"] == "assistant" else "input_text"
            fields["content"] = [{"type": kind, "text": fields["content"]}]
        listed.append(fields)
    return listed


def _message(role: str, content: str | list[dict[str, Any]]) -> Message:
    return {"role": role, "content": content}


def _content(content: str | Sequence[Part]) -> str | list[dict[str, Any]]:
    """Texts as one, or with pictures as parts."""
    if isinstance(content, str) or not any(isinstance(part, ResponseImagePart) for part in content):
        return _text(content, "\n")
    return [part.model_dump(include={"type", "text", "refusal", "image_url"}) for part in content]


def _text(content: str | Sequence[Part], separator: str) -> str:
    if isinstance(content, str):
        return content
    return separator.join(
        part.text if isinstance(part, ResponseTextPart) else part.refusal
        for part in content
        if not isinstance(part, ResponseImagePart)
    )


def _thought(item: ReasoningItem) -> str:
    return "".join(part.text for part in item.content or item.summary)


def _call(item: CallItem, where: str) -> Message:
    try:
        is_object = isinstance(read_json(item.arguments), dict)
    except ValueError:
        is_object = False
    if not is_object and item.arguments.strip():
        problem = f"must be the JSON text of an object, got {shown(item.arguments)}"
        raise wrong_field(f"{where}.arguments", problem)
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _tools(body: ResponseRequest) -> ChatTools:
    functions = [
        PlacedFunction(
            f"tools[{index}]",
            "parameters",
            tool.model_dump(exclude={"type", "strict"}, exclude_none=True),
        )
        for index, tool in enumerate(body.tools or ())
        if isinstance(tool, ResponseFunctionTool)
    ]
    choice = body.tool_choice
    return ChatTools.read(
        functions,
        "named" if isinstance(choice, ResponseNamedTool) else choice,
        choice.name if isinstance(choice, ResponseNamedTool) else None,
        parallel=body.parallel_tool_calls,
        name_place="tool_choice.name",
    )


def _constraint(body: ResponseRequest) -> Constraint | None:
    form = body.text.format if body.text is not None else None
    if isinstance(form, SchemaFormat):
        return json_schema("text.format", form.schema_, form.strict)
    if form is None or form.type == "text":
        return None
    return Constraint("text.format", {"json_object": True})
