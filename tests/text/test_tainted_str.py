"""Strings of callers keep their taint in all that a template can make of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from radixserve.text import chat_template
from radixserve.text.tainted_str import (
    CALLER,
    TEMPLATE,
    TaintedStr,
    concatenated,
    formatted,
    taint_of,
    tainted,
)
from radixserve.text.template_environment import TemplateEnvironment

# In these tests a caller's characters are upper case, those of a template lower case or signs.
_WORDS = ["AB", "a", "A", "b", " ", "\n", "\r\n", "-", "x", "CaD", "%", ""]


def made(rng: random.Random) -> str:
    """A string of both, plain if no character is a caller's."""
    parts = "".join(rng.choices(_WORDS, k=rng.randrange(7)))
    return concatenated([tainted(one, CALLER) if one.isupper() else one for one in parts])


def plain(value: Any) -> Any:
    if isinstance(value, str):
        return str.__str__(value)
    return type(value)(map(plain, value)) if isinstance(value, list | tuple) else value


def check(value: Any, expected: Any) -> None:
    """The value is that of plain strings, and each character's taint is its own."""
    assert plain(value) == expected
    if isinstance(value, str):
        assert taint_of(value) == bytes(character.isupper() for character in value)
    else:
        for part in value:
            check(part, plain(part))


OPERATIONS: dict[str, Callable[[Any, Any, Any, int], Any]] = {
    "[i:]": lambda s, _o, _p, n: s[n:],
    "[::-1]": lambda s, _o, _p, _n: s[::-1],
    "[i]": lambda s, _o, _p, n: s[n] if -len(s) <= n < len(s) else s,
    "iter": lambda s, _o, _p, _n: list(s),
    "reversed": lambda s, _o, _p, _n: list(reversed(s)),
    "+": lambda s, o, _p, _n: s + o,
    "*": lambda s, _o, _p, n: [s * n, n * s],
    "strip": lambda s, _o, _p, _n: [s.strip(), s.lstrip(), s.rstrip(), s.strip("Ab ")],
    "split": lambda s, _o, _p, n: [s.split(), s.split(None, n), s.rsplit(None, n)],
    "split at": lambda s, o, _p, n: [s.split(o, n), s.rsplit(o, n), s.split(o)] if o else [],
    "partition": lambda s, o, _p, _n: [s.partition(o), s.rpartition(o)] if o else [],
    "lines": lambda s, _o, _p, _n: [s.splitlines(), s.splitlines(True)],
    "remove": lambda s, o, _p, _n: [s.removeprefix(o), s.removesuffix(o)],
    "replace": lambda s, o, p, n: [s.replace(o, p), s.replace(o, p, n)] if o else [],
    "join": lambda s, o, p, _n: [s.join([o, p, s]), s.join([])],
    "%": lambda _s, o, p, _n: formatted("<%s|%3s>%%", (o, p)),
    "% name": lambda _s, o, p, _n: formatted("%(a)s=%(b).2s", {"a": o, "b": p}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_character_keeps_its_taint(name: str) -> None:
    rng = random.Random(name)
    for _ in range(300):
        values = [made(rng) for _ in range(3)]
        values[0] = concatenated([values[0], tainted("", CALLER)])
        count = rng.randrange(-1, 4)
        operation = OPERATIONS[name]
        check(operation(*values, count), operation(*map(plain, values), count))


def test_no_method_returns_a_callers_characters_as_plain_text() -> None:
    text = tainted("Ab1 cD", CALLER)
    args: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("center", "ljust", "rjust", "zfill"), (9,)),
        **dict.fromkeys(("__add__", "partition", "rpartition", "join"), (" ",)),
        **dict.fromkeys(("removeprefix", "removesuffix"), ("A",)),
        **dict.fromkeys(("__mul__", "__rmul__", "__getitem__"), (1,)),
        "replace": ("b", " "), "translate": ({65: "B"},), "__mod__": ((),), "__rmod__": ("%s",),
        "format_map": ({},),
    }  # fmt: skip
    plain_by_design = {"__repr__", "__format__", "__getnewargs__", "__doc__", "maketrans"}
    num_strings = 0
    for name in sorted({*dir(str)} - plain_by_design - {*dir(object)} | {"__str__"}):
        result = getattr(text, name)(*args.get(name, ())) if _takes(text, name, args) else None
        parts = result if isinstance(result, list | tuple) else [result]
        for part in parts:
            if isinstance(part, str):
                num_strings += 1
                assert type(part) is TaintedStr, name
                own = {character for character, kind in zip(part, taint_of(part), strict=True)
                       if not kind}  # fmt: skip
                assert own <= {" "}, name
    assert num_strings > 35
    assert {hash(text), text} == {hash("Ab1 cD"), "Ab1 cD"}


def _takes(text: str, name: str, args: dict[str, tuple[Any, ...]]) -> bool:
    try:
        getattr(text, name)(*args.get(name, ()))
    except TypeError:
        return False
    return True


def render(template: str, **variables: Any) -> str:
    return (
        TemplateEnvironment()
        .from_string(template)
        .render({name: tainted(value, CALLER) for name, value in variables.items()})
    )


def callers(text: str) -> str:
    """The characters that are a caller's."""
    return "".join(character for character, kind in zip(text, taint_of(text), strict=True) if kind)


