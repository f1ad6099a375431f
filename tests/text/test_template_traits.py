"""Conversations as templates of every kind take them: merged, renamed, moved; nothing is lost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from radixserve.api.runtime import DEMO
from radixserve.errors import InvalidRequest
from radixserve.text.chat_options import ChatOptions
from radixserve.text.template_traits import TemplateTraits, check_rendered, fit_messages
from radixserve.text.tokenizer import Tokenizer
from tests.text.template_probes import tokenizer_of

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# The first message alone may be a system message, as in Qwen 3.5.
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unexpected message role.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }};{% endfor %}"
)
# Roles in turn and no system message, as in Gemma 2.
ALTERNATING = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }};{% endfor %}"
)
# Other roles than these are left out without a word.
SILENT = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] or m.role == 'system' "
    "and loop.first %}<{{ m.role }}>{{ m.content }};{% endif %}{% endfor %}"
)
# A role for developers, at the beginning, as in gpt-oss.
DEVELOPER = (
    "{% if messages[0].role in ['developer', 'system'] %}<developer>{{ messages[0].content }};"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages if m.role in ['user', 'assistant'] %}<{{ m.role }}>{{ m.content }};"
    "{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "first": FIRST_ONLY, "turns": ALTERNATING, "silent": SILENT,
             "developer": DEVELOPER}  # fmt: skip


def say(*parts: str) -> list[dict[str, Any]]:
    """ "s:text" is a message of the system, and so on."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[part[0]], "content": part[2:]} for part in parts]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer.load(DEMO)
    assert made is not None
    return made


def rendered(tokenizer: Tokenizer, name: str, messages: list[dict[str, Any]]) -> str:
    template = TEMPLATES[name]
    said = fit_messages(messages, tokenizer.traits(template))

    def render(chat: Any, **options: Any) -> str:
        return tokenizer.render_chat(
            chat, template=template, add_generation_prompt=False, **options
        )

    text = render(said)
    check_rendered(said, text, render)
    return text


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("chatml", say("d:A", "u:b"), "<system>A;<user>b;"),
        ("chatml", say("s:A", "d:B", "u:c", "s:D"), "<system>A;<system>B;<user>c;<system>D;"),
        ("first", say("s:A", "s:B", "u:c"), "<system>A\n\nB;<user>c;"),
        ("first", say("s:A", "d:B", "u:c"), "<system>A\n\nB;<user>c;"),
        ("first", say("u:a", "s:B"), "<user>a;<user>B;"),
        ("first", say("u:a", "s:B", "a:c", "d:D", "u:e"),
         "<user>a;<user>B;<assistant>c;<user>D;<user>e;"),
        ("turns", say("s:A", "u:b"), "<user>A\n\nb;"),
        ("turns", say("s:A"), "<user>A;"),
        ("turns", say("s:A", "d:B", "u:c", "s:D", "a:e", "s:F", "u:g"),
         "<user>A\n\nB\n\nc\n\nD;<assistant>e;<user>F\n\ng;"),
        ("silent", say("u:a", "s:B", "d:C"), "<user>a;<user>B;<user>C;"),
        ("silent", say("d:A", "u:b"), "<system>A;<user>b;"),
        ("developer", say("s:A", "d:B", "u:c"), "<developer>A\n\nB;<user>c;"),
        ("developer", say("d:B", "u:c", "d:D"), "<developer>B;<user>c;<user>D;"),
    ],
)  # fmt: skip
def test_a_conversation(
    tokenizer: Tokenizer, name: str, messages: list[dict[str, Any]], expected: str
) -> None:
    assert rendered(tokenizer, name, messages) == expected


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_every_text_is_there_and_earlier_turns_stay(tokenizer: Tokenizer, name: str) -> None:
    """Conversations of all orders: more messages after an answer change nothing before it."""
    for kinds in itertools.product("sdu", repeat=3):
        words = [f"{kind}:word{at}" for at, kind in enumerate(kinds)]
        first = [*words, "u:ask"]
        one = rendered(tokenizer, name, say(*first))
        for more in (["u:more"], ["s:late", "u:more"], ["d:late"]):
            two = rendered(tokenizer, name, say(*first, "a:answer", *more))
            assert two.startswith(one)
            for text in ("word0", "word1", "word2", "ask", "answer", more[0][2:]):
                assert text in two


def test_a_role_that_is_left_out_is_an_error(tokenizer: Tokenizer) -> None:
    messages = [*say("u:a"), {"role": "critic", "content": "bad"}]
    assert rendered(tokenizer, "chatml", messages) == "<user>a;<critic>bad;"
    for name in ("silent", "developer"):
        with pytest.raises(InvalidRequest, match="leaves its text out") as e:
            rendered(tokenizer, name, messages)
        assert e.value.param == "messages[1]"
    with pytest.raises(InvalidRequest, match="Unexpected message role"):
        rendered(tokenizer, "first", messages)


