"""Types of the keyword arguments of `Runtime`'s methods."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.request import BeamParams, SamplingParams
from radixserve.structured_outputs import StructuredOutput
from radixserve.text.chat_options import ChatOptions

Params = SamplingParams | Sequence[SamplingParams] | None


class ChatSettings(TypedDict, total=False):
    """Arguments of the chat template if a prompt is a list of messages.

    tools                 functions that the model may call: {"type": "function", "function":
                          {"name", "description", "parameters": JSON schema}}
    chat_template_kwargs  variables of the template, such as {"enable_thinking": False}
    """

    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class GenerateSettings(ChatSettings, total=False):
    """Keywords of `generate`, for its overloads."""

    progress: bool | None
    request_id: str | None


class BeamSettings(TypedDict, total=False):
    """Fields of `BeamParams`, and those of `SamplingParams` that apply to a beam search."""

    length_penalty: float
    early_stopping: bool | str
    min_tokens: int
    temperature: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Iterable[int] | None
    bad_words: Iterable[str]
    structured: StructuredOutput | Mapping[str, Any] | None
    stop: str | Iterable[str]
    include_stop_str_in_output: bool
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    logprobs: int | None
    skip_special_tokens: bool
    truncate_prompt_tokens: int | None
    priority: int
    namespace: str


class BeamSearchSettings(BeamSettings, total=False):
    """Keywords of `beam_search`, for its overloads."""

    params: SamplingParams | None
    beams: BeamParams | None
    request_id: str | None


_NO_CHAT_OPTIONS = ChatOptions()


def chat_options(settings: Mapping[str, Any]) -> ChatOptions:
    """Returns the checked `ChatSettings`. Raises InvalidRequest for other names; for a sampling
    parameter the error says where it belongs."""
    if not settings:
        return _NO_CHAT_OPTIONS
    allowed = ChatSettings.__annotations__
    sampling = {field.name for field in dataclasses.fields(SamplingParams)}
    for name, value in settings.items():
        if name in sampling:
            raise InvalidRequest(
                f"{name} is given in params: SamplingParams({name}={shown(value)})"
            )
        if name not in allowed:
            raise InvalidRequest(f"unknown argument {name!r}; allowed: {', '.join(allowed)}")
    return ChatOptions.read(settings.get("tools"), settings.get("chat_template_kwargs"))
