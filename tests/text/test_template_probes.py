"""No text of a caller becomes a special token, whatever a template removes, joins or cuts.

RADIXSERVE_TEMPLATES, a folder of *.jinja files, gives the long test more templates.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from radixserve.text.content_marks import MARK
from radixserve.text.template_traits import fit_messages
from tests.text.template_probes import (
    PLACES,
    brought,
    control_ids,
    control_tokens,
    conversation,
    special_texts,
    tokenizer_of,
)

_TURN = (
    "{%- for m in messages -%}{%- set text = m.content -%}{{- '<|start|>' ~ m.role ~ '\n' -}}"
    "{{- TEXT -}}{{- '<|end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant\n' -}}{%- endif -%}"
)
_CHANGES = {
    "removed": "text.replace('/think', '').replace('/no_think', '').strip()",
    "removed twice": "text|replace('/a', '')|replace('b/', '')|trim",
    "split and joined": "text.split('/cut')|join('')",
    "split and last": "(text.split('</cut>')|last).lstrip('\n')",
    "lines": "text.splitlines()|join",
    "words": "text.split()|join",
    "reversed": "text[::-1]",
    "a filter reversed": "text|reverse",
    "upper": "text|upper ~ '<|END|>'",
    "lower": "text|lower",
    "swapped": "text.swapcase() ~ '<|END|>'",
    "sliced": "text[1:-1] ~ text[:-1] ~ text[2:]",
    "braced": "'<' ~ text ~ '>' ~ '<|' ~ text ~ '|>' ~ '<|' + text + '|>'",
    "formatted": "'<%s>' % text ~ '<{}>'.format(text) ~ '<|%s|>'|format(text)",
    "joined": "['<', text, '>']|join ~ '|'.join(['<', text, '>'])",
    "padded": "text.center(40) ~ text.zfill(30) ~ text|indent(2) ~ text|truncate(9)",
    "json": "text|tojson ~ [text]|tojson(indent=2)",
    "repeated": "text * 2 ~ (text|list|join) ~ (text|first) ~ (text|last)",
    "partitioned": "text.partition('/cut')|join('') ~ text.rpartition('/cut')[2]",
    "printed": "[text] ~ {'a': text}",
    "removed around": "text.removeprefix('/a').removesuffix('/b')",
}
# Keys, names and numbers of callers between a template's own signs.
_OBJECTS = """
{%- macro fields(object) -%}{%- for key, value in object.items() -%}
{{- '<' ~ key ~ '>' -}}{%- if value is mapping -%}{{ fields(value) }}
{%- elif value is string or value is number -%}{{- '<|' ~ value ~ '|>' -}}
{%- else -%}{{- value|tojson -}}{%- endif -%}{%- endfor -%}{%- endmacro -%}
{%- for tool in tools or [] -%}{{- fields(tool.function) -}}{%- endfor -%}
{%- for m in messages -%}{{- '<|start|>' ~ m.role -}}{{- '<' ~ (m.name or '') ~ '>' -}}
{%- if m.content is string -%}{{- m.content -}}
{%- else -%}{%- for part in m.content -%}{{- part.text -}}{%- endfor -%}{%- endif -%}
{{- m.reasoning_content -}}{{- '<' ~ more ~ '>' -}}
{%- for call in m.tool_calls or [] -%}{{- '<|' ~ call.function.name ~ '|>' -}}
{{- fields(call.function.arguments) -}}{%- endfor -%}{{- '<|end|>' -}}{%- endfor -%}
{{- '<|start|>assistant' -}}"""
TEMPLATES = {
    **{name: _TURN.replace("TEXT", change) for name, change in _CHANGES.items()},
    "objects": _OBJECTS,
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_joined_stays_text(name: str) -> None:
    places = ("user", "parts", "tool key", "tool value", "argument", "argument name", "variable")
    tried = places if name == "objects" else ("user",)
    count, wrong = brought(TEMPLATES[name], 2, tried)
    assert count > 40
    assert not wrong


def test_numbers_stay_text() -> None:
    template = "{% for m in messages %}{{ '<|' ~ m.n ~ '|>' }}{{ '<|%d|>' % m.n }}{% endfor %}<|7|>"
    tokenizer = tokenizer_of(template, ("<|7|>", "<|2.5|>"))
    for number in (7, 2.5):
        text = tokenizer.render_chat([{"role": "user", "content": "-", "n": number}])
        ids = tokenizer.encode_rendered(text)
        assert sum(token in control_ids(tokenizer) for token in ids) == 1


def _public() -> list[Path]:
    folder = os.environ.get("RADIXSERVE_TEMPLATES")
    return sorted(Path(folder).glob("*.jinja")) if folder else []


@pytest.mark.long
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_place_of_every_token(name: str) -> None:
    count, wrong = brought(TEMPLATES[name])
    print(f"{name}: {count} probes, {len(wrong)} wrong")
    assert count > 400
    assert not wrong


@pytest.mark.long
@pytest.mark.parametrize("path", _public(), ids=lambda path: path.stem)
def test_a_template_of_the_folder(path: Path) -> None:
    """Probes bring no control token; a plain conversation is as transformers renders it, and all
    special tokens in it are the template's."""
    template = path.read_text(encoding="utf-8")
    tokenizer = tokenizer_of(template, tuple(special_texts(template)))
    for where in ("user", "tool text"):
        probe = conversation(where, "hello")
        if control_tokens(tokenizer, probe) is None:
            continue
        said = fit_messages(probe.messages, tokenizer.traits())
        ours = tokenizer.render_chat(said, tools=probe.tools, variables=probe.variables)
        assert MARK not in ours
        theirs, _ = render_jinja_template(
            [said],
            tools=probe.tools,
            chat_template=template,
            add_generation_prompt=True,
            bos_token="<s>",
            eos_token="</s>",
            **probe.variables,
        )
        assert ours == theirs[0]
    count, wrong = brought(template)
    print(f"{path.stem}: {count} probes, {len(wrong)} wrong")
    assert not wrong


def test_all_places_are_tried() -> None:
    seen = {
        where
        for where in PLACES
        if "quorzel" in str(conversation(where, "quorzel")) or where == "parts"
    }
    assert seen == set(PLACES)
