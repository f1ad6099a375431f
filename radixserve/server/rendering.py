"""Chat messages as the text of a prompt."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixserve.api.runtime import Runtime
from radixserve.errors import InvalidRequest
from radixserve.server.errors import ApiError, invalid
from radixserve.server.messages import Message, key_of, read_messages
from radixserve.server.schema import TemplateFields
from radixserve.server.tools import Tools
from radixserve.text.tokenizer import Tokenizer

_RESERVED = ("messages", "tools", "chat_template", "tokenize", "add_generation_prompt",
             "continue_final_message", "conversation", "documents", "return_dict",
             "return_tensors", "padding", "truncation", "max_length",
             "return_assistant_tokens_mask", "tokenizer_kwargs", "load_audio_from_video",
             "processor_kwargs")  # fmt: skip
# A line with a hash of its own in every request, before the system prompt of coding agents: what
# comes after it could never be found in the cache.
_BILLING_HEADER = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's text, and what it was made of."""

    text: str
    answers: frozenset[str]  # the keys of what the assistant has said in it
    num_headers: int  # billing headers that were taken out
    messages: list[Message]
    options: dict[str, Any]  # of Tokenizer.render_chat


def render(
    runtime: Runtime,
    messages: object,
    how: TemplateFields,
    tools: Tools | None = None,
    *,
    keep_billing_header: bool,
) -> Rendered:
    """The text of `messages` in the model's chat template. Raises ApiError."""
    checked = read_messages(messages)
    num_headers = 0 if keep_billing_header else _strip_headers(checked)
    options = _options(how, checked)
    if tools is not None:
        options["tools"] = tools.for_template
    try:
        text = tokenizer_of(runtime).render_chat(checked, **options)
    except InvalidRequest as error:
        raise invalid(error, param="messages") from None
    answers = frozenset(key_of(one) for one in checked if one["role"] == "assistant")
    return Rendered(text, answers, num_headers, checked, options)


def tokenizer_of(runtime: Runtime) -> Tokenizer:
    if runtime.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer: it knows token ids, but no text")
    return runtime.tokenizer


def _options(how: TemplateFields, messages: Sequence[Message]) -> dict[str, Any]:
    variables = how.chat_template_kwargs or {}
    for name in variables:
        if name in _RESERVED:
            raise ApiError(
                400,
                f"chat_template_kwargs cannot set {name}",
                param=f"chat_template_kwargs.{name}",
            )
    continues = bool(how.continue_final_message)
    if continues and how.add_generation_prompt:
        raise ApiError(
            400,
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    last = messages[-1]
    if continues and (last["role"] != "assistant" or "tool_calls" in last):
        raise ApiError(
            400,
            "continue_final_message needs a last message of the assistant, without tool calls",
            param="continue_final_message",
        )
    return {
        "add_generation_prompt": how.add_generation_prompt is not False and not continues,
        "continue_final_message": continues,
        "variables": variables,
    }


def _strip_headers(messages: Sequence[Message]) -> int:
    count = 0
    for message in messages:
        if message["role"] in ("system", "developer"):
            message["content"], found = _BILLING_HEADER.subn("", message["content"])
            count += found
    return count
