"""`ChatOptions`: checked arguments of a chat template besides the messages."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.text.tool_functions import read_tools

KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
# Arguments of transformers' apply_chat_template that are not variables of a template.
_RESERVED = frozenset(
    """
    conversation messages tools documents chat_template tokenize padding add_generation_prompt
    continue_final_message truncation max_length return_tensors return_dict
    return_assistant_tokens_mask tokenizer_kwargs load_audio_from_video processor_kwargs
    """.split()
)


class ToolsIgnored(UserWarning):
    """The chat template does not render tools: the prompt does not describe them."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Arguments of a chat template besides the messages.

    tools            functions that the model may call
    template_kwargs  variables of the template, such as enable_thinking
    template         Jinja; None: the tokenizer's own
    now              the date and time for templates that print it; None: the clock's
    """

    tools: tuple[dict[str, Any], ...] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    template: str | None = None
    now: datetime | None = None

    @classmethod
    def read(
        cls, tools: object, template_kwargs: object, template: str | None = None
    ) -> ChatOptions:
        """Returns the checked options. Raises InvalidRequest."""
        return cls(read_tools(tools) or None, read_template_kwargs(template_kwargs), template)

    @property
    def is_given(self) -> bool:
        return bool(self.tools or self.template_kwargs)


def begun_answer(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the text of the last message if it is the assistant's, which the answer continues;
    None for other messages. Raises InvalidRequest for a message without text."""
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


def read_template_kwargs(variables: object) -> dict[str, Any]:
    """Returns a checked copy of `chat_template_kwargs`. Raises InvalidRequest."""
    where = "chat_template_kwargs"
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidRequest(
            f"{where} must be {{variable: value}}, got {shown(variables)}", param=where
        )
    for name in variables:
        if name in _RESERVED:
            raise InvalidRequest(
                f"{where} cannot set {name}: it is not a variable of the template",
                param=f"{where}.{name}",
            )
    return copy.deepcopy(dict(variables))
