r"""Rewrites JSON schemas so that llguidance 1.9 reads them correctly, or refuses them by name.

- Objects are closed, see closed_objects.py.
- A `format` becomes a pattern, see formats.py, unless llguidance checks it. An unknown one is left
  out, as JSON Schema says; so is `x-guidance`, the options of llguidance.
- `uniqueItems` is enforced if the items have few values: their arrays are listed. A grammar cannot
  enforce it for other items; it is refused, or left out with strict=False.
- Counts such as `maxItems: 2.0` are whole numbers.
- Numbers are read as float64: bounds beyond 2^53 are moved to the next whole number inside that a
  float64 has; constants beyond 2^53 are refused.
- Keys that patterns or additionalProperties allow may appear twice, so `minProperties` above the
  number of required keys is refused beside them.
- A pattern of patternProperties that allows no key but named properties becomes a part of these:
  llguidance fails on it in the middle of an answer.
- `propertyNames` beside additionalProperties becomes properties or a pattern of patternProperties.
- A character class with control characters accepts every JSON escape, even \" and \\ if the class
  excludes these: "[^\"]" accepts a string of one quote. Such a class loses its control characters
  here.
"""

from __future__ import annotations

import itertools
import math
import re
import re._constants as sre
import re._parser as sre_parser
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from radixserve.errors import InvalidRequest
from radixserve.grammar.closed_objects import closed
from radixserve.grammar.formats import CHECKED, MAX_LENGTHS, PATTERNS

_CONTROL = "\x01"
_NO_CONTROLS = r"&&[^\x00-\x1f]"
_PROPERTY = re.compile(r"\\p(?:\{[^C^][^}]*\}|[^C{])")  # of letters, digits and the like
_UNSURE = re.compile(r"\\[pP]|\\[xu]\{|&&|--|~~|\[:|.\[")  # Python's re reads it otherwise
_VALUES = ("const", "enum", "default", "examples")  # keywords whose values are not schemas
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = frozenset(
    """
    minItems maxItems minLength maxLength minProperties maxProperties minContains maxContains
    """.split()
)
_NOTES = frozenset(  # keywords that do not constrain a value
    """
    title description default examples deprecated readOnly writeOnly
    $comment $schema $id $defs definitions
    """.split()
)
_MOST_ARRAYS = 2_000  # most arrays of unique items that are listed
_MOST_VALUES = 64  # most values of such an item
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
_EXACT = 2**53  # whole numbers up to here are float64
_MOST = 2**63 - 1024  # the largest whole number of 64 bits that is a float64
_MOST_KEYS = 64  # most keys of a pattern that are listed


def narrowed(
    schema: Any, *, keeps_options: bool = False, strict: bool = False, closes: bool = True
) -> Any:
    """Returns a copy of a schema, rewritten as above. `keeps_options`: keep its `x-guidance`;
    `closes`: close its objects. Raises InvalidRequest, with `strict` also for `uniqueItems` that
    cannot be enforced. O(size of the result)."""
    if closes:
        schema = closed(schema)
    return _narrowed(schema, schema, keeps_options, strict)


def _narrowed(schema: Any, root: Any, keeps_options: bool, strict: bool) -> Any:
    if isinstance(schema, list):
        return [_narrowed(item, root, keeps_options, strict) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    copy: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, Mapping):
            copy[name] = {
                narrowed_pattern(key) if name == "patternProperties" else key: _narrowed(
                    member, root, keeps_options, strict
                )
                for key, member in value.items()
            }
        elif name in ("const", "enum"):
            _check_numbers(name, value)
            copy[name] = value
        elif name == "pattern" and isinstance(value, str):
            copy[name] = narrowed_pattern(value)
        elif name in _BOUNDS and isinstance(value, int):
            copy[name] = _bound(value, _BOUNDS[name])
        elif name in _COUNTS and isinstance(value, float) and value.is_integer():
            copy[name] = int(value)
        elif name in _VALUES or name == "uniqueItems":
            copy[name] = value
        elif not _is_left_out(name, value, keeps_options):
            copy[name] = _narrowed(value, root, keeps_options, strict)
    return _with_keys(_with_unique_items(_with_format(copy), root, strict))


