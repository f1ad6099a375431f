"""Request bodies of completions, chats, `/generate` and radixserve's own routes.

To add a field to chat completions, add it to `ChatRequest` (or to `GenerationFields`, for
completions as well), use it in `_turn_request` of `routes/chat.py`, and delete its rule in
`fields.py` if it has one. A field of `Sampling` needs no code in the route, only the field of the
same name in `request.SamplingParams`. The bodies of responses and of Anthropic's messages are
defined beside their routes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from radixserve.server.wire.body import (
    MAX_ITEMS,
    MAX_STOP_TEXT,
    Body,
    Bounded,
    Ids,
    Members,
    Name,
    OtherTool,
    Short,
    TextOrList,
    by_type,
    from_array,
    text_or_list,
)
from radixserve.server.wire.cache_fields import (
    CacheBreakpoint,
    CacheHint,
    KVHints,
    PromptCacheOptions,
    Retention,
    breakpoints_of,
)
from radixserve.server.wire.fields import rules_of

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
# `prompt/prompt_input.py` checks prompts: pydantic would take too long for a million token ids.
Prompts = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}),
]


# SamplingParams checks the values; the names are token ids.
LogitBias = Annotated[
    dict[str, Any],
    Field(max_length=65_536),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
_MAX_TOKENS = 524_288  # longer than the context of most models
Tokens = Annotated[
    list[int], Field(max_length=_MAX_TOKENS, fail_fast=True), from_array(_MAX_TOKENS)
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
StopText = Annotated[str, Field(max_length=MAX_STOP_TEXT)]
Stops = Annotated[
    Annotated[StopText, Tag("<text>")] | Annotated[Bounded[StopText], Tag("<list>")],
    Discriminator(text_or_list),
]
_SCHEMA_OR_TEXT = {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}


class CommonSampling(Body):
    """Sampling fields with the same names in OpenAI's protocol and in SGLang's. None: the model's
    default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Stops | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None


class SingleSampling(CommonSampling):
    """Fields of SamplingParams under the same names, for a single answer. None: the model's
    default."""

    min_tokens: int | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Bounded[Short] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None
    priority: int | None = None


class Sampling(SingleSampling):
    """All fields of SamplingParams that bodies have under the same names: `read_sampling`."""

    n: int | None = None
    max_tokens: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int | None = None


class OtherNames(Body):
    """Names that other servers have for fields of ours; `read_sampling` reads them."""

    repeat_penalty: float | None = None
    n_predict: int | None = None
    random_seed: int | None = None


class Thinking(Body):
    """Switches a model's reasoning on or off. Other types leave it to the template."""

    type: Literal["adaptive", "auto", "disabled", "enabled"]
    budget_tokens: int | None = None

    @property
    def thinks(self) -> bool | None:
        """The template's variable `enable_thinking`; None: its default."""
        return {"enabled": True, "disabled": False}.get(self.type)

    @property
    def budget(self) -> int | None:
        """The template's variable `thinking_budget`."""
        return self.budget_tokens if self.type == "enabled" else None


class ThinkingFields(Body):
    """Fields that become variables of the template: `template_variables`."""

    enable_thinking: bool | None = None
    thinking: Thinking | None = None


class Reasoning(Body):
    """An `effort` of "none" sets the template's variable enable_thinking to false."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ChatReasoning(Reasoning):
    """`reasoning` of a chat, as routers of several vendors have it."""

    rules: ClassVar = rules_of("chat", "reasoning")

    enabled: bool | None = None
    max_tokens: int | None = None
    exclude: bool | None = None


class StreamOptions(Body):
    """`include_usage` null is false: the stream has no usage. See `StreamUsage`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CacheFields(Body):
    """The namespace of the cache: a field of every route that reads or fills the cache."""

    cache_salt: Short | None = None


class SessionFields(CacheFields):
    """The session of a request, and hints for its K/V; see `CacheUse`."""

    session_id: str | None = None
    supersede: bool | None = None
    kv_hints: KVHints | None = None


