"""Request bodies of Anthropic's protocol."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from radixserve.server.wire.body import (
    MAX_ITEMS,
    Body,
    Bounded,
    Members,
    Name,
    OtherTool,
    Short,
    TextOrList,
    by_role,
    by_type,
)
from radixserve.server.wire.fields import rules_of
from radixserve.server.wire.schema import (
    CacheFields,
    SessionFields,
    StopText,
    Thinking,
    text_or_object,
)


class CacheControl(Body):
    """A mark that becomes a `retain` hint: see `retain_hints`."""

    skips_unknown: ClassVar[bool] = True

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(Body):
    skips_unknown: ClassVar[bool] = True


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ImageBlock(_Block):
    """A picture: {"type": "base64", "media_type", "data"} or {"type": "url", "url"}."""

    type: Literal["image"]
    source: Annotated[Any, WithJsonSchema({"type": "object"})] = None
    cache_control: CacheControl | None = None


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")],
    Discriminator(by_type),
]


class ToolUseBlock(_Block):
    type: Literal["tool_use"]
    id: Name
    name: Name
    input: Members
    cache_control: CacheControl | None = None


class ToolResultBlock(_Block):
    type: Literal["tool_result"]
    tool_use_id: Name
    content: TextOrList[ResultBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class ThinkingBlock(_Block):
    """The model's reasoning. `signature` has no effect."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(by_type),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")],
    Discriminator(by_type),
]


class UserMessage(_Block):
    role: Literal["user"]
    content: TextOrList[UserBlock]


class AssistantMessage(_Block):
    role: Literal["assistant"]
    content: TextOrList[AssistantBlock]


class SystemMessage(_Block):
    role: Literal["system"]
    content: TextOrList[TextBlock]


InputMessage = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[SystemMessage, Tag("<system>")],
    Discriminator(by_role),
]


class Tool(Body):
    rules: ClassVar = rules_of("messages", "tools[]")

    name: str
    input_schema: Annotated[Any, WithJsonSchema({"type": "object"})]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=8)] | None = None


def tool_kind(value: Any) -> str | None:
    """The tag of a tool: "<custom>", or "<other>" for server tools, which are left out."""
    if not isinstance(value, dict):
        return None
    is_other = isinstance(value.get("type"), str) and value["type"] != "custom"
    return "<other>" if is_other else "<custom>"


AnthropicTool = Annotated[
    Annotated[Tool, Tag("<custom>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(tool_kind),
]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessageThinking(Thinking):
    rules: ClassVar = rules_of("messages", "thinking")


class JsonFormat(Body):
    type: Literal["json_schema"]
    schema_: Members = Field(alias="schema")


class OutputConfig(Body):
    format: JsonFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class ThinkingTurns(Body):
    type: Literal["thinking_turns"]
    value: Annotated[int, Field(ge=1)]


class ClearThinking(Body):
    """Leaves out reasoning, except in the last `keep` turns of the assistant that have some."""

    type: Annotated[str, Field(pattern=r"^clear_thinking_\d+$", max_length=64)]
    keep: (
        Annotated[
            Annotated[Literal["all"], Tag("<text>")] | Annotated[ThinkingTurns, Tag("<object>")],
            Discriminator(text_or_object),
        ]
        | None
    ) = None


class ContextManagement(Body):
    edits: Annotated[list[ClearThinking], Field(max_length=8, fail_fast=True)] = []


class Metadata(Body):
    """`user_id` may name the session, if no other field or header does."""

    skips_unknown: ClassVar[bool] = True

    user_id: Short | None = None


class Diagnostics(Body):
    """Asks where this prompt differs from that of an earlier message, and so missed the cache.
    null: there is no earlier message yet."""

    skips_unknown: ClassVar[bool] = True

    previous_message_id: Short | None = None


class PromptFields(CacheFields):
    """The fields that determine the prompt."""

    rules: ClassVar = rules_of("messages")

    model: Short
    messages: Annotated[
        list[InputMessage], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)
    ]
    system: TextOrList[TextBlock] | None = None
    tools: Bounded[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: MessageThinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: Members | None = None


class CountTokensRequest(PromptFields):
    """The body of /v1/messages/count_tokens."""


class MessagesRequest(PromptFields, SessionFields):
    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[StopText], Field(max_length=64, fail_fast=True)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    diagnostics: Diagnostics | None = None
    seed: int | None = None
    priority: int | None = None
