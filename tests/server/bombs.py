"""Bodies that may hurt a server: for every field of every route, values of 1 to 32 MB."""

from __future__ import annotations

import inspect
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel, WithJsonSchema

MEGABYTE = 1_000_000
_HOLE = "@@hole@@"
_QUOTED_HOLE = json.dumps(_HOLE)
Put = Callable[[Any], Any]  # a value as a part of a body, as the whole body

# What a route needs beside the field, so that a value of the right type gets far.
_BESIDE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"max_tokens": 1},
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 16},
    "/v1/messages": {"max_tokens": 1},
    "/generate": {"prompt": "a", "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/v1/cache/lookup": {"prompt": "a"},
}
_EXCLUDE_PROMPT = ("messages", "text", "input_ids")  # such a field stands in the place of `prompt`
_EXAMPLES = {  # of fields whose type does not show which values are taken
    "model": "demo",
    "verb": "demote",
    "type": "clear_thinking_20251015",
    "role": "user",
    "name": "f",
    "schema": {"type": "object"},
    "input_schema": {"type": "object"},
    "parameters": {"type": "object"},
}


@dataclass(frozen=True)
class Place:
    """A field of a route's body, or an item of a list in it."""

    path: str  # of the route
    name: str  # "messages[].content"
    kind: Literal["text", "list", "members", "any"]
    item: Any  # a right item of a list
    head: bytes  # the body before the value, and after it
    tail: bytes


def places(app: FastAPI) -> list[Place]:
    """All of every route that takes a body."""
    found = [place for route in _routes(app.routes) for place in _places_of_route(route)]
    paths = app.openapi()["paths"]
    assert {place.path for place in found} == {path for path in paths if "post" in paths[path]}
    return found


def _routes(routes: Iterable[Any]) -> Iterator[APIRoute]:
    """Those that take a body, also of included routers."""
    for route in routes:
        if isinstance(route, APIRoute) and "POST" in route.methods and route.include_in_schema:
            yield route
        elif hasattr(route, "original_router"):
            yield from _routes(route.original_router.routes)


def _places_of_route(route: APIRoute) -> Iterator[Place]:
    path = route.path
    yield Place(path, "", "any", {}, b"", b"")
    hints = get_type_hints(route.endpoint, include_extras=True)
    names = [name for name in inspect.signature(route.endpoint).parameters if name in hints]
    for kind in (hints[name] for name in names):
        if not (inspect.isclass(kind) and issubclass(kind, BaseModel)):
            continue
        for name, value_kind, item, put in _fields(kind, _BESIDE.get(path, {})):
            head, tail = json.dumps(put(_HOLE)).encode().split(_QUOTED_HOLE.encode())
            yield Place(path, name, value_kind, item, head, tail)


Found = tuple[str, Literal["text", "list", "members", "any"], Any, Put]


def _fields(model: type[BaseModel], beside: dict[str, Any]) -> Iterator[Found]:
    """The places in a model: their names, kinds, items, and the model's body with a value there."""
    fixed = {**_example(model), **beside}

    def put_into(name: str, put: Put) -> Put:
        others = {
            other: value
            for other, value in fixed.items()
            if not (other == "prompt" and name in _EXCLUDE_PROMPT)
        }
        return lambda value: {**others, name: put(value)}

    for field_name, field in model.model_fields.items():
        name = field.alias or field_name
        annotation = Annotated[field.annotation, *field.metadata] if field.metadata else (
            field.annotation
        )  # fmt: skip
        for below, kind, item, put in _of_type(annotation):
            yield name + below, kind, item, put_into(name, put)
    yield "unknown", "any", {}, put_into("unknown", lambda value: value)


