"""Grammars of forced calls: what they allow is what the parsers read."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
llguidance = pytest.importorskip("llguidance", reason="calls are forced by the extra [grammar]")

from radixserve.server.tool_grammar import annotated_schema, tool_grammar  # noqa: E402
from radixserve.structured_output import StructuredOutput  # noqa: E402
from tests.server.tool_models import DEMO  # noqa: E402

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
L1, L2 = (one.replace("arguments", "parameters") for one in (ONE, TWO))

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
]  # fmt: skip


@pytest.fixture(scope="module")
def tokens() -> Any:
    return llguidance.LLTokenizer(str(DEMO / "tokenizer.json"), eos_token=2)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_grammar(tokens: Any, case: Any) -> None:
    form, special, parallel, thinking, allowed, forbidden = case
    lark = tool_grammar(form, [F, G], special, parallel=parallel, thinking=thinking)
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