def _is_left_out(name: str, value: Any, keeps_options: bool) -> bool:
    if name == "format":
        return isinstance(value, str) and value not in PATTERNS and value not in CHECKED
    return (name == "propertyNames" and value is True) or (
        name == "x-guidance" and not keeps_options
    )


def _with_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with the pattern and the length that its `format` means."""
    name = schema.get("format")
    if not isinstance(name, str) or name not in PATTERNS:
        return schema
    del schema["format"]
    if "pattern" in schema:
        branches = schema.get("allOf", [])
        schema["allOf"] = [*branches, {"pattern": PATTERNS[name]}]
    else:
        schema["pattern"] = PATTERNS[name]
    if name in MAX_LENGTHS:
        most, given = MAX_LENGTHS[name], schema.get("maxLength")
        schema["maxLength"] = min(most, given) if isinstance(given, int) else most
    return schema


def _with_unique_items(schema: dict[str, Any], root: Any, strict: bool) -> dict[str, Any]:
    """Returns the schema without `uniqueItems`, with a list of the allowed arrays if they are
    few."""
    if schema.pop("uniqueItems", None) is not True or _takes_no_pair(schema):
        return schema
    arrays = _unique_arrays(schema, root)
    if arrays is None and strict:
        raise InvalidRequest(
            "uniqueItems cannot be enforced for items of so many values: leave it out, or set "
            "strict to false to accept arrays that repeat an item"
        )
    if arrays is None:
        return schema
    notes = {name: value for name, value in schema.items() if name in _NOTES}
    return {**notes, "enum": arrays}


def _takes_no_pair(schema: Mapping[str, Any]) -> bool:
    """Whether the schema allows no array of two or more items."""
    most, kind = schema.get("maxItems"), schema.get("type", "array")
    is_array = kind == "array" or (isinstance(kind, list) and "array" in kind)
    return not is_array or (isinstance(most, int) and most <= 1)


def _unique_arrays(schema: Mapping[str, Any], root: Any) -> list[list[Any]] | None:
    """Returns all arrays without a repeated item; None if they are too many or not known."""
    known = {"type", "items", "minItems", "maxItems"} | _NOTES
    values = None if set(schema) - known else _values_of(schema.get("items"), root)
    if values is None or schema.get("type") != "array":
        return None
    most = min(len(values), schema.get("maxItems", len(values)))
    lengths = range(schema.get("minItems", 0), most + 1)
    if not lengths or sum(math.perm(len(values), length) for length in lengths) > _MOST_ARRAYS:
        return None
    return [list(items) for length in lengths for items in itertools.permutations(values, length)]


def _values_of(schema: Any, root: Any) -> list[Any] | None:
    """Returns all values of an item (texts, integers and booleans); None if they are too many or
    not known."""
    if not isinstance(schema, Mapping):
        return None
    keywords = {name: value for name, value in schema.items() if name not in _NOTES}
    reference = keywords.get("$ref")
    if isinstance(reference, str) and len(keywords) == 1:
        place, _, name = reference.rpartition("/")
        members = root.get(place.removeprefix("#/")) if isinstance(root, Mapping) else None
        known = members.get(name) if isinstance(members, Mapping) else None
        is_reference = isinstance(known, Mapping) and "$ref" in known
        return None if is_reference else _values_of(known, root)
    kind = keywords.pop("type", None)
    if kind == "boolean" and not keywords:
        return [False, True]
    if kind == "integer" and set(keywords) == {"minimum", "maximum"}:
        low, high = keywords["minimum"], keywords["maximum"]
        if isinstance(low, int) and isinstance(high, int) and high - low < _MOST_VALUES:
            return list(range(low, high + 1))
        return None
    given = [keywords["const"]] if set(keywords) == {"const"} else keywords.get("enum")
    if not isinstance(given, list) or not set(keywords) <= {"const", "enum"}:
        return None
    kinds = {"string": str, "integer": int, "boolean": bool, None: str | int | bool}
    if kind not in kinds or not all(isinstance(value, kinds[kind]) for value in given):
        return None
    if kind == "integer" and any(isinstance(value, bool) for value in given):
        return None
    return list({(type(value), value): value for value in given}.values())


def _check_numbers(keyword: str, value: Any) -> None:
    """Raise InvalidRequest for an integer beyond 2^53 anywhere in a constant."""
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping):
            pending += node.values()
        elif isinstance(node, list):
            pending += node
        elif isinstance(node, int) and abs(node) > _EXACT:
            raise InvalidRequest(f"{keyword} has {node}, a whole number beyond 2^53")


def _bound(value: int, direction: int) -> int | float:
    """Returns a bound up to 2^53 unchanged, else the next float64 in this direction, within 64
    bits."""
    if abs(value) <= _EXACT:
        return value
    if value * direction < -_MOST:
        return -_MOST * direction
    try:
        nearest = float(value)
    except OverflowError:
        raise InvalidRequest(f"a bound of {len(str(abs(value)))} digits is too large") from None
    if nearest * direction < value * direction:
        nearest = math.nextafter(nearest, math.inf * direction)
    return int(nearest)


def _with_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of an object, with its keys as llguidance can enforce them."""
    names = schema.get("propertyNames")
    others = schema.get("additionalProperties", True)
    is_plain = "properties" not in schema and "patternProperties" not in schema
    if isinstance(names, Mapping) and is_plain:
        keys = names.get("enum")
        pattern = _pattern_of_names(names)
        if keys is not None and all(isinstance(key, str) for key in keys):
            schema = {**schema, "properties": dict.fromkeys(keys, others)}
        elif pattern is not None:
            schema = {**schema, "patternProperties": {pattern: others}}
        if "properties" in schema or "patternProperties" in schema:
            schema["additionalProperties"] = False
            del schema["propertyNames"]
    patterns, properties = schema.get("patternProperties"), schema.get("properties")
    if isinstance(patterns, Mapping) and isinstance(properties, Mapping):
        schema = _without_covered_patterns(schema, patterns, properties)
    least = schema.get("minProperties")
    has_others = schema.get("patternProperties") or schema.get("additionalProperties", True)
    if isinstance(least, int) and least > max(1, len(schema.get("required", ()))) and has_others:
        raise InvalidRequest(
            f"minProperties {least} cannot be enforced with patternProperties and "
            "additionalProperties, since keys may appear twice: name the properties"
        )
    return schema