FILTER_ARGS = {"attr": "('upper')", "batch": "(2)", "slice": "(2)", "map": "('upper')",
               "groupby": "(0)", "indent": "(2)", "join": "('-')", "replace": "('A', 'b')",
               "select": "('string')", "reject": "('number')", "truncate": "(3)", "sum": "([])",
               "center": "(30)", "format": "()", "selectattr": "('x')", "rejectattr": "('x')",
               "round": "(1)", "default": "('z')", "d": "('z')"}  # fmt: skip


@pytest.mark.parametrize("name", sorted(jinja2.Environment().filters))
def test_every_filter(name: str) -> None:
    """Of a text, of a list and of an object: the letters that are left are a caller's."""
    num_printed = 0
    for given in ("AB CD", ["AB", "CD"], {"A": "AB", "B": "CD"}, "12", 12, 3.5):
        call = f"{name}{FILTER_ARGS.get(name, '')}"
        for template in ("{{ x|%s }}", "{%% for p in x|%s %%}{{ p }}{%% endfor %%}"):
            try:
                text = render(template % call, x=given)
            except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError):
                continue
            if isinstance(given, int | float) or given == "12":
                continue  # numbers that a filter computes are the template's
            num_printed += 1
            letters = [one for one in text if one in "ABCD"]
            assert [one for one in callers(text) if one in "ABCD"] == letters
    assert num_printed or name in ("abs", "filesizeformat", "round", "sum")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ x }}", "AB"),
        ("a{{ 'b' + x + 'c' }}{{ 'd' ~ x }}", "ABAB"),
        ("{{ '-'.join([x, 'c', x]) }}", "ABAB"),
        ("{{ 'a-b'.replace('-', x) }}{{ 'a-b'|replace('-', x) }}", "ABAB"),
        ("{{ '{}|{y}'.format(x, y=x) }}{{ '%s-'|format(x) }}{{ '%s-' % x }}", "ABABABAB"),
        ("{{ '{a}'.format_map({'a': x}) }}", "AB"),
        ("{% set y %}<{{ x }}>{% endset %}{{ y }}", "AB"),
        ("{% macro f(v) %}<{{ v }}{{ caller() }}>{% endmacro %}{% call f(x) %}{{ x }}{% endcall %}",
         "ABAB"),
        ("{% filter lower %}{{ x }}c{% endfilter %}", "ab"),
        ("{% set ns = namespace(y='') %}{% for c in x %}{% set ns.y = ns.y + c %}{% endfor %}"
         "{{ ns.y }}", "AB"),
        ("{% autoescape true %}<{{ x }}>{% endautoescape %}", "AB"),
        ("{% set y %}{{ x }}{% endset %}{{ y|safe ~ y|e }}", "ABAB"),
        ("{{ {'a': x}['a'] }}{{ dict(a=x).a }}{{ [x]|first }}", "ABABAB"),
        ("{{ cycler('a', 'b').next() }}{{ joiner('-')() }}{{ x }}", "AB"),
        ("{{ x.encode().decode() }}", "AB"),
        ("{% generation %}a{{ x }}{% endgeneration %}", "AB"),
        ("{{ x if x is string else 'n' }}{{ 'yes' if 'A' in x and x == 'AB' }}", "AB"),
        ("{{ (x, 1)|string }}{{ [x] }}", "('AB', 1)['AB']"),
        ("{{ x|tojson }}{{ {'k': x}|tojson }}", '"AB"{"k": "AB"}'),
        ("{{ n }}{{ n + 1 }}{{ f }}{{ 5 }}{{ true }}", "72.5"),
        ("{% for k, v in d.items() %}{{ k }}{{ v.y }}{% endfor %}", "QZ"),
    ],
)  # fmt: skip
def test_what_a_template_makes(template: str, expected: str) -> None:
    assert callers(render(template, x="AB", n=7, f=2.5, d={"Q": {"y": "Z"}})) == expected


# A template's own control tokens stay its own, whatever it builds them with.
ALL_OF_IT = """
{%- macro turn(role, text) -%}{{ '<|' ~ role ~ '|>' }}{{ text|trim }}
{{- '%s<|end|>' % '\n' }}{%- endmacro -%}
{%- for m in messages -%}
{%- set body -%}{%- filter trim -%}
{{ m.content|replace('/cut', '')|upper }}{%- endfilter -%}{%- endset -%}
{{- turn(m.role, body) -}}{{- '<|{}|>'.format('sep') -}}{{- ['<|', 'x', '|>']|join -}}
{{- '<|Y|>'|lower -}}{{- m|tojson(indent=1) -}}
{{- m.content.split('/cut')|map('title')|join('|') -}}
{%- endfor -%}"""
KINDS = [
    [{"role": "user", "content": " ab /cut cd "}],
    [{"role": "system", "content": "/cutx\ny"}, {"role": "user", "content": "é ß <|end|>"}],
]


@pytest.mark.parametrize("messages", KINDS)
def test_as_transformers_renders_it(messages: list[dict[str, Any]]) -> None:
    ours = chat_template.render(ALL_OF_IT, messages)
    theirs, _ = render_jinja_template([messages], chat_template=ALL_OF_IT)
    assert ours == theirs[0]
    own = "".join(c for c, k in zip(ours, taint_of(ours), strict=True) if not k)
    for message in messages:
        assert f"<|{message['role']}|>" in own
    assert own.count("<|end|>") == own.count("<|sep|><|x|><|y|>") == len(messages)
    assert taint_of("ab") == TEMPLATE * 2
