"""Random forms: JSON schemas with all that nests, regular expressions, and what keeps them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

from radixserve import Completion, StructuredOutput

_WORDS = ("id", "name", "größe", "first name", "x", "kind", "tags", 'say "hi"', "a\\b", "日本")
_LITERALS = ("yes", "no", "", "a b", "ü", 'q"', 0, -7, 12.5, True, None)


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose values are short: enums, patterns, arrays, nested objects, references."""
    names = [f"part{number}" for number in range(rng.randrange(3))]
    defs = {name: _schema(rng, depth - 1, ()) for name in names}
    if names and rng.random() < 0.5:  # one that contains itself
        defs["list"] = {
            "type": "object",
            "properties": {"head": _scalar(rng), "tail": {"$ref": "#/$defs/list"}},
            "required": ["head"],
            "additionalProperties": False,
        }
    found = _schema(rng, depth, tuple(defs))
    return {**found, "$defs": defs} if defs else found


def _schema(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    if names and rng.random() < 0.25:
        return {"$ref": f"#/$defs/{rng.choice(names)}"}
    kinds = [_object, _object, _array, _any_of] if depth > 0 else [_scalar]
    kind = rng.choice([*kinds, _scalar])
    return _scalar(rng) if kind is _scalar else kind(rng, depth, names)


def _object(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    keys = rng.sample(_WORDS, rng.randrange(4))
    found: dict[str, Any] = {
        "type": "object",
        "properties": {key: _schema(rng, depth - 1, names) for key in keys},
        "required": [key for key in keys if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if rng.random() < 0.15:
        found["additionalProperties"] = {"type": "integer", "minimum": 0, "maximum": 9}
    return found


def _array(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    least = rng.randrange(3)
    found: dict[str, Any] = {
        "type": "array",
        "minItems": least,
        "maxItems": least + rng.randrange(3),
        "items": _schema(rng, depth - 1, names),
    }
    if rng.random() < 0.2:
        found["prefixItems"] = [_scalar(rng)]
        found["maxItems"] = max(1, found["maxItems"])
    return found


def _any_of(rng: random.Random, depth: int, names: tuple[str, ...]) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth - 1, names) for _ in range(rng.randrange(1, 4))]}


def _scalar(rng: random.Random) -> dict[str, Any]:
    low = rng.randrange(-50, 50)
    least = rng.randrange(3)
    return rng.choice(
        [
            {"type": "string", "minLength": least, "maxLength": least + rng.randrange(8)},
            {"type": "string", "pattern": f"^(?:{random_regex(rng)})$"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1000)},
            {"type": "integer", "exclusiveMinimum": 0, "multipleOf": 5, "maximum": 500},
            {"type": "number", "minimum": 0, "maximum": 1},
            {"type": "boolean"},
            {"type": ["null", "boolean"]},
            {"enum": rng.sample(_LITERALS, rng.randrange(1, 5))},
            {"const": rng.choice(_LITERALS)},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "uuid"},
        ]
    )


def random_regex(rng: random.Random, depth: int = 2) -> str:
    """One that Python's `re` reads in the same way; matches are short."""
    parts = []
    for _ in range(rng.randrange(1, 4)):
        atom = rng.choice(["a", "b", "Z", "7", "_", "é", "[a-f]", "[0-9]", '[^a-z"\\\\\\n]', "-"])
        if depth and rng.random() < 0.4:
            inner = "|".join(random_regex(rng, depth - 1) for _ in range(rng.randrange(1, 4)))
            atom = f"(?:{inner})"
        least = rng.randrange(3)
        suffix = rng.choice(["", "", "?", f"{{{least + 1}}}", f"{{{least},{least + 2}}}"])
        parts.append(atom + suffix)
    return "".join(parts)


def random_forms(rng: random.Random, num_schemas: int, num_regexes: int) -> list[StructuredOutput]:
    forms = [
        StructuredOutput(json=random_schema(rng), disable_any_whitespace=rng.random() < 0.8)
        for _ in range(num_schemas)
    ]
    regexes = []
    while len(regexes) < num_regexes:
        regex = random_regex(rng)
        if re.fullmatch(regex, "") is None:  # else the answer may be empty
            regexes.append(StructuredOutput(regex=regex))
    return [*forms, *regexes]


def check_answer(form: StructuredOutput, answer: Completion) -> bool:
    """Whether it is finished; then it has its form, else it is the beginning of one, cut off."""
    import jsonschema

    if answer.finish_reason != "stop":
        assert answer.finish_reason in ("length", "abort"), answer.finish_reason
        return False
    if form.kind == "regex":
        assert re.fullmatch(form.source, answer.text), (form.source, answer.text)
    else:
        value = json.loads(answer.text)
        schema = json.loads(form.source)
        jsonschema.Draft202012Validator(schema).validate(value)
    return True
