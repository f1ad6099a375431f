"""Objects have the keys that their schema names, unless it says that they have others."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import random
import time
from typing import Any

import jsonschema
import pytest

pytest.importorskip("llguidance", reason="the extra [grammar]")

from benchmarks.json_schema_suite import Vocabulary, load_vocabulary, takes, walk
from radixserve.errors import InvalidRequest
from radixserve.grammar.backend import compile_matcher
from radixserve.grammar.closed_objects import closed
from radixserve.structured_outputs import StructuredOutput

INT: dict[str, Any] = {"type": "integer"}
A, B = {"properties": {"a": INT}}, {"properties": {"b": INT}}
OBJECT = {"type": "object"}
DEFS: dict[str, Any] = {"$defs": {
    "A": {**OBJECT, **A},
    "B": {**OBJECT, **B},
    "Open": {**A, "additionalProperties": INT},
    "Both": {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
    "List": {"properties": {"head": INT, "tail": {"$ref": "#/$defs/List"}}},
}}  # fmt: skip
CASES: list[tuple[str, Any, list[Any], list[Any]]] = [
    # name, schema, values that are taken, values that are not
    ("named keys", {**OBJECT, **A}, [{"a": 1}, {}], [{"z": 1}, {"a": 1, "z": 1}]),
    ("no type", A, [{"a": 1}, 5, []], [{"z": 1}]),
    ("no key", {**OBJECT, "properties": {}}, [{}], [{"z": 1}]),
    ("explicitly open", {**A, "additionalProperties": True}, [{"a": 1, "z": "x"}], [{"a": "x"}]),
    ("of a schema", {**A, "additionalProperties": INT}, [{"a": 1, "z": 2}], [{"z": "x"}]),
    ("unevaluated true", {**A, "unevaluatedProperties": True}, [{"a": 1, "z": "x"}], [{"a": "x"}]),
    ("unevaluated false", {"allOf": [A], "unevaluatedProperties": False}, [{"a": 1}], [{"z": 1}]),
    ("nothing but unevaluated false", {**OBJECT, "unevaluatedProperties": False}, [{}], [{"z": 1}]),
    ("only a type", OBJECT, [{"z": {"y": 1}}, {}], [1]),
    ("a dict", {**OBJECT, "additionalProperties": INT}, [{"z": 1}], [{"z": "x"}]),
    ("only required", {**OBJECT, "required": ["c"]}, [{"c": 1, "z": 1}], [{"z": 1}]),
    ("required and unnamed", {**OBJECT, **A, "required": ["c"]}, [{"a": 1, "c": "x"}],
     [{"a": 1}, {"c": 1, "z": 1}]),
    ("more keys than names", {**OBJECT, "properties": {"a": INT}, "required": ["a"],
                              "minProperties": 1}, [{"a": 1}], [{}, {"a": 1, "z": 1}]),
    ("patterns", {**OBJECT, "patternProperties": {"^x": INT}}, [{"xy": 1}, {}], [{"z": 1}]),
    ("patterns and required", {**OBJECT, "patternProperties": {"^x": INT}, "required": ["xa", "b"]},
     [{"b": "x", "xa": 1}], [{"xa": 1}, {"b": 1, "xa": "x"}]),
    ("nested", {"properties": {"o": {"type": "array", "items": A}}}, [{"o": [{"a": 1}]}],
     [{"o": [{"z": 1}]}]),
    ("in prefixItems", {"prefixItems": [A], "items": B}, [[{"a": 1}, {"b": 1}]],
     [[{"b": 1}], [{"a": 1}, {"a": 1}]]),
    ("below additionalProperties", {**OBJECT, "additionalProperties": A}, [{"z": {"a": 1}}],
     [{"z": {"z": 1}}]),
    ("allOf", {**OBJECT, "allOf": [A, B]}, [{"a": 1, "b": 1}, {"b": 1}],
     [{"z": 1}, {"a": "x"}, {"b": "x"}]),
    ("allOf of one", {"allOf": [A], "title": "T"}, [{"a": 1}], [{"z": 1}]),
    ("allOf beside properties", {**B, "allOf": [A]}, [{"b": 1, "a": 1}], [{"z": 1}, {"a": "x"}]),
    ("nested allOf", {"allOf": [{"allOf": [A, {"required": ["a"]}]}, B]}, [{"a": 1, "b": 1}],
     [{"b": 1}, {"a": 1, "z": 1}]),
    ("allOf with an open branch", {"allOf": [A, {**B, "additionalProperties": True}]},
     [{"a": 1, "b": 1, "z": 1}], [{"a": "x"}]),
    ("allOf with a type", {"allOf": [OBJECT, A]}, [{"a": 1}], [{"z": 1}, 1]),
    ("allOf with patterns", {**OBJECT, "allOf": [A, {"patternProperties": {"^x": INT}}]},
     [{"a": 1, "xy": 1}], [{"xy": "x"}, {"z": 1}]),
    ("allOf with a closed branch", {**OBJECT, "allOf": [{**A, "additionalProperties": False}, B]},
     [{"a": 1}], [{"a": 1, "b": 1}]),
    ("anyOf", {"anyOf": [{**OBJECT, **A}, {**OBJECT, **B}, {"type": "null"}]},
     [{"a": 1}, {"b": 1}, None], [{"a": 1, "b": 1}, {"z": 1}]),
    ("anyOf beside properties", {**OBJECT, "properties": {"k": INT}, "required": ["k"], "anyOf":
     [{**A, "required": ["a"]}, {**B, "required": ["b"]}]}, [{"k": 1, "a": 1}, {"k": 1, "b": 1}],
     [{"k": 1}, {"k": 1, "a": 1, "b": 1}, {"k": 1, "a": 1, "z": 1}]),
    ("anyOf with an open branch", {**A, "anyOf": [{"additionalProperties": INT}, B]},
     [{"a": 1, "z": 1}], [{"z": "x"}]),
    ("anyOf of required", {**OBJECT, "properties": {"a": INT, "b": INT}, "anyOf":
     [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}, {"a": 1, "b": 1}],
     [{}, {"a": 1, "z": 1}]),
    ("oneOf", {**OBJECT, "properties": {"k": True}, "required": ["k"], "oneOf":
     [{"properties": {"k": {"const": "a"}, "a": INT}},
      {"properties": {"k": {"const": "b"}, "b": INT}}]},
     [{"k": "a", "a": 1}, {"k": "b"}], [{"k": "a", "b": 1}, {"k": "c"}, {"k": "a", "z": 1}]),
    ("ref", {**DEFS, "$ref": "#/$defs/A"}, [{"a": 1}], [{"z": 1}]),
    ("ref beside properties", {**DEFS, "$ref": "#/$defs/A", **B}, [{"a": 1, "b": 1}],
     [{"z": 1}, {"a": "x"}, {"b": "x"}]),
    ("refs in allOf", {**DEFS, "allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
     [{"a": 1, "b": 1}], [{"a": 1, "z": 1}]),
    ("a ref alone and in allOf", {**DEFS, **OBJECT, "properties": {
        "one": {"$ref": "#/$defs/A"}, "two": {"allOf": [{"$ref": "#/$defs/A"}, B]}}},
     [{"one": {"a": 1}, "two": {"a": 1, "b": 1}}], [{"one": {"a": 1, "b": 1}}, {"two": {"z": 1}}]),
    ("a ref to refs in allOf", {**DEFS, "$ref": "#/$defs/Both", "properties": {"c": INT}},
     [{"a": 1, "b": 1, "c": 1}], [{"a": "x"}, {"z": 1}]),
    ("a ref to an open object", {**DEFS, "allOf": [{"$ref": "#/$defs/Open"}, B]},
     [{"a": 1, "b": 1, "z": 1}], [{"z": "x"}]),
    ("a recursive ref", {**DEFS, "$ref": "#/$defs/List"},
     [{"head": 1, "tail": {"head": 2}}], [{"head": 1, "tail": {"z": 2}}]),
    ("a recursive ref with keys", {**DEFS, "$ref": "#/$defs/List", "properties": {"size": INT}},
     [{"head": 1, "tail": {"head": 2}, "size": 1}], [{"tail": {"size": 1}}]),
    ("a ref to the root", {"properties": {"a": {"$ref": "#"}}}, [{"a": {"a": 1}}],
     [{"a": {"z": 1}}]),
    ("an encoded pointer", {"$defs": {"a b/c": A}, "allOf": [{"$ref": "#/$defs/a%20b~1c"}, B]},
     [{"a": 1, "b": 1}], [{"z": 1}]),
    ("an anchor, whose keys are not known", {"$defs": {"X": {"$anchor": "x", **A}},
     "allOf": [{"$ref": "#x"}, B]}, [], [{"a": "x"}]),
    ("names of keywords", {"properties": {"properties": INT, "$ref": INT, "allOf": INT}},
     [{"properties": 1, "$ref": 1, "allOf": 1}], [{"z": 1}]),
    ("constants", {"enum": [{"properties": {}}, {"z": 1}]}, [{"properties": {}}, {"z": 1}], [{}]),
]  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary()


def start_of(schema: Any, vocabulary: Vocabulary, **options: bool) -> Any:
    form = StructuredOutput(json=schema, disable_any_whitespace=True, **options)
    return compile_matcher(form, vocabulary.table)


@pytest.mark.parametrize(("name", "schema", "taken", "kept_out"), CASES, ids=[c[0] for c in CASES])
def test_keys_of_an_object(
    name: str, schema: Any, taken: list[Any], kept_out: list[Any], vocabulary: Vocabulary
) -> None:
    before = copy.deepcopy(schema)
    start = start_of(schema, vocabulary)
    assert schema == before
    for value in taken:
        assert takes(start.deep_copy(), vocabulary, value), (name, value)
        jsonschema.Draft202012Validator(schema).validate(value)
    for value in kept_out:
        assert not takes(start.deep_copy(), vocabulary, value), (name, value)


def test_the_option_restores_open_objects(vocabulary: Vocabulary) -> None:
    start = start_of({**OBJECT, **A}, vocabulary, disable_additional_properties=False)
    assert takes(start, vocabulary, {"a": 1, "z": "x"})


def test_more_properties_than_names_stay_open() -> None:
    schema = {**A, "minProperties": 3}
    assert closed(schema) == schema


def test_what_is_not_a_schema_is_left_to_the_parser(vocabulary: Vocabulary) -> None:
    for schema in (
        {"properties": 5}, {"allOf": 5}, {"allOf": [5]}, {"$ref": 5, **A}, {"required": 5, **A},
        {"$defs": [A], "allOf": [{"$ref": "#/$defs/0"}, B]}, {"required": [5], **A},
        {"allOf": [{"$ref": "#/$defs/none"}, A]}, {"$ref": "#/%", **A}, {"minProperties": "x", **A},
    ):  # fmt: skip
        with contextlib.suppress(InvalidRequest):  # no other exception
            start_of(schema, vocabulary)


def test_a_chain_of_references_is_closed_up_to_a_bound() -> None:
    def chain(length: int) -> Any:
        defs = {f"D{i}": {"allOf": [{"$ref": f"#/$defs/D{i + 1}"}, {"properties": {f"k{i}": INT}}]}
                for i in range(length)}  # fmt: skip
        return {"$defs": {**defs, f"D{length}": A}, "$ref": "#/$defs/D0"}

    assert len(closed(chain(20))["$defs"]) > 200
    with pytest.raises(InvalidRequest, match="combine too many keys"):
        closed(chain(3_000))
    nested: Any = A
    for _ in range(3_000):
        nested = {"items": nested}
    with pytest.raises(InvalidRequest, match="the schema is nested too deeply"):
        closed(nested)


def test_many_branches_of_many_keys_are_refused_quickly() -> None:
    names = {f"key{number}": INT for number in range(8_000)}
    branches = [{"properties": {f"b{number}": INT}} for number in range(4_000)]
    referring = {"$defs": {"A": A}, "properties": names, "anyOf": [{"$ref": "#/$defs/A"}] * 4_000}
    began = time.monotonic()
    for schema in ({"properties": names, "anyOf": branches}, referring):
        with pytest.raises(InvalidRequest, match="combine too many keys"):
            closed(schema)
    assert time.monotonic() - began < 10
    few = dict(itertools.islice(names.items(), 100))
    closed({"properties": few, "anyOf": branches[:400]})


def _object(rng: random.Random, depth: int, has_choices: bool = True) -> dict[str, Any]:
    """A random schema of objects of few keys, with at most one choice between branches."""
    kinds = [{"const": 1}, {"enum": [1, 2]}, {"type": "boolean"}, True]
    schema: dict[str, Any] = {"type": "object"} if rng.random() < 0.8 else {}
    if rng.random() < 0.8:
        keys = rng.sample("abcd", rng.randrange(3))
        schema["properties"] = {key: rng.choice(kinds) for key in keys}
        schema["required"] = [key for key in keys if rng.random() < 0.5]
        if rng.random() < 0.3:
            schema["properties"]["o"] = _object(rng, 0)
    if depth and rng.random() < 0.7:
        schema["allOf"] = [_object(rng, depth - 1, False) for _ in range(rng.randrange(1, 3))]
    if depth and has_choices and rng.random() < 0.5:
        choice = rng.choice(["anyOf", "anyOf", "oneOf"])
        schema[choice] = [_object(rng, depth - 1, False) for _ in range(rng.randrange(1, 3))]
    if rng.random() < 0.2:
        schema["$ref"] = "#/$defs/D"
    return schema


def _names_keys(schema: dict[str, Any]) -> bool:
    """Whether the schema itself, or one that it combines, has `properties`, and so has each branch
    of a choice in it."""
    parts = schema.get("allOf", [])
    choices = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    has_own = "properties" in schema or "$ref" in schema or any(map(_names_keys, parts))
    return (has_own or bool(choices)) and all(map(_names_keys, choices))


def test_random_compositions_are_valid_and_have_named_keys_only(vocabulary: Vocabulary) -> None:
    rng = random.Random(7)
    num_answers = num_refused = 0
    for _ in range(80):
        schema = _object(rng, 2)
        schema["$defs"] = {"D": {"type": "object", "properties": {"d": {"const": 1}, "a": {}}}}
        try:
            start = start_of(schema, vocabulary)
        except InvalidRequest as error:
            num_refused += 1
            if "oneOf" not in str(error):  # else no object is possible, closed or not
                with pytest.raises(InvalidRequest):
                    start_of(schema, vocabulary, disable_additional_properties=False)
            continue
        strict = dict(schema)
        if _names_keys(schema):
            strict["unevaluatedProperties"] = False
        for seed in range(4):
            text = walk(start.deep_copy(), vocabulary, random.Random(seed))
            if text is None or "\ufffd" in text:
                continue
            value = json.loads(text)
            if isinstance(value, dict):
                jsonschema.Draft202012Validator(strict).validate(value)
                num_answers += 1
    assert num_answers > 120
    assert num_refused < 30