class PromptCacheFields(Body):
    """OpenAI's cache fields of chats and responses."""

    prompt_cache_options: PromptCacheOptions | None = None
    prompt_cache_retention: Retention | None = None


class JsonSchemaFormat(Body):
    """The JSON schema of the answer. `strict` true refuses a `uniqueItems` that cannot be enforced.
    `name` and `description` have no effect."""

    schema_: Members = Field(alias="schema")
    name: Short | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """The fields of `StructuredOutput`, which checks them."""

    json_: Annotated[Any, WithJsonSchema(_SCHEMA_OR_TEXT)] = Field(None, alias="json")
    regex: str | None = None
    choice: Bounded[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    strict: bool | None = None
    jump_forward: bool | None = None


class GenerationFields(Sampling, OtherNames, SessionFields):
    """The common fields of completions and chats. With `use_beam_search`, `n` is the width of the
    search."""

    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None

    model: Short | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: Short | None = None
    cache_hints: Bounded[CacheHint] | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    logprob_token_ids: Ids | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionRequest(GenerationFields):
    """The body of /v1/completions."""

    rules: ClassVar = rules_of("completions")

    prompt: Prompts
    best_of: int | None = None
    logprobs: int | None = None


class TextPart(Body):
    """A part of a message's content."""

    skips_unknown: ClassVar[bool] = True

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class RefusalPart(Body):
    """An assistant's refusal."""

    skips_unknown: ClassVar[bool] = True

    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(by_type),
]


class ImagePart(Body):
    """A picture, in OpenAI's form: a data URL, or a URL of an allowed host. `detail` has no
    effect."""

    skips_unknown: ClassVar[bool] = True

    type: Literal["image_url"]
    image_url: Annotated[Any, WithJsonSchema({"type": "object"})] = None


MessagePart = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<image_url>")],
    Discriminator(by_type),
]


class CalledFunction(Body):
    name: Name
    arguments: Annotated[Any, WithJsonSchema({"type": "string"})] = None


class MessageCall(Body):
    """A tool call of an assistant's message."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class ChatMessage(Body):
    """A message of chat completions; unknown members have no effect."""

    skips_unknown: ClassVar[bool] = True

    role: Short
    content: TextOrList[MessagePart] | None = None
    name: Short | None = None
    refusal: str | None = None
    annotations: Bounded[Any] | None = None  # clients send them back from answers; no effect
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[MessageCall], Field(max_length=1_024, fail_fast=True)] | None = None
    tool_call_id: Short | None = None

    def as_message(self) -> dict[str, Any]:
        """The message as `read_messages` takes it: a dict without null members."""
        content: Any = self.content
        if isinstance(content, list):
            content = [part.model_dump(exclude={"prompt_cache_breakpoint"}) for part in content]
        message: dict[str, Any] = {"role": self.role, "content": content}
        for name in ("name", "refusal", "reasoning_content", "reasoning", "tool_call_id"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        if self.tool_calls:
            calls = (call.model_dump(exclude={"index"}) for call in self.tool_calls)
            message["tool_calls"] = list(calls)
        return message


class PredictedContent(Body):
    """A text that large parts of the answer are probably equal to."""

    type: Literal["content"]
    content: TextOrList[ContentPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, TextPart))


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class ToolFunction(Body):
    """A function that the model may call; `text/tool_functions.py` checks its name and schema."""

    skips_unknown: ClassVar[bool] = True

    name: str
    description: str | None = None
    parameters: Annotated[Any, WithJsonSchema({"type": "object"})] = None
    return_: Annotated[Any, WithJsonSchema({"type": "object"})] = Field(None, alias="return")
    strict: bool | None = None


class FunctionTool(Body):
    skips_unknown: ClassVar[bool] = True

    type: Literal["function"] = "function"
    function: ToolFunction


def tool_kind(value: Any) -> str | None:
    """The tag of a tool: "<function>", or "<other>" for a tool that is left out of the prompt."""
    if not isinstance(value, dict):
        return None
    is_other = isinstance(value.get("type"), str) and value["type"] != "function"
    return "<other>" if is_other else "<function>"


ChatTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[OtherTool, Tag("<other>")],
    Discriminator(tool_kind),
]


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


def text_or_object(value: Any) -> str | None:
    """The tag of a choice: "<text>" for a word, "<object>" for a named tool."""
    if isinstance(value, str):
        return "<text>"
    return "<object>" if isinstance(value, dict) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[NamedTool, Tag("<object>")],
    Discriminator(text_or_object),
]


class TemplateFields(Body):
    """Fields that control how messages are rendered."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Members | None = None
    tools: Bounded[ChatTool] | None = None


