"""What clients of OpenAI's responses send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from radixserve.server.schema import Body, CacheFields

_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "type": {"enum": ["input_text", "output_text"]},
                    "text": {"type": "string"},
                },
                "required": ["type", "text"],
            },
        },
    ]
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": _CONTENT,
    },
    "required": ["role", "content"],
}
_CALL = {
    "type": "object",
    "properties": {
        "type": {"const": "function_call"},
        "call_id": {"type": "string"},
        "name": {"type": "string"},
        "arguments": {"type": "string"},
    },
    "required": ["type", "call_id", "name", "arguments"],
}
_OUTPUT = {
    "type": "object",
    "properties": {
        "type": {"const": "function_call_output"},
        "call_id": {"type": "string"},
        "output": _CONTENT,
    },
    "required": ["type", "call_id", "output"],
}
_REASONING = {
    "type": "object",
    "properties": {"type": {"const": "reasoning"}, "summary": {"type": "array", "maxItems": 0}},
    "required": ["type", "summary"],
}
_ITEMS = {
    "type": "array",
    "minItems": 1,
    "items": {"anyOf": [_MESSAGE, _CALL, _OUTPUT, _REASONING]},
}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "name": {"type": "string"},
        "parameters": {"type": "object"},
    },
    "required": ["type", "name"],
}
_CHOICE = {
    "anyOf": [
        {"enum": ["auto", "none", "required", None]},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
        },
    ]
}
_FORMAT = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "json_schema"},
                "name": {"type": "string", "minLength": 1},
                "schema": {"type": "object"},
            },
            "required": ["type", "name", "schema"],
        },
        {"type": "null"},
    ]
}
# Checked by `translate`, for errors that name the item.
Input = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _ITEMS]})]
ResponseTools = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _TOOL}, {"type": "null"}]})
]
TextFormat = Annotated[Any, WithJsonSchema(_FORMAT)]
ResponseToolChoice = Annotated[Any, WithJsonSchema(_CHOICE)]
Name = Annotated[str, Field(min_length=1)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]
_Status = Literal["in_progress", "completed", "incomplete"] | None


class TextPart(Body):
    """`logprobs` and `annotations` come back with answers; they have no effect."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Any
    id: str | None = None
    status: _Status = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(Body):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    id: str | None = None
    status: _Status = None


class OutputItem(Body):
    type: Literal["function_call_output"]
    call_id: Name
    output: Any
    id: str | None = None
    status: _Status = None


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: Annotated[list[Any], Field(max_length=0)] = []
    content: list[ReasoningText] | None = None
    encrypted_content: None = None
    id: str | None = None
    status: _Status = None


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Body):
    type: Literal["function"]
    name: str


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    """`none` sets the template's variable enable_thinking to false."""

    effort: Literal["none"] | None = None


class ResponseRequest(CacheFields):
    input: Input
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    tools: ResponseTools = None
    tool_choice: ResponseToolChoice = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Not OpenAI's.
    top_k: int | None = None
    seed: int | None = None
    priority: int | None = None
    session_id: str | None = None
    supersede: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
