"""What clients send: the bodies of the routes. A field that is not here is refused by name."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from radixserve.server.fields import (
    Messages,
    Prompts,
    ResponseFormat,
    Stop,
    StructuredOutputs,
    ToolChoice,
    ToolList,
)
from radixserve.server.unsupported_fields import without_no_ops


class Body(BaseModel):
    """Strict types, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_no_ops(cls, fields: Any) -> Any:
        return without_no_ops(fields, cls.model_fields)


class CommonSampling(Body):
    """What OpenAI's protocol and SGLang's have under the same names. None: the default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None


class Sampling(CommonSampling):
    """Fields of SamplingParams under the same names. None: the default."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    seed: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None


class CacheHint(Body):
    """What is to become of the K/V of a prompt; see docs/hints.md."""

    verb: str
    seconds: float | None = None
    max_tokens: int | None = None


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class CacheFields(Body):
    """Where the cache belongs to: fields of every route that reads or fills it."""

    cache_salt: str | None = None


class GenerationFields(Sampling, CacheFields):
    """What completions and chats have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_id: str | None = None
    supersede: bool | None = None
    cache_hints: list[CacheHint] | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    response_format: ResponseFormat = None
    structured_outputs: StructuredOutputs = None


class CompletionRequest(GenerationFields):
    prompt: Prompts
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class TemplateFields(Body):
    """How messages become the prompt."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ToolList = None


class ChatRequest(GenerationFields, TemplateFields):
    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(TemplateFields):
    """Text, or messages as a chat would render them."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


class LookupRequest(TemplateFields, CacheFields):
    """Text or token ids, or messages as a chat would render them."""

    model: str | None = None
    prompt: Prompts = None
    messages: Messages = None


class PrefixHint(CacheHint, TemplateFields, CacheFields):
    """A hint for a prompt, for messages as a chat would render them, or for a session."""

    prompt: Prompts = None
    messages: Messages = None
    session_id: str | None = None


class HintsRequest(Body):
    hints: list[PrefixHint]
    model: str | None = None
    tenant: str | None = None


class FlushRequest(Body):
    tenant: str | None = None
    cache_salt: str | None = None


class SnapshotRequest(Body):
    """Which nodes of the tree are to be shown beside those that are in use, new or hot."""

    opened: list[int] | None = None
    path: list[int] | None = None


class ScoreRequest(CacheFields):
    """How likely is each of the candidates after the prompt?"""

    model: str | None = None
    prompt: Prompts
    candidates: Prompts
    return_token_ids: bool | None = None


class NativeSampling(CommonSampling):
    """SGLang's names in `sampling_params` of /generate."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class GenerateRequest(Sampling, CacheFields):
    """SGLang's fields: text or input_ids with sampling_params; or prompt with fields beside it."""

    prompt: Prompts = None
    text: Prompts = None
    input_ids: Prompts = None
    sampling_params: NativeSampling | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    session_id: str | None = None
    supersede: bool | None = None
    cache_hints: list[CacheHint] | None = None
