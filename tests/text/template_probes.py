"""Probes of chat templates: conversations whose texts become a special token if the template
removes, joins or cuts something."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, NamedTuple

import tokenizers
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from radixserve.api.runtime import DEMO
from radixserve.errors import InvalidRequest
from radixserve.text.fast_tokenizer import FastTokenizer, load_fast_tokenizer
from radixserve.text.template_traits import fit_messages
from radixserve.text.tokenizer import Tokenizer

_SPECIAL = re.compile(
    r"<\|[\w./ -]{1,40}\|>|<｜[^｜]{1,40}｜>|\[/?[A-Z_]{3,30}\]|"
    r"</?[a-zA-Z_]*(?:turn|SPECIAL_\d+|eos|bos)[a-zA-Z_]*>|</?s>|<\|?[A-Z_]{3,30}\|?>"
)
_CUT_BY = ("replace", "split", "rsplit", "strip", "lstrip", "rstrip", "partition", "trim")
_NEUTRAL = str.maketrans("<>|[]｜", "qzjwyv")


class Probe(NamedTuple):
    where: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]


def special_texts(template: str) -> list[str]:
    """The special tokens that a template writes, as far as its text shows them."""
    found = sorted({*_SPECIAL.findall(template)} - {"<s>", "</s>"})
    return [*found, "<s>", "</s>"]


@cache
def tokenizer_of(template: str, special: tuple[str, ...]) -> Tokenizer:
    """The demo's tokenizer with the template and more special tokens."""
    demo = load_fast_tokenizer(DEMO)
    assert demo is not None
    backend = tokenizers.Tokenizer.from_str(demo.backend_tokenizer.to_str())
    backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False) for text in special])
    return Tokenizer(FastTokenizer(backend, template, {"bos_token": "<s>", "eos_token": "</s>"}))


def fillers(template: str) -> list[str]:
    """What a template cuts texts at or removes from them."""
    tree = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"]).parse(
        re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    )
    cuts = [
        call.args
        for call in tree.find_all(nodes.Call)
        if isinstance(call.node, nodes.Getattr) and call.node.attr in _CUT_BY
    ]
    cuts += [call.args for call in tree.find_all(nodes.Filter) if call.name in _CUT_BY]
    found = {arg.value for args in cuts for arg in args if isinstance(arg, nodes.Const)}
    return [*sorted(text for text in found if isinstance(text, str) and text)[:8], "\n", " "]


def cut_everywhere(token: str, filler: str) -> Iterator[str]:
    for place in range(1, len(token)):
        yield token[:place] + filler + token[place:]


def texts(template: str, most_tokens: int) -> Iterator[str]:
    """Texts that are harmless as they are, or have whole special tokens."""
    for token in special_texts(template)[:most_tokens]:
        yield token
        yield from {token[1:], token[:-1], token[1:-1], token[2:-2], token[2:], token[:-2]}
        yield from {token[::-1], token.swapcase()}
        for filler in fillers(template):
            yield from cut_everywhere(token, filler)


def _tool(name: str = "f", text: str = "-", key: str = "a", value: Any = "-") -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {
            key: {"type": "string", "description": value, "enum": [value], key: value},
            "b": {"type": "array", "items": {"type": "string", key: [value]}},
        },
        "required": [key],
        key: value,
    }
    function = {"name": name, "description": text, "parameters": schema}
    return {"type": "function", "function": function}


def conversation(where: str, text: str) -> Probe:
    """A conversation with `text` in one place, or in the place of all callers' texts."""

    def at(place: str, other: str = "-") -> str:
        return text if where == place else other

    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "f", "arguments": {at("argument name", "a"): at("argument")}},
    }
    user: Any = at("user")
    if where == "parts":
        half = len(text) // 2
        user = [{"type": "text", "text": part} for part in (text[:half], text[half:])]
    messages = [
        {"role": "system", "content": at("system")},
        {"role": "user", "content": user, "name": at("name")},
        {"role": "assistant", "content": at("answer"), "reasoning_content": at("thought")},
        {"role": "user", "content": at("second user")},
        {"role": "assistant", "content": at("answer before a call"), "tool_calls": [call]},
        {"role": "tool", "content": at("result"), "tool_call_id": "abcdefghi", "name": "f"},
        {"role": "user", "content": at("last user")},
    ]
    if where.startswith("tool"):
        tool = _tool(text=at("tool text"), key=at("tool key", "a"), value=at("tool value"))
        return Probe(where, messages, [tool], {})
    return Probe(where, messages, None, {"more": at("variable"), "thinking": at("variable")})


PLACES = (
    *("system", "user", "parts", "name", "answer", "thought", "second user"),
    *("answer before a call", "argument", "argument name", "result", "last user"),
    *("tool text", "tool key", "tool value", "variable"),
)


@cache
def control_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Special tokens, without the unknown token, which replaces text."""
    ids = tokenizer.special_ids
    return frozenset(i for i in ids if tokenizer.decode([i], keep_special=True) != "<unk>")


def control_tokens(tokenizer: Tokenizer, probe: Probe) -> Counter[int] | None:
    """The control tokens of a rendered conversation; None where the template refuses it."""
    try:
        said = fit_messages(probe.messages, tokenizer.traits())
        text = tokenizer.render_chat(said, tools=probe.tools, variables=probe.variables)
    except InvalidRequest:
        return None
    ids = tokenizer.encode_rendered(text)
    return Counter(token for token in ids if token in control_ids(tokenizer))


def brought(
    template: str, most_tokens: int = 12, places: Collection[str] = PLACES
) -> tuple[int, list[tuple[str, str]]]:
    """The number of probes of a template, and (where, text) of those that changed its control
    tokens. `most_tokens`: of its special tokens that are cut everywhere."""
    tokenizer = tokenizer_of(template, tuple(special_texts(template)))
    known: dict[tuple[str, str], Counter[int] | None] = {}
    count, wrong = 0, []
    for text in texts(template, most_tokens):
        neutral = text.translate(_NEUTRAL)
        for where in places:
            if where in ("answer", "thought", "answer before a call") and "think>" in text.lower():
                continue  # an assistant's message may bring its thoughts
            if (where, neutral) not in known:
                known[where, neutral] = control_tokens(tokenizer, conversation(where, neutral))
            expected = known[where, neutral]
            found = control_tokens(tokenizer, conversation(where, text))
            if expected is None or found is None:
                continue
            count += 1
            if found != expected:
                wrong.append((where, text))
    return count, wrong
