"""Schemas of pydantic models with fields of every kind: taken, and what is generated is valid."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import random
import re
import typing
import uuid
from typing import Annotated, Any, Literal, NamedTuple

import jsonschema
import numpy as np
import pytest

llguidance = pytest.importorskip("llguidance", reason="the extra [grammar]")
pydantic = pytest.importorskip("pydantic", reason="the extra [serve]")

from typing import NotRequired  # noqa: E402

from pydantic import Field  # noqa: E402
from typing_extensions import TypedDict  # noqa: E402

from radixserve.api.runtime import DEMO  # noqa: E402
from radixserve.errors import InvalidRequest  # noqa: E402
from radixserve.grammar.backend import TokenTable, compile_matcher  # noqa: E402
from radixserve.structured_outputs import StructuredOutput  # noqa: E402
from radixserve.text.tokenizer import Tokenizer  # noqa: E402


class Color(enum.Enum):
    RED = "r"
    BLUE = 1


class Inner(pydantic.BaseModel):
    x: int = 0


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Literal[7, 9]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    good: bool


class Node(pydantic.BaseModel):
    value: Literal[1, 2]
    kids: list[Node] = Field(default=[], max_length=1)


class Typed(TypedDict):
    a: bool
    b: NotRequired[bool]


class Named(NamedTuple):
    a: bool
    b: Literal["x"] = "x"


Short = Annotated[str, Field(max_length=3)]
Small = Annotated[int, Field(ge=0, le=9)]
FIELDS: dict[str, Any] = {
    "str": Short, "int": int, "float": float, "bool": bool, "none": None, "bytes": bytes,
    "secret": pydantic.SecretStr, "secret bytes": pydantic.SecretBytes, "path": pathlib.Path,
    "new path": pydantic.NewPath, "json": pydantic.Json, "json of": pydantic.Json[list[int]],
    "set": set[Small], "frozenset": frozenset[Small],
    "few of a set": Annotated[set[Small], Field(max_length=3)], "tuple": tuple[Small, Short],
    "open tuple": Annotated[tuple[Small, ...], Field(max_length=2)],
    "dict": Annotated[dict[Short, Small], Field(max_length=1)],
    "keys": dict[Literal["a", "b"], Small],
    "pattern of keys": Annotated[dict[Annotated[str, Field(pattern="^x[a-c]$")], Small],
                                 Field(max_length=1)],
    "decimal": decimal.Decimal,
    "digits": Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)],
    "datetime": datetime.datetime, "date": datetime.date, "time": datetime.time,
    "timedelta": datetime.timedelta, "uuid": uuid.UUID, "uuid4": pydantic.UUID4,
    "ipv4": ipaddress.IPv4Address, "ipv6": ipaddress.IPv6Address,
    "network": ipaddress.IPv4Network, "url": pydantic.AnyUrl, "enum": Color,
    "literal": Literal["a", 1, None], "optional": Small | None, "union": Small | Short | None,
    "models": Cat | Inner, "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
    "model": Inner, "recursive": Node, "list": Annotated[list[Small], Field(max_length=2)],
    "text": Annotated[str, Field(min_length=2, max_length=4, pattern=None)],
    "regex": Annotated[str, Field(pattern="^[a-z]{1,3}$")],
    "steps": Annotated[int, Field(gt=0, le=20, multiple_of=5)],
    "range": Annotated[float, Field(gt=0.5, lt=1.5)], "typed dict": Typed, "named": Named,
    "deque": Annotated[collections.deque[Small], Field(max_length=2)],
    "base64": pydantic.Base64Str, "expression": re.Pattern, "size": pydantic.ByteSize,
    "int64": Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
    "aware": pydantic.AwareDatetime,
    "described": Annotated[Small, Field(alias="b-c", description="d", examples=[1],
                                        deprecated=True)],
}  # fmt: skip
# What pydantic asks for beyond the schema that it emits.
LOOSE = ("bytes", "path", "new path", "json", "json of", "network", "base64", "expression", "size",
         "url", "timedelta", "decimal", "digits", "datetime", "date", "uuid4", "aware", "time",
         "secret bytes")  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer.load(DEMO)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def table(tokenizer: Tokenizer) -> TokenTable:
    return TokenTable(tokenizer.backend)


def answer(matcher: Any, table: TokenTable, tokenizer: Tokenizer, rng: random.Random) -> str | None:
    """A random answer that prefers short tokens and its end; None where it becomes long."""
    ids: list[int] = []
    closing = [token for text in '"}]' for token in tokenizer.encode_more(text)]
    for _ in range(120):
        if matcher.is_stopped():
            return tokenizer.decode(ids)
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if table.end_id in allowed:
            return tokenizer.decode(ids)
        ends = np.intersect1d(allowed, closing)
        token = int(rng.choice(ends if len(ends) and rng.random() < 0.6 else allowed))
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
    return None


@pytest.mark.parametrize("name", list(FIELDS))
def test_a_field(name: str, table: TokenTable, tokenizer: Tokenizer) -> None:
    model = pydantic.create_model("Model", field=(FIELDS[name], ...))
    for mode in typing.get_args(Literal["validation", "serialization"]):
        schema = model.model_json_schema(mode=mode)
        form = StructuredOutput(json=schema, disable_any_whitespace=True, strict=False)
        start = compile_matcher(form, table)
        num_valid = 0
        for seed in range(20):
            if num_valid == 2:
                break
            text = answer(start.deep_copy(), table, tokenizer, random.Random(seed))
            if text is None:
                continue
            if "\ufffd" not in text:
                held = json.loads(json.dumps(schema).replace('"uniqueItems": true', '"title": ""'))
                jsonschema.validate(json.loads(text), held)
                if name not in LOOSE and mode == "validation":
                    model.model_validate_json(text)
                num_valid += 1
        assert num_valid, name


P: dict[str, Any] = {"type": "object", "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"const": 2**53 + 1}, "const has 9007199254740993, a whole number beyond"),
        ({"enum": [1, {"a": [-(2**60)]}]}, "enum has -1152921504606846976"),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "greater than maximum"),
        ({"type": "integer", "minimum": 10**400}, "a bound of 401 digits"),
        ({"type": "object", "minProperties": 2}, "minProperties 2 cannot be enforced"),
        ({**P, "patternProperties": {"^[ab]$": {}}, "minProperties": 3}, "minProperties 3 cannot"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, r"not supported\.?$"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems"),
        ({"uniqueItems": True}, "uniqueItems cannot be enforced"),
        ({"type": "array", "items": {"enum": [*range(9)]}, "uniqueItems": True}, "uniqueItems"),
        ({"type": ["array", "null"], "uniqueItems": True}, "uniqueItems"),
        ({**P, "properties": {"foo": {"type": "string"}}, "required": ["foo"],
          "patternProperties": {"^fo+$": {"type": "integer"}}}, "unsatisfiable"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused_by_name(
    schema: Any, reason: str, table: TokenTable
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        compile_matcher(StructuredOutput(json=schema), table)


@pytest.mark.parametrize(
    "schema",
    [
        {**P, "properties": {"a": {"enum": [1]}, "b": {"enum": [2]}},
         "patternProperties": {"^[ab]$": {"type": "integer"}}},
        {**P, "properties": {"a": {"enum": [1, 5]}, "b": {"enum": [2]}}, "required": ["a", "b"],
         "patternProperties": {"^(a|b)$": {"maximum": 3}, "^c$": {"enum": [0]}}},
        {**P, "properties": {"foo": {"type": "integer", "maximum": 5}}, "required": ["foo"],
         "patternProperties": {"^fo{1,2}$": {"enum": [1, 2, 30]}}},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties":
         {"enum": [1]}, "minProperties": 0},
        {"type": "object", "propertyNames": {"pattern": "^[ab]$"}, "additionalProperties":
         {"enum": [1]}},
        {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 5},
        {"type": "integer", "minimum": 2**63 - 5000, "maximum": 2**63 - 1},
        {**P, "properties": {"pattern": {"enum": ["[^x]"]}, "format": {"enum": ["no"]},
                             "minProperties": {"const": 7}}, "required": ["pattern", "format"]},
        {**P, "properties": {"a": {"type": "string", "format": "no-such", "maxLength": 1}},
         "minProperties": 1},
        {"type": "array", "items": {"enum": ["a", 1, True, "b"]}, "uniqueItems": True},
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2},
        {"type": "array", "items": {"type": "integer", "minimum": 7, "maximum": 40},
         "uniqueItems": True, "maxItems": 2, "minItems": 2},
        {"type": "array", "uniqueItems": True, "maxItems": 1.0},
        {**P, "properties": {"c": {"type": "array", "items": {"$ref": "#/$defs/C"},
                                   "uniqueItems": True, "minItems": 2}}, "required": ["c"],
         "$defs": {"C": {"title": "C", "type": "string", "enum": ["r", "g", "b"]}}},
    ],
)  # fmt: skip
def test_what_is_held_is_valid(schema: Any, table: TokenTable, tokenizer: Tokenizer) -> None:
    start = compile_matcher(StructuredOutput(json=schema, disable_any_whitespace=True), table)
    texts = [answer(start.deep_copy(), table, tokenizer, random.Random(at)) for at in range(25)]
    assert any(text is not None for text in texts)
    for text in texts:
        if text is not None and "\ufffd" not in text:
            jsonschema.validate(json.loads(text), schema)


def test_options_of_the_parser_are_left_out_unless_allowed(table: TokenTable) -> None:
    given = StructuredOutput(json={"oneOf": [{"type": "integer"}, {"type": "number"}],
                                   "x-guidance": {"coerce_one_of": True}})  # fmt: skip
    with pytest.raises(InvalidRequest, match="oneOf"):
        compile_matcher(given, table)
    compile_matcher(given, table, keeps_options=True)


def test_what_is_not_strict_takes_a_repeated_item(table: TokenTable) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    compile_matcher(StructuredOutput(json=schema, strict=False), table)
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        compile_matcher(StructuredOutput(json=schema), table)
