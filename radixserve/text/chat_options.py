"""`ChatOptions`: what a chat template is given besides the messages, checked."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixserve.checks import shown
from radixserve.errors import InvalidRequest

# Arguments of transformers' apply_chat_template that are not variables of a template.
_RESERVED = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding"),
        *("add_generation_prompt", "continue_final_message", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)
_TOOL = (
    'a tool is {"type": "function", "function": {"name": ..., "description": ..., "parameters": '
    "JSON schema}}, or what its function is"
)


class ToolsIgnored(UserWarning):
    """The chat template has no place for tools: the model is not told of them."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """tools: functions that the model may call. template_kwargs: variables of the template, such as
    enable_thinking. template: Jinja, None is the tokenizer's own."""

    tools: tuple[dict[str, Any], ...] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    template: str | None = None

    @classmethod
    def read(
        cls, tools: object, template_kwargs: object, template: str | None = None
    ) -> ChatOptions:
        """Raises InvalidRequest."""
        return cls(_read_tools(tools), _read_kwargs(template_kwargs), template)

    @property
    def is_given(self) -> bool:
        return bool(self.tools or self.template_kwargs)


def begun_answer(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The text of a last message of the assistant, which is to be continued; None where there is
    none. Raises InvalidRequest where it has no text."""
    if not messages or messages[-1].get("role") != "assistant":
        return None
    content = messages[-1].get("content")
    if isinstance(content, list | tuple):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or messages[-1].get("tool_calls"):
        raise InvalidRequest(
            "a last message of the assistant is continued: it must be text without tool calls, "
            f"got {shown(messages[-1])}"
        )
    return content


def _read_kwargs(value: object) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise InvalidRequest(
            f"chat_template_kwargs must be {{variable: value}}, got {shown(value)}"
        )
    reserved = sorted(_RESERVED.intersection(value))
    if reserved:
        raise InvalidRequest(
            f"chat_template_kwargs are variables of the template; {', '.join(reserved)} cannot be "
            "given there"
        )
    return copy.deepcopy(dict(value))


def _read_tools(value: object) -> tuple[dict[str, Any], ...] | None:
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequest(f"tools must be a list; {_TOOL}; got {shown(value)}")
    for at, tool in enumerate(value):
        problem = _tool_problem(tool)
        if problem is not None:
            raise InvalidRequest(f"tool {at}: {problem}; {_TOOL}; got {shown(tool)}")
    names = [_function_of(tool)["name"] for tool in value]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise InvalidRequest(f"tools must have different names, got {', '.join(doubled)} twice")
    return tuple(copy.deepcopy(dict(tool)) for tool in value) or None


def _function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = tool.get("function", tool)
    return function


def _tool_problem(tool: object) -> str | None:
    if not isinstance(tool, Mapping):
        return "it is no object"
    if "function" in tool and tool.get("type", "function") != "function":
        return f"type must be 'function', got {shown(tool['type'])}"
    function = _function_of(tool)
    if not isinstance(function, Mapping):
        return f"function must be an object, got {shown(function)}"
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return f"name must be a non-empty string, got {shown(name)}"
    if not isinstance(function.get("description", ""), str):
        return f"description must be a string, got {shown(function['description'])}"
    parameters = function.get("parameters")
    return None if parameters is None else _schema_problem(parameters)


def _schema_problem(schema: object) -> str | None:
    """What is wrong with a JSON schema of a function's arguments, as far as templates read it."""
    if not isinstance(schema, Mapping):
        return f"parameters must be a JSON schema, got {shown(schema)}"
    if schema.get("type", "object") != "object":
        return f"parameters must be of type 'object', got {shown(schema['type'])}"
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        return f"properties must be an object, got {shown(properties)}"
    for name, one in properties.items():
        if not isinstance(name, str) or not isinstance(one, Mapping | bool):
            return f"property {shown(name)} must be a JSON schema, got {shown(one)}"
    required = schema.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(x, str) for x in required):
        return f"required must be a list of names, got {shown(required)}"
    unknown = [name for name in required if name not in properties]
    if unknown:
        return f"required names {', '.join(unknown)}, which properties does not have"
    return None
