"""Renders chat templates with Jinja, with the same result as transformers.

The template comes from the checkpoint, see fast_tokenizer.py and gguf_tokenizer.py, or from the
caller. transformers itself renders messages with values of other types than JSON's, and
conversations whose last message is to be continued.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field of a message


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text. It renders its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, which refuses names that begin with an underscore, so that a template
    cannot reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        names = dict(*args, **kwargs)
        for name in names:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """The `dict` of templates, without the attributes of Python's."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """Returns the text of a conversation. Raises ValueError without messages, and whatever the
    template raises."""
    if not messages:
        raise ValueError("a conversation needs at least one message")
    chat = [
        {name: value for name, value in message.items() if value is not None}
        for message in messages
    ]
    if continue_final_message or not _is_plain([chat, tools, variables]):
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template(
            [chat],
            tools=None if tools is None else [dict(tool) for tool in tools],
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        text: str = rendered[0][0]
        return text
    for index, message in enumerate(chat):
        reasoning = next(
            (message[name] for name in _REASONING if message.get(name) is not None), None
        )
        if reasoning is not None:
            chat[index] = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return _compiled(template).render(
        messages=chat,
        tools=tools,
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **variables,
    )


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace
    )
    return environment.from_string(template)


def _is_plain(value: Any) -> bool:
    """Whether `value` consists of exactly JSON's types, without subclasses."""
    kind = type(value)
    if kind in (dict, list, tuple):
        inner = [*value.keys(), *value.values()] if kind is dict else value
        return all(map(_is_plain, inner))
    return value is None or kind in (str, int, float, bool)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Jinja's own one would escape HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")