def _of_type(annotation: Any) -> Iterator[Found]:
    """The places in a value of this type; the names are what follows the field's."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        if inner is Any:
            yield "", "any", {}, lambda value: value
        elif not any(hasattr(part, "pattern") and part.pattern for part in metadata):
            yield from _of_type(inner)
        return
    if annotation is Any:
        yield "", "any", {}, lambda value: value
    elif annotation is str:
        yield "", "text", "a", lambda value: value
    elif origin is list:
        (inner,) = get_args(annotation)
        item = _example(inner)
        yield "", "list", item, lambda value: value
        for below, kind, below_item, put in _of_type(inner):
            yield f"[]{below}", kind, below_item, lambda value, put=put: [put(value)]
    elif origin is dict:
        yield "", "members", {}, lambda value: value
        yield ".a", "any", {}, lambda value: {"a": value}
    elif origin in (Union, type(int | None)):
        for inner in get_args(annotation):
            yield from _of_type(inner)
    elif inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        for below, kind, item, put in _fields(annotation, {}):
            yield f".{below}", kind, item, put


def _example(annotation: Any, name: str = "") -> Any:
    """A small right value."""
    origin = get_origin(annotation)
    if name in _EXAMPLES and origin is not Literal and annotation is not str:
        return _EXAMPLES[name]
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        if inner is Any and any(isinstance(part, WithJsonSchema) for part in metadata):
            return _EXAMPLES.get(name, "a")
        return _example(inner, name)
    if origin is Literal:
        return get_args(annotation)[0]
    if origin in (Union, type(int | None)):
        return _example(get_args(annotation)[0], name)
    if origin is list:
        return [_example(get_args(annotation)[0])]
    if origin is dict:
        return _EXAMPLES.get(name, {"a": "a"})
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields.items()
        return {
            field.alias or field_name: _example(field.annotation, field.alias or field_name)
            for field_name, field in fields
            if field.is_required()
        }
    return {str: _EXAMPLES.get(name, "a"), int: 1, float: 1.0, bool: True}.get(annotation, {})


# -- values ------------------------------------------------------------------------------------

_TEXTS = (
    "a", "word ", " ", "\\n", "5", "\u00e9", "\u65e5", "\U0001f600", "\\u00e9", "\\u65e5",
    "\\ud83d\\ude00", "\\ud800", "\\u0000", '\\"', "\\\\", '[{\\"},', "<|im_end|>", "<|im_start|>",
    "</think>", "<tool_call>", "{{", "(a|b)*", "[0-9]{1,9}", "{\\\"a\\\":", "\ufdd0", "x-y: ",
)  # fmt: skip
_ITEMS = (
    "5", "123456", "4", "-1", "99999999999", "99999999999999999999", "1.5", "0.1234567890123",
    "true", "null", '"a"', '""', '"abcdefgh"', '"\\u00e9"', "{}", "[]", "[1]", '{"a":1}', "[[]]",
    '{"type":"text","text":"a"}', '{"role":"user","content":"a"}', '{"a":"b","c":[1,{"d":null}]}',
)  # fmt: skip
_MEMBERS = ("1", '"a"', "{}", "[1]", "null", "1.5", '{"type":"string"}', '"' + "b" * 900 + '"')


def bomb(chance: random.Random, place: Place) -> tuple[str, bytes]:
    """A body with a value of 1 to 32 MB there, and what it is."""
    size = int(MEGABYTE / (1 - chance.random() * 31 / 32))  # small ones are the most frequent
    items = partial(_list, place)
    kinds = [_text, items, _members, _nested, _schema]
    right = {"text": _text, "list": items, "members": _members}.get(place.kind)
    make = chance.choice([*kinds, *[right] * 6] if right else kinds)
    name, value = make(chance, size - len(place.head) - len(place.tail))
    return f"{place.path} {place.name}: {name}, {size} bytes", place.head + value + place.tail


def _text(chance: random.Random, size: int) -> tuple[str, bytes]:
    unit = chance.choice(_TEXTS)
    if chance.random() < 0.1:  # one character makes Python store four bytes for each
        unit = "a"
        return "text with an emoji", b'"' + unit.encode() * size + "\U0001f600".encode() + b'"'
    part = unit.encode()
    return f"text of {unit!r}", b'"' + part * (size // len(part)) + b'"'


def _list(place: Place, chance: random.Random, size: int) -> tuple[str, bytes]:
    right = json.dumps(place.item)
    item = chance.choice([*_ITEMS, *[right] * 8])
    shape = chance.choice(["flat", "flat", "rows", "mixed"])
    if shape == "rows":  # lists of 1,000 items
        item = "[" + ",".join([item] * 1000) + "]"
    last = chance.choice(_ITEMS) if shape == "mixed" else item
    part = item.encode() + b","
    return f"{shape} list of {item[:60]}", b"[" + part * (size // len(part)) + last.encode() + b"]"


def _members(chance: random.Random, size: int) -> tuple[str, bytes]:
    value = chance.choice(_MEMBERS)
    prefix = chance.choice(["", "field", "a" * 60, "k" * 1000])
    digits = math.ceil(math.log10(size))
    count = size // (len(value) + len(prefix) + digits + 5)
    if chance.random() < 0.2:
        part = f'"{prefix}a":{value},'.encode()
        return f"the same member of {value[:20]}", b"{" + part * count + f'"a":{value}}}'.encode()
    members = _numbered(f'"{prefix}'.encode(), digits, f'":{value},'.encode(), count)
    return f"{count} members {prefix[:5]}: {value[:20]}", b"{" + members[:-1] + b"}"


def _numbered(head: bytes, digits: int, tail: bytes, count: int) -> bytes:
    """`head`, a number of one more digit and `tail`, for `count` numbers that follow each other."""
    row = np.frombuffer(head + b"1" + b"0" * digits + tail, np.uint8)
    rows = np.tile(row, (count, 1))
    numbers = np.arange(count)
    for place in range(digits):
        rows[:, len(head) + digits - place] += (numbers // 10**place % 10).astype(np.uint8)
    return rows.tobytes()


def _nested(chance: random.Random, size: int) -> tuple[str, bytes]:
    begin, end = chance.choice([("[", "]"), ('{"a":', "}"), ("[[],", "]")])
    depth = chance.choice([100, 250, 100_000, size // (len(begin) + 1)])
    tree = (begin * depth + "1" + end * depth).encode()
    count = max(1, size // (len(tree) + 1))
    return f"{count} nests of {begin} {depth} deep", b"[" + b",".join([tree] * count) + b"]"


def _schema(chance: random.Random, size: int) -> tuple[str, bytes]:
    """A JSON schema, as an object or as its text."""
    part = chance.choice([
        '{"type":"string"}', '{"const":12345}', '{"enum":["a","b"]}', '{"pattern":"(a|b)*"}',
        '{"type":"array","items":{"type":"integer","maxItems":9}}', '{"$ref":"#"}',
    ])  # fmt: skip
    count = size // (len(part) + 1)
    digits = chance.choice([3, 9, 4000, size])
    make: Callable[[], str] = chance.choice([
        lambda: '{"anyOf":[' + ",".join([part] * count) + "]}",
        lambda: '{"enum":[' + _numbered(b'"word', 7, b'",', size // 15).decode()[:-1] + "]}",
        lambda: '{"type":"object","properties":{"a":{"pattern":"' + "a" * size + '"}}}',
        lambda: '{"type":"string","maxLength":' + "9" * digits + "}",
    ])  # fmt: skip
    schema = make()
    if chance.random() < 0.5:
        return f"schema {schema[:40]}", schema.encode()
    return f"text of schema {schema[:40]}", json.dumps(schema).encode()
