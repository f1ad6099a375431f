"""`StructuredOutput`: what is asked for, and what is refused before anything is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixserve import InvalidRequest, SamplingParams, StructuredOutput

BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
    ({"json": {}, "regex": "a"}, "got json, regex"),
    ({"json_object": False}, "got none"),
    ({"json_object": 1}, "json_object must be True or False"),
    ({"json": "{"}, "json must be a JSON schema"),
    ({"json": "[1]"}, "json must be a JSON schema"),
    ({"json": {"a": float("nan")}}, "json must be a JSON schema"),
    ({"json": {"a": {1, 2}}}, "json must be a JSON schema"),
    ({"regex": ""}, "regex must be a non-empty string"),
    ({"regex": 5}, "regex must be a string"),
    ({"regex": "(" * 129}, "regex must nest at most 128 brackets"),
    ({"regex": "a" * 300_000}, "regex must have at most 262144 characters"),
    ({"grammar": "\ud800"}, "grammar is not valid Unicode text"),
    ({"choice": []}, "choice must be a list of non-empty strings, got none"),
    ({"choice": "yes"}, "choice must be a list of non-empty strings"),
    ({"choice": ["a", ""]}, "choice must be a list of non-empty strings"),
    ({"choice": ["a"] * 5000}, "choice takes at most 4096 strings"),
    ({"regex": "a", "disable_any_whitespace": True}, "are for json and json_object"),
    ({"regex": "a", "jump_forward": None}, "jump_forward must be True or False"),
    ({"schema": {}}, "unknown StructuredOutput name 'schema'"),
    (
        {"json": {}, "whitespace_pattern": " ?", "disable_any_whitespace": True},
        "whitespace_pattern must be None",
    ),
]


@pytest.mark.parametrize(("fields", "reason"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_bad_fields_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        StructuredOutput(**fields)
    assert reason in str(refused.value)


def test_a_schema_is_kept_as_text_in_the_order_of_its_keys() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    from_mapping, from_text = (
        StructuredOutput(json=schema),
        StructuredOutput(json=json.dumps(schema, indent=2)),
    )
    assert from_mapping == from_text
    assert hash(from_mapping) == hash(from_text)
    assert json.loads(from_mapping.source) == schema
    other = StructuredOutput(json={"type": "object", "properties": {"a": {}, "b": {}}})
    assert other != from_mapping, "the order of properties is that of the answer"


def test_kinds_and_sources() -> None:
    assert StructuredOutput(json_object=True).kind == "json"
    choice = StructuredOutput(choice=iter(["b", "a", "b"]))
    assert (choice.kind, choice.choice, choice.source) == ("choice", ("b", "a"), '["b", "a"]')
    grammar = StructuredOutput(grammar='start: "a"')
    assert (grammar.kind, grammar.source) == ("grammar", 'start: "a"')


def test_sampling_params_take_only_the_record() -> None:
    params = SamplingParams(structured=StructuredOutput(regex="a"), temperature=0)
    assert not params.is_greedy_only
    assert params.changes_logits
    with pytest.raises(InvalidRequest, match="structured must be a StructuredOutput"):
        SamplingParams(structured="a")  # type: ignore[arg-type]
    fields = SamplingParams(structured={"regex": "a"})
    assert fields.structured == StructuredOutput(regex="a")
