"""Request bodies of OpenAI's responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, WithJsonSchema, model_validator

from radixserve.server.wire.body import (
    MAX_ITEMS,
    Body,
    Bounded,
    Members,
    Name,
    OtherTool,
    Short,
    TextOrList,
    by_type,
)
from radixserve.server.wire.cache_fields import (
    CacheBreakpoint,
    breakpoints_of,
)
from radixserve.server.wire.fields import rules_of
from radixserve.server.wire.schema import (
    OtherNames,
    PromptCacheFields,
    Reasoning,
    SessionFields,
    SingleSampling,
    ThinkingFields,
    Verbosity,
    text_or_object,
    tool_kind,
)

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]


LOGPROBS = "message.output_text.logprobs"  # in `include`


class _Part(Body):
    skips_unknown: ClassVar[bool] = True


class _Item(_Part):
    """An item of the input. Clients send `id` and `status` back from answers; they have no
    effect."""

    id: Short | None = None
    status: Short | None = None


class ResponseTextPart(_Part):
    """A text. Clients send `annotations` and `logprobs` back from answers; they have no effect."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Bounded[Any] | None = None
    logprobs: Bounded[Any] | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class ResponseRefusalPart(_Part):
    """An assistant's refusal."""

    type: Literal["refusal"]
    refusal: str


class ResponseImagePart(_Part):
    """A picture: a data URL, or a URL of an allowed host. `detail` has no effect."""

    type: Literal["input_image"]
    image_url: Annotated[Any, WithJsonSchema({"type": "string"})] = None
    detail: Short | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


Part = Annotated[
    Annotated[ResponseTextPart, Tag("<input_text>")]
    | Annotated[ResponseImagePart, Tag("<input_image>")]
    | Annotated[ResponseTextPart, Tag("<output_text>")]
    | Annotated[ResponseTextPart, Tag("<text>")]
    | Annotated[ResponseRefusalPart, Tag("<refusal>")],
    Discriminator(by_type),
]


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextOrList[Part]
    phase: Short | None = None


class CallItem(_Item):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str


class OutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: Name
    output: TextOrList[Part]


class ReasoningText(_Part):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


class ReasoningItem(_Item):
    """The model's reasoning: its content, or else its summary. The `encrypted_content` of other
    servers cannot be read."""

    type: Literal["reasoning"]
    summary: Bounded[ReasoningText] = []
    content: Bounded[ReasoningText] | None = None


def item_kind(value: Any) -> str | None:
    """The tag of an item: its type; without a type, it is a message."""
    if isinstance(value, dict) and value.get("type") is None:
        return "<message>"
    return by_type(value)


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[OutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(item_kind),
]
Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


def text_or_items(value: Any) -> str | None:
    """The tag of an input: "<text>" for a text of the user, "<list>" for items."""
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


Input = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Items, Tag("<list>")], Discriminator(text_or_items)
]


class ResponseFunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Annotated[Any, WithJsonSchema({"type": "object"})] = None
    strict: bool | None = None


ResponseTool = Annotated[
    Annotated[ResponseFunctionTool, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(tool_kind),
]


class ResponseNamedTool(Body):
    type: Literal["function"]
    name: str


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[ResponseNamedTool, Tag("<object>")],
    Discriminator(text_or_object),
]


class PlainFormat(Body):
    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    type: Literal["json_schema"]
    name: Name
    schema_: Members = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


TextFormat = Annotated[
    Annotated[PlainFormat, Tag("<text>")]
    | Annotated[PlainFormat, Tag("<json_object>")]
    | Annotated[SchemaFormat, Tag("<json_schema>")],
    Discriminator(by_type),
]


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ResponseRequest(SingleSampling, OtherNames, ThinkingFields, SessionFields, PromptCacheFields):
    rules: ClassVar = rules_of("responses")

    input: Input
    model: Short | None = None
    instructions: str | None = None
    previous_response_id: Short | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    tools: Bounded[ResponseTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    include: Bounded[Short] | None = None
    top_logprobs: int | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: Metadata | None = None
    user: Short | None = None
    safety_identifier: Short | None = None
    prompt_cache_key: Short | None = None
    chat_template_kwargs: Members | None = None

    @model_validator(mode="after")
    def _skip_includes(self) -> Self:
        """Note `include` as skipped if it has values other than the log-probabilities'."""
        if any(name != LOGPROBS for name in self.include or ()):
            self._skipped = (*self._skipped, "include")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """How many of the best tokens to report with each token; None: no log-probabilities."""
        wants_logprobs = LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        return (self.top_logprobs or 0) if wants_logprobs else None

    def breakpoints(self) -> Iterator[CacheBreakpoint]:
        """The cache breakpoints of all items."""
        for item in self.input:
            yield from breakpoints_of(getattr(item, "content", None))
            yield from breakpoints_of(getattr(item, "output", None))
