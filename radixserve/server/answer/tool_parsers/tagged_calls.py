"""Tool parsers for calls that are not JSON: of Qwen3-Coder and GLM (tags), and of Gemma."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from radixserve.server.answer.tool_parsers.base import (
    Call,
    MarkedParser,
    ParsedSpan,
    dump,
    read_json,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Schemas = Mapping[str, Mapping[str, Any]]  # parameters by the function's name
_FUNCTION = re.compile(r"\s*<function=([\w.:-]{1,128})>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]{1,256})>(.*?)</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)
_GLM_NAME = re.compile(r"\s*([\w.:-]{1,128})\s*(<arg_key>.*)?", re.DOTALL)
_GLM_ARGUMENT = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|\Z))", re.DOTALL
)
_GEMMA_CALL = re.compile(r"\s*call:([\w.:-]{1,128})\s*(\{.*\})\s*", re.DOTALL)
_BARE = re.compile(r"[^,:{}\[\]]+")
_ANY_TYPES = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))


class TaggedParser(MarkedParser):
    """Qwen3-Coder and newer, and GLM: a call between tags, each argument between its own tags.

    A value's type follows the function's schema: text if the schema allows a string, else JSON.
    """

    mark = OPEN

    def __init__(self, read: Callable[[str, Schemas], Call | None], schemas: Schemas) -> None:
        """`read`: parses the text between the tags; `read_function` or `read_glm`."""
        super().__init__()
        self._read_call = read
        self._schemas = schemas

    def _read(self, inner: str, *, has_mark: bool, is_last: bool) -> ParsedSpan | None:  # noqa: ARG002
        end = self._find(inner, CLOSE)
        if end < 0:
            call = self._read_call(inner, self._schemas) if is_last else None
            return None if call is None else ParsedSpan(len(inner), (call,))
        call = self._read_call(inner[:end], self._schemas)
        return ParsedSpan(0) if call is None else ParsedSpan(end + len(CLOSE), (call,))


def read_function(text: str, schemas: Schemas) -> Call | None:
    """Qwen3-Coder's call: `<function=name><parameter=key>value</parameter>...</function>`, with
    line breaks between its parts. None for any other text."""
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return None
    return _call(function[1], function[2], _PARAMETER, schemas)


def read_glm(text: str, schemas: Schemas) -> Call | None:
    """GLM's call: `name<arg_key>key</arg_key><arg_value>value</arg_value>...`, with line breaks
    between its parts. None for any other text."""
    function = _GLM_NAME.fullmatch(text)
    if function is None:
        return None
    return _call(function[1], function[2] or "", _GLM_ARGUMENT, schemas)


def _call(name: str, body: str, argument: re.Pattern[str], schemas: Schemas) -> Call | None:
    schema = schemas.get(name, {})
    arguments: dict[str, Any] = {}
    end = 0
    for match in argument.finditer(body):
        if match.start() != end or match[1].strip() in arguments:
            return None
        key, end = match[1].strip(), match.end()
        value = match[2]
        if argument is _PARAMETER:  # its values are between line breaks
            value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = typed_value(value, _property(schema, key), schema)
    if body[end:].strip():
        return None
    try:
        return Call(name, dump(arguments))
    except ValueError:  # a number that is infinite
        return None


def typed_value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """The value of a text by its schema: the JSON value if the schema allows its type, else the
    text itself. `root`: the schema with the definitions that `schema` may refer to."""
    types = allowed_types(schema, root)
    if types == {"string"}:
        return text
    try:
        value = read_json({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text
    if isinstance(value, str):
        return value if "string" not in types else text
    kind = _type_of(value)
    is_allowed = kind in types or (kind == "integer" and "number" in types)
    return text if "string" in types and (not is_allowed or types == _ANY_TYPES) else value


def allowed_types(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; all of them if it does not name any. `root`: as for
    `typed_value`."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > 8:
        return _ANY_TYPES
    kinds = schema.get("type")
    if isinstance(kinds, str | list):
        return frozenset([kinds] if isinstance(kinds, str) else kinds)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return frozenset(map(_type_of, values))
    for combination in ("anyOf", "oneOf"):
        if isinstance(schema.get(combination), list):
            each = (allowed_types(option, root, depth + 1) for option in schema[combination])
            return frozenset().union(*each)
    return _ANY_TYPES


class GemmaMarks(NamedTuple):
    """The texts around a call and around each string in it."""

    opening: str
    closing: str
    quote: str


FUNCTION_GEMMA = GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4 = GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>')


class GemmaParser(MarkedParser):
    """Gemma: `call:name{key:value,...}` between marks. Strings are between marks, too; keys are
    not."""

    def __init__(self, marks: GemmaMarks) -> None:
        self.mark = marks.opening
        self._marks = marks
        super().__init__()

    def _read(self, inner: str, *, has_mark: bool, is_last: bool) -> ParsedSpan | None:  # noqa: ARG002
        end = self._find(inner, self._marks.closing)
        while end >= 0 and inner.count(self._marks.quote, 0, end) % 2:  # inside a string
            self._searched = end + 1
            end = self._find(inner, self._marks.closing)
        if end < 0:
            call = self._call(inner) if is_last else None
            return None if call is None else ParsedSpan(len(inner), (call,))
        call = self._call(inner[:end])
        return (
            ParsedSpan(0) if call is None else ParsedSpan(end + len(self._marks.closing), (call,))
        )

    def _call(self, text: str) -> Call | None:
        match = _GEMMA_CALL.fullmatch(text)
        if match is None:
            return None
        try:
            arguments = _GemmaReader(match[2], self._marks.quote).read()
            return Call(match[1], dump(arguments))
        except (ValueError, RecursionError):
            return None


class _GemmaReader:
    """Reads one value of Gemma's notation."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._position = 0

    def read(self) -> Any:
        """The value of the whole text. Raises ValueError if it is not a value."""
        value = self._value()
        if self._text[self._position :].strip():
            raise ValueError("more follows")
        return value

    def _value(self) -> Any:
        if self._takes(self._quote):
            end = self._text.index(self._quote, self._position)
            value, self._position = self._text[self._position : end], end + len(self._quote)
            return value
        if self._takes("{"):
            return dict(self._items("}", self._member))
        if self._takes("["):
            return self._items("]", self._value)
        return read_json(self._bare())

    def _member(self) -> tuple[str, Any]:
        key = self._value() if self._text.startswith(self._quote, self._position) else self._bare()
        if not self._takes(":"):
            raise ValueError("a key without a value")
        return key, self._value()

    def _items(self, closing: str, read: Callable[[], Any]) -> list[Any]:
        items: list[Any] = []
        while not self._takes(closing):
            if items and not self._takes(","):
                raise ValueError("a comma is missing")
            items.append(read())
        return items

    def _bare(self) -> str:
        match = _BARE.match(self._text, self._position)
        if match is None:
            raise ValueError("a value is missing")
        self._position = match.end()
        return match[0].strip()

    def _takes(self, token: str) -> bool:
        while self._text[self._position : self._position + 1].isspace():
            self._position += 1
        is_next = self._text.startswith(token, self._position)
        self._position += len(token) * is_next
        return is_next


def _property(schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """`schema`, or the schema that it refers to within `root`; None if that does not exist."""
    for _ in range(8):
        path = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(path, str):
            return schema
        schema = root
        for step in path.removeprefix("#").strip("/").split("/"):
            schema = schema.get(step) if isinstance(schema, Mapping) else None
    return None


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "integer", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def as_bare(value: Any) -> str:
    """A value of an enum as models write it between tags: a string as it is, else JSON."""
    return value if isinstance(value, str) else json.dumps(value)