def _pattern_of_names(names: Mapping[str, Any]) -> str | None:
    """Returns the pattern that a schema of `propertyNames` means; None if it means no pattern."""
    rest = set(names) - {"type", "title", "description", "pattern", "minLength", "maxLength"}
    if rest or not {"pattern", "minLength", "maxLength"} & set(names):
        return None
    if "pattern" in names:
        return None if {"minLength", "maxLength"} & set(names) else str(names["pattern"])
    return f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$"


def _without_covered_patterns(
    schema: dict[str, Any], patterns: Mapping[str, Any], properties: Mapping[str, Any]
) -> dict[str, Any]:
    kept, named = dict(patterns), dict(properties)
    for pattern, member in patterns.items():
        keys = _language(pattern)
        if keys is None or not keys <= named.keys():
            continue
        del kept[pattern]
        for key in keys:
            named[key] = _both(named[key], member)
    return {**schema, "properties": named, "patternProperties": kept}


def _both(schema: Any, other: Any) -> Any:
    if schema is True or other is True or other == {}:
        return other if schema is True else schema
    return {"allOf": [schema, other]}


def _language(pattern: str) -> set[str] | None:
    """Returns all texts that a regular expression matches as a whole; None if they are too many or
    not known."""
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    try:
        parsed = sre_parser.parse(pattern[1:-1])
        texts = list(itertools.islice(_texts(list(parsed)), _MOST_KEYS + 1))
    except (re.error, ValueError, RecursionError):
        return None
    return set(texts) if len(texts) <= _MOST_KEYS else None


