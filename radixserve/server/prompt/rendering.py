"""`render`: applies the model's chat template to the messages of a request.

The template itself is run by `Tokenizer.render_chat` (`text/chat_template.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from radixserve.api.runtime import Runtime
from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.picture import PromptPictures
from radixserve.server.answer.tool_choice import ChatTools
from radixserve.server.prompt.chat_messages import key_of, read_messages
from radixserve.server.wire.errors import ApiError, invalid
from radixserve.server.wire.schema import TemplateFields, Thinking
from radixserve.text.chat_clocks import ChatStart
from radixserve.text.chat_options import read_template_kwargs
from radixserve.text.template_traits import Message, Render, check_rendered, fit_messages
from radixserve.text.tokenizer import Tokenizer

# The line that a coding agent puts before its system prompt. It contains another hash in every
# request, so that no token after it would be found in the cache.
_BILLING_HEADER = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt's text, with the messages and options that it was rendered from."""

    text: str
    answers: frozenset[str]  # `answer_key` of each of the assistant's messages
    num_headers: int  # billing headers that were removed
    messages: list[Message]
    options: dict[str, Any]  # of `Tokenizer.render_chat`
    generic_tools: list[dict[str, Any]] | None  # tools that the system message describes
    start: ChatStart | None  # None: the template prints no date

    def with_answer(self, tokenizer: Tokenizer, answer: Sequence[Message]) -> str:
        """The text of the conversation with the messages `answer` at its end. Raises
        InvalidRequest."""
        messages = fit_messages(
            [*self.messages, *answer],
            tokenizer.traits(),
            self.generic_tools,
            shows_tools=self.options.get("tools") is not None,
        )
        return tokenizer.render_chat(messages, **self.options)


def render(
    runtime: Runtime,
    messages: object,
    fields: TemplateFields,
    tools: ChatTools | None = None,
    *,
    start_of: Callable[[Sequence[tuple[str, ...]]], ChatStart],
    has_generic_tools: bool = False,
    keep_billing_header: bool,
    pictures: PromptPictures | None = None,
) -> RenderedPrompt:
    """Check `messages` and apply the model's chat template to them. Raises ApiError.

    fields               options and variables of the template
    start_of             when a conversation of such messages began, for templates that print dates
    has_generic_tools    describe the tools in the system message instead of in the template
    keep_billing_header  do not remove the billing headers of coding agents
    pictures             reads those of the messages; None: they are refused
    """
    checked = read_messages(messages, pictures, runtime.no_pictures)
    num_headers = 0 if keep_billing_header else _strip_headers(checked)
    options = _options(fields, checked)
    functions = None
    if tools is not None and has_generic_tools:
        functions = list(tools.functions) or None
    elif tools is not None:
        options["tools"] = tools.for_template
    tokenizer = tokenizer_of(runtime)
    start = start_of(list(map(_recognised, checked))) if tokenizer.reads_clock() else None
    options["now"] = None if start is None else start.began
    render_chat: Render = partial(tokenizer.render_chat, **options)
    try:
        for index, message in enumerate(checked):
            _check_role(message["role"], tokenizer, f"messages[{index}].role")
        shows_tools = options.get("tools") is not None
        fitted = fit_messages(checked, tokenizer.traits(), functions, shows_tools=shows_tools)
        text = render_chat(fitted)
        check_rendered(fitted, text, render_chat)
    except InvalidRequest as error:
        raise invalid(error, param=error.param or "messages") from None
    answers = frozenset(key_of(message) for message in checked if message["role"] == "assistant")
    return RenderedPrompt(text, answers, num_headers, checked, options, functions, start)


def _recognised(message: Message) -> tuple[str, ...]:
    """What tells a conversation's message from others; see `ChatClocks`."""
    if message["role"] == "assistant":
        return ("assistant", key_of(message))
    names = ("role", "content", "name", "tool_call_id")
    values = (message.get(name, "") for name in names)
    return tuple(value if isinstance(value, str) else repr(value) for value in values)


def _check_role(role: str, tokenizer: Tokenizer, place: str) -> None:
    """Raise InvalidRequest for a role that neither the protocol nor the model's template knows."""
    if role not in tokenizer.roles:
        raise InvalidRequest(
            f"{place} must be {' or '.join(tokenizer.roles)}, got {shown(role)}", param=place
        )
    tokenizer.check_role(role)


def tokenizer_of(runtime: Runtime) -> Tokenizer:
    """The runtime's tokenizer. Raises ApiError 400 for a model without one."""
    if runtime.tokenizer is None:
        raise ApiError(400, "the model has no tokenizer: it knows token ids, but no text")
    return runtime.tokenizer


def _options(fields: TemplateFields, messages: Sequence[Message]) -> dict[str, Any]:
    """The options of `Tokenizer.render_chat`. Raises ApiError."""
    variables = read_template_kwargs(fields.chat_template_kwargs)
    continues = bool(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
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
        "add_generation_prompt": fields.add_generation_prompt is not False and not continues,
        "continue_final_message": continues,
        "variables": variables,
    }


def _strip_headers(messages: Sequence[Message]) -> int:
    """Remove billing headers from system messages. Returns the number of headers."""
    count = 0
    for message in messages:
        if message["role"] in ("system", "developer"):
            message["content"], num_stripped = _BILLING_HEADER.subn("", message["content"])
            count += num_stripped
    return count


# Efforts as the words that templates know; that of gpt-oss, for example, knows three.
_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}


def template_variables(
    given: Mapping[str, Any] | None,
    *,
    effort: str | None = None,
    enable_thinking: bool | None = None,
    thinking: Thinking | None = None,
    thinks: bool | None = None,
    budget: int | None = None,
    verbosity: str | None = None,
) -> dict[str, Any] | None:
    """The template's variables: those of the other arguments, then `given`, which takes precedence.
    None if there are none.

    effort           becomes `reasoning_effort`
    enable_thinking  becomes the variable of that name; None: `thinking` decides
    thinking         becomes `enable_thinking` and `thinking_budget`
    thinks           becomes `enable_thinking` if neither of the two decides
    budget           tokens of reasoning, if `thinking` has none; becomes `thinking_budget`
    verbosity        becomes `verbosity`
    """
    variables: dict[str, Any] = {}
    if effort is not None and effort != "none":
        variables["reasoning_effort"] = _EFFORTS.get(effort, effort)
    if thinking is not None:
        enable_thinking = thinking.thinks if enable_thinking is None else enable_thinking
        budget = thinking.budget if budget is None else budget
    enable_thinking = thinks if enable_thinking is None else enable_thinking
    if enable_thinking is not None:
        variables["enable_thinking"] = enable_thinking
    if budget is not None:
        variables["thinking_budget"] = budget
    if verbosity is not None:
        variables["verbosity"] = verbosity
    return {**variables, **(given or {})} or None


def thinks_at(effort: str | None) -> bool | None:
    """Whether OpenAI's `reasoning_effort` asks for reasoning; None if it is not given."""
    return None if effort is None else effort != "none"