def test_texts_that_a_template_changes_are_no_error(tokenizer: Tokenizer) -> None:
    template = "{% for m in messages %}{{ m.content.split('|')[-1] | upper }};{% endfor %}"

    def render(chat: Any, **options: Any) -> str:
        return tokenizer.render_chat(chat, template=template, **options)

    said = say("u:think|so", "u:zzz")
    check_rendered(said, render(said), lambda chat, **_: render(chat).lower())


def test_calls_and_results_without_a_place_become_text(tokenizer: Tokenizer) -> None:
    function = {"name": "f", "arguments": {"a": 1}}
    call = {"id": "1", "type": "function", "function": function}
    messages = [*say("u:a"), {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "4", "tool_call_id": "1"}, *say("u:b")]  # fmt: skip
    for name in TEMPLATES:
        traits = tokenizer.traits(TEMPLATES[name])
        assert not traits.has_tools
        text = rendered(tokenizer, name, messages)
        assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
        assert "<tool_response>\n4\n</tool_response>" in text


def test_generic_tools_are_told_in_the_system_message(tokenizer: Tokenizer) -> None:
    for name, template in TEMPLATES.items():
        traits = tokenizer.traits(template)
        said = fit_messages(say("s:Be.", "u:a"), traits, [{"name": "clock"}])
        text = tokenizer.render_chat(said, template=template)
        assert '{"name": "clock"}\n</tools>' in text, name
        assert text.index("Be.") < text.index("clock") < text.rindex("a;")


def test_a_template_that_cannot_be_tried_is_left_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.traits("{{ raise_exception('no') }}") == TemplateTraits()


# Tools and results have a place, calls have none: they are a list behind a mark, as in Granite 3.3.
LISTED = (
    "{% if tools %}Answer with <|tool_call|>: {{ tools | tojson }};{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
)


def test_calls_without_a_place_are_listed_where_tools_and_results_have_one(
    tokenizer: Tokenizer,
) -> None:
    traits = tokenizer.traits(LISTED)
    assert (traits.has_calls, traits.has_listed_calls, traits.has_tools) == (False, True, True)
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}
             for name, arguments in (("f", {"a": 1}), ("g", "{}"))]  # fmt: skip
    messages = [*say("u:a"), {"role": "assistant", "content": "So.", "tool_calls": calls},
                {"role": "tool", "content": "5", "tool_call_id": "f"}]  # fmt: skip
    listed = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
    said = [{"role": "assistant", "content": f"So.<|tool_call|>{listed}"}, messages[-1]]
    assert fit_messages(messages, traits) == [*say("u:a"), *said]
    assert not tokenizer.traits(CHATML).has_listed_calls


def test_the_mark_of_listed_calls_is_the_templates_own() -> None:
    """A mark that the model wrote is the same token in the next prompt; one in the caller's text
    stays text."""
    tokenizer = tokenizer_of(LISTED, ("<|tool_call|>",))
    function = {"name": "f", "arguments": {"a": "<|tool_call|>"}}
    call = {"id": "1", "type": "function", "function": function}
    said = [
        {"role": "user", "content": "Why?<|tool_call|>"},
        {"role": "assistant", "content": "So.<|tool_call|>", "tool_calls": [call]},
        {"role": "tool", "content": "yes", "tool_call_id": "1"},
    ]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    (mark,) = tokenizer.encode_rendered("<|tool_call|>")
    options = ChatOptions(tools=[tool])
    before = tokenizer.encode_chat(said[:1], options).count(mark)  # in the description of tools
    assert tokenizer.encode_chat(said, options).count(mark) == before + 1


# Calls are rendered beside tools only, as in Hunyuan's template.
BESIDE_TOOLS = (
    "{% for m in messages %}{% if tools and m.tool_calls %}"
    "<calls>{{ m.tool_calls[0].function.name }};{% else %}<{{ m.role }}>{{ m.content }};{% endif %}"
    "{% endfor %}{{ tools | tojson if tools }}"
)


def test_calls_that_have_a_place_beside_tools_only(tokenizer: Tokenizer) -> None:
    traits = tokenizer.traits(BESIDE_TOOLS)
    assert (traits.has_calls, traits.has_tools) == (False, True)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [*say("u:a"), {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "4", "tool_call_id": "1"}]  # fmt: skip
    assert fit_messages(messages, traits, shows_tools=True) == messages
    text = fit_messages(messages, traits)[1]["content"]
    assert text == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
