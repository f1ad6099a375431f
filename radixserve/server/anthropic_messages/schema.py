"""What clients of Anthropic's protocol send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from radixserve.server.schema import Body, CacheFields

_TEXT_BLOCK = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_BLOCK}]}
_TOOL_USE = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_use"},
        "id": {"type": "string"},
        "name": {"type": "string"},
        "input": {"type": "object"},
    },
    "required": ["type", "id", "name", "input"],
}
_TOOL_RESULT = {
    "type": "object",
    "properties": {
        "type": {"const": "tool_result"},
        "tool_use_id": {"type": "string"},
        "content": _TEXTS,
        "is_error": {"type": "boolean"},
    },
    "required": ["type", "tool_use_id"],
}
_THINKING = {
    "type": "object",
    "properties": {
        "type": {"const": "thinking"},
        "thinking": {"type": "string"},
        "signature": {"type": "string"},
    },
    "required": ["type", "thinking"],
}
_BLOCK = {"anyOf": [_TEXT_BLOCK, _TOOL_USE, _TOOL_RESULT, _THINKING]}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["user", "assistant", "system"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]},
    },
    "required": ["role", "content"],
}
_TOOL = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "input_schema": {"type": "object"},
    },
    "required": ["name", "input_schema"],
}
# Checked by `translate`, for errors that name the block.
AnthropicMessages = Annotated[
    Any, WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1})
]
System = Annotated[Any, WithJsonSchema({"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]})]
AnthropicTools = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "array", "items": _TOOL}, {"type": "null"}]})
]
Name = Annotated[str, Field(min_length=1)]


class CacheControl(Body):
    """A retain hint."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class DirectCaller(Body):
    type: Literal["direct"]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None
    toolset_name: None = None


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: Any = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


class ThinkingBlock(Body):
    """`signature` has no effect: what the model thought is taken as it is."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Any


class Tool(Body):
    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they come
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """`disabled` sets the template's variable enable_thinking to false."""

    type: Literal["adaptive", "disabled"]


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    format: JsonFormat | None = None


class Metadata(Body):
    """No effect."""

    user_id: str | None = None


class PromptFields(CacheFields):
    """What becomes the prompt."""

    model: str
    messages: AnthropicMessages
    system: System = None
    tools: AnthropicTools = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CountTokensRequest(PromptFields):
    """How long is the prompt?"""


class MessagesRequest(PromptFields):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    seed: int | None = None
    priority: int | None = None
    session_id: str | None = None
    supersede: bool | None = None
