"""Grammars of forced calls: what they allow is what the parsers read."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
llguidance = pytest.importorskip("llguidance", reason="calls are forced by the extra [grammar]")

from radixserve.errors import InvalidRequest  # noqa: E402
from radixserve.server.answer.reasoning import THOUGHTS  # noqa: E402
from radixserve.server.answer.tool_grammar import annotated_schema, tool_grammar  # noqa: E402
from radixserve.server.answer.tool_parsers.base import Call  # noqa: E402
from radixserve.server.answer.tool_styles import STYLES  # noqa: E402
from radixserve.structured_outputs import StructuredOutput  # noqa: E402
from tests.server.tool_models import DEMO  # noqa: E402
from tests.server.tool_outputs import DSML, WRITERS  # noqa: E402

F = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/number"}},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"number": {"type": "integer"}},
    },
}
G = {"name": "g.h-1", "description": "nothing"}
MARKS = {"[TOOL_CALLS]": 3, "[ARGS]": 4, "<think>": 3, "</think>": 4}  # <|system|>, <|user|>
ONE = '{"name": "f", "arguments": {"a": 1}}'
TWO = '{"name": "g.h-1", "arguments": {}}'
H1, H2 = (f"<tool_call>\n{one}\n</tool_call>" for one in (ONE, TWO))
DS = "<｜tool▁"
X1 = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
X2 = "<tool_call>\n<function=g.h-1>\n</function>\n</tool_call>"
L1, L2 = (one.replace("arguments", "parameters") for one in (ONE, TWO))

V32 = WRITERS["deepseek-v3.2"]([("f", {"a": 1}), ("g.h-1", {})])

# form, special tokens, parallel, thinking, what is allowed, what is not
CASES: list[tuple[str, dict[str, int], bool, str, list[str], list[str]]] = [
    ("hermes", {}, True, "none", [H1, H2, f"{H1}\n{H2}", "\n".join([H1] * 16)],
     ["", ONE, f"{H1}{H2}", "\n".join([H1] * 17), H1.replace("1", '"x"'), H1.replace('"f"', '"h"'),
      H1.replace('"a": 1', ""), H1.replace('"a": 1', '"a": 1, "b": 2'), f"Yes: {H1}"]),
    ("hermes", {}, False, "none", [H1, H2], [f"{H1}\n{H2}"]),
    ("hermes", {}, True, "may", [H1, f"<think>\nso </thin> {H1}</think>\n\n{H2}"],
     [f"<think>{H1}", f"no{H1}"]),
    ("hermes", {}, False, "open", [f"so {{</think>{H1}", f"</think>\n\n{H1}"], [H1, "so"]),
    ("hermes", MARKS, False, "may", [H1, f"<|system|>so<|user|>\n\n{H2}"], [f"<think>{H2}"]),
    ("hermes", MARKS, False, "open", [f"so <think> <|user|>\n\n{H2}"], [H2]),
    ("llama3", {}, True, "none", [L1, f"{L1}; {L2}"], [ONE, f"{L1}{L2}"]),
    ("mistral", MARKS, True, "none", [f"<|system|>[{ONE}, {TWO}]"], [f"[{ONE}]", "<|system|>[]"]),
    ("mistral", {}, False, "none", [f"[TOOL_CALLS][{ONE}]"], [f"[TOOL_CALLS][{ONE}, {TWO}]"]),
    ("mistral-args", MARKS, True, "none", ['<|system|>f<|user|>{"a": 1}<|system|>g.h-1<|user|>{}'],
     ['<|system|>h<|user|>{}', 'f{"a": 1}']),
    ("mistral-args", {}, True, "none", ['[TOOL_CALLS]f[ARGS]{"a": 1}'], ['[TOOL_CALLS]f{"a": 1}']),
    ("granite", {}, True, "none", [f"<|tool_call|>[{ONE}, {TWO}]"], [ONE, "<|tool_call|>[]"]),
    ("deepseek-v3", {}, False, "none",
     [f"{DS}calls▁begin｜>{DS}call▁begin｜>function{DS}sep｜>f\n```json\n{{\"a\": 1}}\n```"
      f"{DS}call▁end｜>{DS}calls▁end｜>"], [ONE]),
    ("deepseek-v3.1", {f"{DS}call▁begin｜>": 3}, True, "none",
     [f"{DS}calls▁begin｜><|system|>f{DS}sep｜>{{\"a\": 1}}{DS}call▁end｜><|system|>g.h-1{DS}sep｜>"
      f"{{}}{DS}call▁end｜>{DS}calls▁end｜>"], [f"{DS}calls▁begin｜>{DS}calls▁end｜>"]),
    ("kimi", {}, True, "none",
     ["<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
      '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'], [ONE]),
    ("qwen3-coder", {}, True, "none", [X1, X2, f"{X1}\n{X2}"],
     [X1.replace("1", "one"), X1.replace("=a", "=b"), X2.replace("g.h-1", "f")]),
    ("glm", {"<arg_key>": 3}, True, "none",
     ["<tool_call>f\n<|system|>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"],
     ["<tool_call>f\n</tool_call>"]),
    ("gemma4", {}, True, "none", ["<|tool_call>call:f{a:1}<tool_call|>"],
     ["<|tool_call>call:f{}<tool_call|>", "<|tool_call>call:f{a:x}<tool_call|>"]),
    ("gemma4", {"<|channel>": 3, "<channel|>": 4}, False, "may",
     ["<|tool_call>call:f{a:1}<tool_call|>",
      "<|system|>thought\nso<|user|><|tool_call>call:f{a:1}<tool_call|>"],
     ["<|system|>so<|user|><|tool_call>call:f{a:1}<tool_call|>", "<|system|>thought\nso"]),
    ("gemma4", {}, False, "open", ["so\n<channel|><|tool_call>call:f{a:1}<tool_call|>"], ["so"]),
    ("mistral-args", {"[THINK]": 3, "[/THINK]": 4}, False, "may",
     ['<|system|>so<|user|>[TOOL_CALLS]f[ARGS]{"a": 1}', "[TOOL_CALLS]g.h-1[ARGS]{}"],
     ['<think>so</think>[TOOL_CALLS]f[ARGS]{"a": 1}']),
    ("lfm2", {"<|tool_call_start|>": 3, "<|tool_call_end|>": 4}, True, "none",
     ["<|system|>[f(a=1), g.h-1()]<|user|>", "<|system|>[g.h-1()]<|user|>"],
     ["<|system|>[]<|user|>", "<|system|>[f()]<|user|>", "<|system|>[f(a='1')]<|user|>",
      "<|system|>[f(a=1),g.h-1()]<|user|>", "[f(a=1)]"]),
    ("lfm2", {}, False, "none", ["<|tool_call_start|>[f(a=1)]<|tool_call_end|>"],
     ["<|tool_call_start|>[f(a=1), g.h-1()]<|tool_call_end|>"]),
    ("nemotron", {}, True, "none", [f"<TOOLCALL>[{ONE}, {TWO}]</TOOLCALL>"],
     [f"<TOOLCALL>[{ONE}]", "<TOOLCALL>[]</TOOLCALL>"]),
    ("hunyuan", {}, False, "none", [f"<tool_calls>[{ONE}]</tool_calls>"],
     [f"<tool_calls>[{ONE}, {TWO}]</tool_calls>"]),
    ("command-r", {}, True, "none", [WRITERS["command-r"]([("g.h-1", {})])
      .replace('{"tool_name"', '    {\n        "tool_name"').replace(', "par', ',\n        "par')
      .replace("{}}", "{}\n    }")], [ONE]),
    ("command-r7b", {"<|START_ACTION|>": 3, "<|END_ACTION|>": 4}, True, "none",
     ['<|system|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
      '    {"tool_call_id": "1", "tool_name": "g.h-1", "parameters": {}}\n]<|user|>'],
     [ONE, "<|system|>[\n\n]<|user|>"]),
    ("olmo3", {}, True, "none",
     ["<function_calls>\nf(a=1)\ng.h-1()\n</function_calls>"],
     ["<function_calls>\n</function_calls>", "<function_calls>\nf()\n</function_calls>"]),
    ("minimax", {"<minimax:tool_call>": 3, "</minimax:tool_call>": 4}, True, "none",
     ['<|system|>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
      '<invoke name="g.h-1">\n</invoke>\n<|user|>'],
     ['<|system|>\n<invoke name="f">\n</invoke>\n<|user|>', "<|system|>\n<|user|>"]),
    ("deepseek-v3.2", {DSML: 3}, True, "none",
     [V32.replace(DSML, "<|system|>")],
     [V32.replace(DSML, "<|system|>").replace(">1<", ">x<"),
      V32.replace(DSML, "<|system|>").replace('"false"', '"true"')]),
    ("deepseek-v3.2", {}, True, "none", [V32], [V32.replace('"a"', '"b"')]),
    ("harmony", {"<|message|>": 3, "<|end|>": 6}, True, "may",
     ['<|channel|>commentary to=functions.f <|constrain|>json<|system|>{"a": 1}',
      "<|channel|>analysis<|system|>so<|end|><|start|>assistant<|channel|>commentary "
      'to=functions.f <|constrain|>json<|system|>{"a": 1}'], ["so", "<|channel|>final<|system|>x"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokens() -> Any:
    return llguidance.LLTokenizer(str(DEMO / "tokenizer.json"), eos_token=2)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_grammar(tokens: Any, case: Any) -> None:
    form, special, parallel, thinking, allowed, forbidden = case
    thoughts = THOUGHTS.get(form.removesuffix("-args"))
    lark = tool_grammar(
        form, [F, G], special, parallel=parallel, thinking=thinking, thoughts=thoughts
    )
    check(tokens, lark, allowed, forbidden)


def check(tokens: Any, lark: str, allowed: list[str], forbidden: list[str]) -> None:
    grammar = llguidance.LLMatcher.grammar_from_lark(lark)
    start = llguidance.LLMatcher(tokens, grammar)
    assert not start.is_error(), start.get_error()
    for texts, is_allowed in ((allowed, True), (forbidden, False)):
        for text in texts:
            matcher = start.deep_copy()
            ids = tokens.tokenize_str(text, parse_special=True)
            found = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            assert found == is_allowed, text


SCHEMA = StructuredOutput(
    json={
        "type": "object",
        "properties": {"b": {"const": 2}},
        "required": ["b"],
        "additionalProperties": False,
    }
)
# functions, thinking, what is allowed, what is not
WITH_SCHEMA: list[tuple[list[Any], str, list[str], list[str]]] = [
    ([F], "none", [H1, '{"b":2}', '{"b":  2}'], [ONE, f'{H1}{{"b":2}}', '{"b": 3}', "no"]),
    ([F], "open", [f"so</think>{H1}", 'so</think>\n{"b":2}'], ['{"b":2}']),
    ([], "may", ['{"b":2}', '<think>{</think>\n\n{"b":2}'], [H1, '<think>{"b":2}']),
]


@pytest.mark.parametrize("case", WITH_SCHEMA, ids=range(len(WITH_SCHEMA)))
def test_calls_or_json(tokens: Any, case: Any) -> None:
    functions, thinking, allowed, forbidden = case
    schema = annotated_schema(SCHEMA)
    assert schema is not None
    lark = tool_grammar(
        "hermes", functions, {}, parallel=True, thinking=thinking, schema=schema
    )  # fmt: skip
    check(tokens, lark, allowed, forbidden)


def test_forms_that_are_no_json_stay_as_they_are() -> None:
    assert annotated_schema(StructuredOutput(regex="a")) is None
    assert annotated_schema(StructuredOutput(json_object=True)) is not None


def test_every_name_and_schema_stands_in_it() -> None:
    functions = [{**F, "name": f"f{number}"} for number in range(50)]
    lark = tool_grammar("hermes", functions, {}, parallel=True, thinking="none")
    assert all(json.dumps(f'"f{number}"')[1:-1] in lark for number in range(50))


RICH = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "kind": {"enum": ["a b", 3, None]},
            "code": {"type": "string", "pattern": "^[a-c]{2}$"},
            "short": {"type": "string", "maxLength": 3},
            "list": {"type": "array", "items": {"type": "string"}},
            "inner": {"type": "object", "properties": {"x": {"type": "boolean"}}},
        },
        "required": ["text"],
    },
}


def call_in(style: str, **members: str) -> str:
    if style == "qwen3-coder":
        each = (f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in members.items())
        return f"<tool_call>\n<function=f>\n{''.join(each)}</function>\n</tool_call>"
    if style == "glm":
        each = (
            f"<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>\n"
            for name, text in members.items()
        )
        return f"<tool_call>f\n{''.join(each)}</tool_call>"
    if style in ("lfm2", "olmo3"):
        pairs = ", ".join(f"{name}={text}" for name, text in members.items())
        marks = {"lfm2": "<|tool_call_start|>[%s]<|tool_call_end|>",
                 "olmo3": "<function_calls>\n%s\n</function_calls>"}  # fmt: skip
        return marks[style] % f"f({pairs})"
    if style == "minimax":
        each = (f'<parameter name="{name}">{text}</parameter>\n' for name, text in members.items())
        call = f'<invoke name="f">\n{"".join(each)}</invoke>\n'
        return f"<minimax:tool_call>\n{call}</minimax:tool_call>"
    if style == "deepseek-v3.2":
        is_json = ("list", "inner")
        each = (
            f'<{DSML}parameter name="{name}" string="{json.dumps(name not in is_json)}">{text}'
            f"</{DSML}parameter>\n"
            for name, text in members.items()
        )
        call = f'<{DSML}invoke name="f">\n{"".join(each)}</{DSML}invoke>\n'
        return f"<{DSML}function_calls>\n{call}</{DSML}function_calls>"
    pairs = ",".join(f"{name}:{text}" for name, text in sorted(members.items()))
    return "<|tool_call>call:f{" + pairs.replace("'", '<|"|>') + "}<tool_call|>"


@pytest.mark.parametrize(
    "style", ["qwen3-coder", "glm", "gemma4", "lfm2", "olmo3", "minimax", "deepseek-v3.2"]
)
def test_arguments_that_are_no_json(tokens: Any, style: str) -> None:
    """What the grammar allows is read by the parser, as the schema has it."""
    quote = "'" if style in ("gemma4", "lfm2", "olmo3") else ""
    line = "\\n" if style in ("lfm2", "olmo3") else "\n"
    in_list = "['x','y']" if style == "gemma4" else '["x", "y"]'
    inner = "{x:true}" if style == "gemma4" else '{"x": true}'
    members = {
        "text": f"{quote}1 <b> {{{line}{quote}", "kind": f"{quote}a b{quote}",
        "code": f"{quote}ab{quote}", "short": f"{quote}x{line}y{quote}", "list": in_list,
        "inner": inner,
    }  # fmt: skip
    allowed = [members, {"text": members["text"]}, {"text": members["text"], "kind": "3"},
               {"text": members["text"], "inner": inner}]  # fmt: skip
    forbidden = [{}, {**members, "code": f"{quote}abc{quote}"}, {**members, "kind": "4"},
                 {**members, "short": f"{quote}long{quote}"}, {**members, "new": "1"},
                 {**members, "inner": "5"}]  # fmt: skip
    lark = tool_grammar(style, [RICH], {}, parallel=True, thinking="none")
    check(tokens, lark, [call_in(style, **each) for each in allowed],
          [call_in(style, **each) for each in forbidden])  # fmt: skip
    parser = STYLES[style].make([RICH])
    (call,) = [*parser.feed(call_in(style, **members)), *parser.finish()]
    assert isinstance(call, Call)
    assert json.loads(call.arguments) == {
        "text": "1 <b> {\n", "kind": "a b", "code": "ab", "short": "x\ny",
        "list": ["x", "y"], "inner": {"x": True},
    }  # fmt: skip


def test_a_generic_call_is_held_once_it_has_begun(tokens: Any) -> None:
    for special in ({}, {"<tool_call>": 3}):
        mark = "<|system|>" if special else "<tool_call>"
        lark = tool_grammar(
            "generic", [F, G], special, parallel=True, thinking="none", may_speak=True
        )
        calls = [f"Well: {one}".replace("<tool_call>", mark) for one in (H1, f"{H1}\n{H2}")]
        check(tokens, lark, ["", "just text < and <tool", *calls],
              [f"so {mark}", f"so {mark}no", calls[0] + " more",
               calls[0].replace('"f"', '"h"')])  # fmt: skip


def test_literals_of_python(tokens: Any) -> None:
    """Constants as Python writes them, strings with escapes; others as JSON."""
    members = {
        "flag": {"type": "boolean"}, "maybe": {"type": ["integer", "null"]},
        "choice": {"enum": ["it's", True, None, 2]}, "const": {"const": "a\nb"},
    }  # fmt: skip
    function = {"name": "f", "parameters": {"type": "object", "properties": members}}
    lark = tool_grammar("lfm2", [function], {}, parallel=True, thinking="none")
    allowed = [{"flag": "True"}, {"maybe": "None"}, {"maybe": "3"}, {"choice": "'it\\'s'"},
               {"choice": "True"}, {"choice": "None"}, {"const": "'a\\nb'"}, {},
               {"flag": "False", "const": "'a\\nb'"}]  # fmt: skip
    forbidden = [{"flag": "1"}, {"maybe": "x"}, {"choice": "its"}, {"other": "1"},
                 {"const": "'b'", "flag": "True"}]  # fmt: skip
    check(tokens, lark, [call_in("lfm2", **each) for each in allowed],
          [call_in("lfm2", **each) for each in forbidden])  # fmt: skip
    lark = tool_grammar("olmo3", [function], {}, parallel=True, thinking="none")
    check(tokens, lark, [call_in("olmo3", flag="true"), call_in("olmo3", maybe="null")],
          [call_in("olmo3", flag="True")])  # fmt: skip
    odd = {"type": "object", "properties": {"a b": {"type": "integer"}}}
    with pytest.raises(InvalidRequest, match="cannot be written"):
        tool_grammar("lfm2", [{"name": "f", "parameters": odd}], {}, parallel=True, thinking="none")