def _texts(nodes: Sequence[Any]) -> Iterator[str]:
    """Yields the texts of a parsed expression. Raises ValueError for unsupported parts."""
    if not nodes:
        yield ""
        return
    (kind, value), rest = nodes[0], nodes[1:]
    for first in _texts_of(kind, value):
        for more in _texts(rest):
            yield first + more


def _texts_of(kind: Any, value: Any) -> Iterator[str]:
    if kind is sre.LITERAL:
        yield chr(value)
    elif kind is sre.IN:
        for item, bounds in value:
            if item is sre.LITERAL:
                yield chr(bounds)
            elif item is sre.RANGE:
                yield from map(chr, range(bounds[0], bounds[1] + 1))
            else:
                raise ValueError("a class")
    elif kind is sre.BRANCH:
        for branch in value[1]:
            yield from _texts(list(branch))
    elif kind is sre.SUBPATTERN:
        yield from _texts(list(value[-1]))
    elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT) and value[1] <= _MOST_KEYS:
        least, most, inner = value
        for count in range(least, most + 1):
            yield from _texts(list(inner) * count)
    else:
        raise ValueError("not finite, or not known")


def narrowed_pattern(pattern: str) -> str:
    """Returns the expression with its character classes rewritten as above."""
    return "".join(
        f"[{part}{_NO_CONTROLS}]" if is_class and _is_read_too_widely(part) else part
        for part, is_class in _parts(pattern)
    )


def _parts(pattern: str) -> Iterator[tuple[str, bool]]:
    """Yields the expression in pieces, and whether each is a character class: a bracketed one, or
    an escaped letter."""
    position = 0
    while position < len(pattern):
        begin, is_class = position, False
        position += 1
        if pattern[begin] == "\\":
            letter = pattern[position : position + 1]
            position += 1
            is_class = letter in ("D", "S", "W", "p", "P")
            if letter in ("p", "P"):
                end = (
                    pattern.find("}", position)
                    if pattern[position : position + 1] == "{"
                    else position
                )
                position = len(pattern) if end < 0 else end + 1
        elif pattern[begin] == "[":
            position, is_class = _end_of_class(pattern, begin), True
        yield pattern[begin:position], is_class


def _end_of_class(pattern: str, position: int) -> int:
    """Returns the position after the bracket that closes the one at `position`."""
    depth = 0
    while position < len(pattern):
        if pattern[position] == "\\":
            position += 1
        elif pattern[position] == "[":
            depth += 1
            position += pattern[position + 1 : position + 2] == "^"
            position += pattern[position + 1 : position + 2] == "]"  # a first one stands for itself
        elif pattern[position] == "]":
            depth -= 1
            if not depth:
                return position + 1
        position += 1
    return position


def _is_read_too_widely(character_class: str) -> bool:
    """Whether a class has control characters, but not both the quote and the backslash."""
    if not character_class.startswith("[^"):
        character_class = _PROPERTY.sub("", character_class)
        if character_class in ("", "[]"):
            return False
    if _UNSURE.search(character_class):
        return True
    try:
        compiled = re.compile(character_class, re.DOTALL)
    except re.error:  # llguidance's error names the problem
        return False
    takes = (compiled.fullmatch(character) is not None for character in (_CONTROL, '"', "\\"))
    has_controls, has_quote, has_backslash = takes
    return has_controls and not (has_quote and has_backslash)
