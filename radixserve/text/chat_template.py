"""Renders chat templates with Jinja, with the same result as transformers.

The template comes from the checkpoint, see fast_tokenizer.py and gguf_tokenizer.py, or from the
caller.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes

from radixserve.text.chat_options import KNOWN_ROLES
from radixserve.text.tainted_str import ASSISTANT, CALLER, tainted
from radixserve.text.template_environment import TemplateEnvironment

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field of a message
_END_OF_MESSAGE = "END_OF_THE_LAST_MESSAGE "  # its space shows whether the template trims


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    special_tokens: Mapping[str, str] | None = None,
    now: datetime | None = None,
    **variables: Any,
) -> str:
    """Returns the text of a conversation: a TaintedStr that tells the template's characters from
    those of the messages, tools and variables. Raises ValueError without messages, and whatever the
    template raises.

    special_tokens  "bos_token" and other names -> the token's text
    now             what the template takes as the date and time; None: the clock's
    """
    if not messages:
        raise ValueError("a conversation needs at least one message")
    chat = [_as_read(message) for message in messages]
    begun = _mark_end(chat[-1]) if continue_final_message else None
    text = _compiled(template).render(
        **{
            "strftime_now": (now or datetime.now()).strftime,
            "documents": None,
            **(special_tokens or {}),
            **tainted(variables, CALLER),
        },
        messages=chat,
        tools=None if tools is None else tainted(list(tools), CALLER),
        add_generation_prompt=add_generation_prompt,
    )
    return text if begun is None else _up_to(begun, text)


def _as_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message as templates read it. The names of known roles are the template's own:
    some templates make the name of a special token of them."""
    source = ASSISTANT if message["role"] == "assistant" else CALLER
    given = {name: value for name, value in message.items() if value is not None}
    read: dict[str, Any] = tainted(given, source)
    if message["role"] in KNOWN_ROLES:
        read["role"] = str.__str__(message["role"])
    reasoning = next((read[name] for name in _REASONING if read.get(name) is not None), None)
    if reasoning is None:
        return read
    return {"thinking": reasoning, **read, "reasoning_content": reasoning}


def _mark_end(message: dict[str, Any]) -> str:
    """Put a mark at the end of the last message's text. Returns that text."""
    content, name = message.get("content"), "text"
    if isinstance(content, str):
        parts, name = [message], "content"
    else:
        parts = [part for part in content or () if name in part]
    if not parts:
        raise ValueError("the last message has no text that could be continued")
    begun: str = parts[-1][name]
    parts[-1][name] = begun + _END_OF_MESSAGE
    return begun


def _up_to(begun: str, text: str) -> str:
    """Returns the rendered text up to the mark, without white space at its end where the template
    removes it. Raises ValueError where the template does not show the whole message `begun`."""
    end = text.rfind(_END_OF_MESSAGE.rstrip())
    if end < 0 or begun.strip() not in text:
        raise ValueError("the template leaves out a part of the message that is continued")
    return text[:end] if text.startswith(_END_OF_MESSAGE, end) else text[:end].rstrip()


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return TemplateEnvironment().from_string(template)


@functools.lru_cache(maxsize=16)
def named_roles(template: str) -> frozenset[str]:
    """Returns the roles that a template names: texts that it compares with a message's role, and
    keys of tables that it reads with one. Empty for a template that is not valid."""
    try:
        tree = TemplateEnvironment().parse(template)
    except jinja2.TemplateError:
        return frozenset()
    tests = [node for node in tree.find_all((nodes.Compare, nodes.Test)) if _has_role(node)]
    for selection in tree.find_all(nodes.Filter):  # selectattr("role", "equalto", "user")
        if selection.name in ("selectattr", "rejectattr") and _has_role(selection.args[0]):
            tests += selection.args[2:]
    if any(_has_role(table.arg) for table in tree.find_all(nodes.Getitem)):
        tests += [pair.key for pair in tree.find_all(nodes.Pair)]
    return frozenset(
        text.value
        for test in tests
        for text in ([test] if isinstance(test, nodes.Const) else test.find_all(nodes.Const))
        if isinstance(text.value, str) and text.value != "role"
    )


def _has_role(node: nodes.Node) -> bool:
    """Whether an expression reads a role: `message.role`, `message["role"]` or a variable
    `role`."""
    return any(
        getattr(part, "attr", None) == "role"
        or getattr(part, "name", None) == "role"
        or getattr(part, "value", None) == "role"
        for part in (node, *node.find_all(nodes.Node))
    )