class ChatRequest(GenerationFields, TemplateFields, ThinkingFields, PromptCacheFields):
    """The body of /v1/chat/completions."""

    rules: ClassVar = rules_of("chat")

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ChatReasoning | None = None
    include_reasoning: bool | None = None
    return_prompt_text: bool | None = None
    verbosity: Verbosity | None = None
    prediction: PredictedContent | None = None

    def breakpoints(self) -> Iterator[CacheBreakpoint]:
        """The cache breakpoints of all messages."""
        for message in self.messages:
            yield from breakpoints_of(message.content)


class TokenizeRequest(TemplateFields):
    """The body of /tokenize: text, or messages as a chat would render them."""

    model: Short | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: Short | None = None
    tokens: Tokens
    skip_special_tokens: bool | None = None


class LookupRequest(TemplateFields, CacheFields):
    """The body of /v1/cache/lookup: text or token ids, or messages as a chat would render them."""

    model: Short | None = None
    prompt: Prompts = None
    messages: Messages | None = None


class PrefixHint(CacheHint, TemplateFields, CacheFields):
    """A hint for a prompt, for messages as a chat would render them, or for a session."""

    prompt: Prompts = None
    messages: Messages | None = None
    session_id: str | None = None


class HintsRequest(Body):
    hints: Bounded[PrefixHint]
    model: Short | None = None
    tenant: Short | None = None


class LoadAdapterRequest(Body):
    """The body of /v1/load_lora_adapter, as vLLM has it."""

    lora_name: Short | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None  # also where an adapter has that name


class UnloadAdapterRequest(Body):
    """The body of /v1/unload_lora_adapter, as vLLM has it."""

    lora_name: Short | None = None
    lora_int_id: int | None = None  # vLLM's number; the name decides


class FlushRequest(Body):
    tenant: Short | None = None
    cache_salt: Short | None = None


class SnapshotRequest(Body):
    """The nodes of the tree to show in addition to those that are in use, new or hot."""

    opened: Ids | None = None
    path: Ids | None = None


class TeachingRequest(Body):
    """A script for the teaching allocator, see `radixserve.replay.teaching`."""

    script: Bounded[dict[str, Any]]
    cache: Literal["radix", "hash", "off"] | None = None


class ScoreRequest(CacheFields):
    """The body of /v1/score: a prompt, and the candidates to score as its continuation."""

    model: Short | None = None
    prompt: Prompts
    candidates: Prompts
    return_token_ids: bool | None = None


class NativeSampling(CommonSampling):
    """The `sampling_params` of /generate, under SGLang's names."""

    n: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    logit_bias: LogitBias | None = None
    skip_special_tokens: bool | None = None
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class GenerateRequest(Sampling, SessionFields):
    """The body of /generate: SGLang's text or input_ids with sampling_params, or the short
    protocol's prompt with the sampling fields beside it."""

    rules: ClassVar = rules_of("generate")

    prompt: Prompts = None
    text: Prompts = None
    input_ids: Prompts = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    cache_hints: Bounded[CacheHint] | None = None
