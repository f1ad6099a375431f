"""Fields that are checked by hand, for errors that name the place; with their JSON schemas."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
Prompts = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}),
]
Stop = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {**_TEXTS, "minItems": 0, "maxItems": 64}, {"type": "null"}]}
    ),
]
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "minLength": 1},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "type", "function"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]
        },
        "name": {"type": "string"},
        "reasoning_content": {"type": "string"},
        "tool_calls": {"type": "array", "items": _CALL},
        "tool_call_id": {"type": "string"},
    },
    "required": ["role"],
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "schema": {"type": "object"},
        "strict": {"type": "boolean"},
    },
    "required": ["schema"],
}
# Read by server/structured.py.
ResponseFormat = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": _SCHEMA,
            },
            "required": ["type"],
        }
    ),
]
StructuredOutputs = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "json": {"anyOf": [{"type": "object"}, {"type": "string"}]},
                "regex": {"type": "string"},
                "choice": _TEXTS,
                "grammar": {"type": "string"},
                "json_object": {"type": "boolean"},
                "whitespace_pattern": {"type": "string"},
                "disable_any_whitespace": {"type": "boolean"},
                "jump_forward": {"type": "boolean"},
            },
        }
    ),
]
Messages = Annotated[Any, WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1})]


def _function_with(properties: dict[str, Any]) -> dict[str, Any]:
    function = {"type": "object", "properties": properties, "required": ["name"]}
    return {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": function},
        "required": ["type", "function"],
    }


_TOOL = _function_with(
    {
        "name": {"type": "string", "minLength": 1, "maxLength": 128},
        "description": {"type": "string"},
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    }
)
ToolList = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _TOOL}, {"type": "null"}]})
]
_NAMED_TOOL = _function_with({"name": {"type": "string"}})
ToolChoice = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED_TOOL, {"type": "null"}]}
    ),
]
