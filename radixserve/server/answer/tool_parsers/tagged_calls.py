"""Tool parsers for calls that are not JSON: of Qwen3-Coder, MiniMax, DeepSeek V3.2 and GLM (tags),
and of Gemma."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from radixserve.server.answer.tool_parsers.base import (
    Call,
    MarkedParser,
    ParsedSpan,
    begins_with_any,
    dump,
    partial_mark_len,
    read_json,
    skip_space,
    unique_members,
)

Schemas = Mapping[str, Mapping[str, Any]]  # parameters by the function's name
_LONGEST_TAG = 512  # characters
_GEMMA_HEAD = re.compile(r"\s*call:([\w.:-]{1,128})\s*(?=\{)")
_BEGUN_GEMMA_HEAD = re.compile(r"\s*(?:c|ca|cal|call|call:[\w.:-]{0,128}\s*)?")
_BARE = re.compile(r"[^,:{}\[\]]+")
_ANY_TYPES = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
_NOT_TEXT = {"type": sorted(_ANY_TYPES - {"string"})}


class Tags(NamedTuple):
    """The tags of a style.

    block, block_end  before the first call and after the last; "" for a style without
    call              the tag that opens a call, with its function in the group `name`
    call_head         the fixed text at its beginning
    call_end          the tag that closes a call
    key               the tags before a value, with its parameter in the group `key`; the group
                      `is_text`, if there is one, tells whether the value is text
    key_head          the fixed text at its beginning
    value_end         the tag that closes a value
    has_lines         a value stands between line breaks, which are not part of it
    """

    block: str
    block_end: str
    call: re.Pattern[str]
    call_head: str
    call_end: str
    key: re.Pattern[str]
    key_head: str
    value_end: str
    has_lines: bool = False


CODER = Tags(
    "<tool_call>",
    "</tool_call>",
    re.compile(r"<function=\s*(?P<name>[\w.:-]{1,128})\s*>"),
    "<function=",
    "</function>",
    re.compile(r"<parameter=\s*(?P<key>[^>\n]{1,256}?)\s*>"),
    "<parameter=",
    "</parameter>",
    has_lines=True,
)
MINIMAX = Tags(
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    re.compile(r'<invoke name="?(?P<name>[\w.:-]{1,128})"?\s*>'),
    "<invoke name=",
    "</invoke>",
    re.compile(r'<parameter name="?(?P<key>[^">\n]{1,256})"?\s*>'),
    "<parameter name=",
    "</parameter>",
)
_DSML = "\uff5cDSML\uff5c"
DEEPSEEK_V32 = Tags(
    f"<{_DSML}function_calls>",
    f"</{_DSML}function_calls>",
    re.compile(f'<{_DSML}invoke name="?(?P<name>[\\w.:-]{{1,128}})"?\\s*>'),
    f"<{_DSML}invoke name=",
    f"</{_DSML}invoke>",
    re.compile(
        f'<{_DSML}parameter name="?(?P<key>[^">\\n]{{1,256}})"?'
        '(?:\\s+string="?(?P<is_text>true|false)"?)?\\s*>'
    ),
    f"<{_DSML}parameter name=",
    f"</{_DSML}parameter>",
)
GLM = Tags(
    "",
    "",
    re.compile(r"<tool_call>\s*(?P<name>[\w.:-]{1,128})\s*(?=<|\Z)"),
    "<tool_call>",
    "</tool_call>",
    re.compile(r"<arg_key>\s*(?P<key>[^<\n]{1,256}?)\s*(?:</arg_key>\s*)?<arg_value>"),
    "<arg_key>",
    "</arg_value>",
)


class TaggedParser(MarkedParser):
    """Qwen3-Coder, MiniMax, DeepSeek V3.2 and GLM: a call between tags, each argument between its
    own.

    - A value's type follows the function's schema: text if the schema allows a string, else JSON.
    - A value may contain tags as text. It ends at its closing tag, if another tag of the call or
      the end follows that. Where the closing tag is missing, it ends at the next tag that opens
      another parameter of the schema or a call of a known function, or at the call's end.
    - A call outside of a block is read only if its function is known.
    """

    def __init__(self, tags: Tags, schemas: Schemas, bare: Sequence[str] = ()) -> None:
        marks = [tags.block, tags.call_head] if tags.block else [tags.call_head]
        closings = [mark for mark in (tags.call_end, tags.block_end) if mark]
        super().__init__(marks, closings, bare)
        self._tags = tags
        self._schemas = schemas
        self._tag_heads = (tags.key_head, *closings, *marks)
        pattern = "|".join(map(re.escape, (tags.value_end, *self._tag_heads)))
        self._value_tags = re.compile(pattern)

    def _open(self, mark: str | None) -> None:
        super()._open(mark)
        self._name: str | None = None  # of the call that is being read
        self._position = 0  # what is before it has been read
        self._arguments: dict[str, Any] = {}
        self._key: re.Match[str] | None = None  # the tag of the value that is being read

    def _read(self, text: str, mark: str, *, is_last: bool) -> ParsedSpan | None:
        no_call = ParsedSpan(len(mark))
        if self._name is None:
            is_call = self._read_head(text, mark, is_last=is_last)
            if not is_call:
                return no_call if is_call is False else None
        while True:
            if self._key is not None:
                end = self._value_end(text, is_last=is_last)
                if end is None:
                    return None
                self._close_value(text, *end)
            self._position = skip_space(text, self._position)
            kind = self._next_tag(text, is_last=is_last)
            if kind is None:
                return None
            if kind != self._tags.key_head:
                return no_call if kind == "" else self._closed(mark)
            key = self._tags.key.match(text, self._position)
            if key is None:
                is_begun = not is_last and len(text) - self._position < _LONGEST_TAG
                return None if is_begun else no_call
            if key["key"] in self._arguments:
                return no_call
            self._key, self._position = key, key.end()

    def _read_head(self, text: str, mark: str, *, is_last: bool) -> bool | None:
        """Read the tag that opens a call. Whether it does; None: more text is needed."""
        tags = self._tags
        if mark not in (tags.block, tags.call_head):  # the name of a function, and a parameter
            self._name = mark.removesuffix(tags.key_head).strip()
            self._position = len(mark) - len(tags.key_head)
            return True
        start = skip_space(text, len(mark)) if mark == tags.block else 0
        tag = text[start : start + _LONGEST_TAG]
        begins = begins_with_any(tag, (tags.call_head,), is_last=is_last)
        if not begins:
            return begins
        call = tags.call.match(text, start)
        if call is None or (call.end() == len(text) and not is_last and text[-1] != ">"):
            is_begun = not is_last and len(text) - start < _LONGEST_TAG
            return None if is_begun else False
        is_known = call["name"] in self._schemas or not tags.block
        if not is_known and mark != tags.block and not self._is_in_block:
            return False
        self._name, self._position = call["name"], call.end()
        return True

    def _next_tag(self, text: str, *, is_last: bool) -> str | None:
        """The tag at the position; "" if there is another text; None: more text is needed. At the
        end of the answer, the call is closed if that is all that is missing."""
        found = next((tag for tag in self._tag_heads if text.startswith(tag, self._position)), "")
        rest = text[self._position : self._position + _LONGEST_TAG]
        if found or rest:
            is_begun = not is_last and any(tag.startswith(rest) for tag in self._tag_heads)
            return None if not found and is_begun else found
        return self._tags.call_end if is_last and not self._tags.block else None

    def _value_end(self, text: str, *, is_last: bool) -> tuple[int, int] | None:
        """Where the value ends, and where the next tag may begin; None: more text is needed."""
        assert self._key is not None
        tags = self._tags
        while True:
            match = self._value_tags.search(text, self._position)
            if match is None:
                marks = (tags.value_end, *self._tag_heads)
                held = 0 if is_last else partial_mark_len(text, marks)
                self._position = max(self._position, len(text) - held)
                return None
            closes: bool | None
            start, after = match.start(), match.start()
            if match[0] == tags.value_end:
                after = match.end()
                rest = text[skip_space(text, after) :][:_LONGEST_TAG]
                is_end = is_last and not rest
                closes = is_end or begins_with_any(rest, self._tag_heads, is_last=is_last)
            elif match[0] == tags.key_head:
                closes = self._opens_parameter(text, start, is_last=is_last)
            elif match[0] in self._closings:
                closes = self._ends_call(text, start, is_last=is_last)
            else:
                closes = self._opens_call(text, start, is_last=is_last)
            if closes is None:
                self._position = start
                return None
            if closes:
                return start, after
            self._position = match.end()

    def _ends_call(self, text: str, start: int, *, is_last: bool) -> bool | None:
        """Whether another call or the end of the answer follows the closing tags at `start`."""
        while True:
            start = skip_space(text, start)
            closing = next((tag for tag in self._closings if text.startswith(tag, start)), "")
            if not closing:
                break
            start += len(closing)
        rest = text[start : start + _LONGEST_TAG]
        if is_last and not rest:
            return True
        return begins_with_any(rest, (*self._closings, *self._openings), is_last=is_last)

    def _opens_parameter(self, text: str, start: int, *, is_last: bool) -> bool | None:
        """Whether the tag at `start` opens another parameter of the function."""
        assert self._key is not None
        key = self._tags.key.match(text, start)
        if key is None:
            return None if not is_last and len(text) - start < _LONGEST_TAG else False
        known = self._schemas.get(self._name or "", {}).get("properties")
        is_known = key["key"] in known if isinstance(known, Mapping) and known else True
        if key["key"] == self._key["key"]:  # the tag may be doubled
            return not text[self._key.end() : start].strip()
        return is_known and key["key"] not in self._arguments

    def _opens_call(self, text: str, start: int, *, is_last: bool) -> bool | None:
        """Whether the tag at `start`, of a block or a call, opens a call of a known function."""
        tags = self._tags
        if tags.block and text.startswith(tags.block, start):
            start = skip_space(text, start + len(tags.block))
        tag = text[start : start + _LONGEST_TAG]
        begins = begins_with_any(tag, (tags.call_head,), is_last=is_last)
        if not begins:
            return begins
        call = tags.call.match(text, start)
        if call is None or (call.end() == len(text) and not is_last and text[-1] != ">"):
            return None if not is_last and len(text) - start < _LONGEST_TAG else False
        return call["name"] in self._schemas

    def _close_value(self, text: str, end: int, after: int) -> None:
        key, self._key, self._position = self._key, None, after
        assert key is not None
        value = text[key.end() : end]
        if after == end and not value.strip() and self._is_doubled(text, key, end):
            return
        if self._tags.has_lines:
            value = value.removeprefix("\n").removesuffix("\n")
        elif after == end:
            value = value.rstrip()  # the closing tag is missing
        schema = self._schemas.get(self._name or "", {})
        is_text = key.groupdict().get("is_text")
        if is_text is None:
            typed = typed_value(value, _property(schema, key["key"]), schema)
        else:
            typed = value if is_text == "true" else typed_value(value, _NOT_TEXT, schema)
        self._arguments[key["key"]] = typed

    def _is_doubled(self, text: str, key: re.Match[str], start: int) -> bool:
        other = self._tags.key.match(text, start)
        return other is not None and other["key"] == key["key"]

    def _closed(self, mark: str) -> ParsedSpan:
        """The call, which ends at the position. A closing tag there is removed later."""
        assert self._name is not None
        try:
            call = Call(self._name, dump(self._arguments))
        except ValueError:  # a number that is infinite
            return ParsedSpan(len(mark))
        self._is_in_block = self._is_in_block or bool(mark and mark == self._tags.block)
        return ParsedSpan(self._position, (call,))


def glm_bare(names: Collection[str]) -> list[str]:
    """The openings of GLM's calls of known functions without the mark."""
    return [f"{name}{space}{GLM.key_head}" for name in names for space in ("", "\n")]


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

    def __init__(self, marks: GemmaMarks, names: Collection[str]) -> None:
        super().__init__((marks.opening,), (marks.closing,), [f"call:{name}{{" for name in names])
        self._marks = marks

    def _read(self, text: str, mark: str, *, is_last: bool) -> ParsedSpan | None:  # noqa: ARG002
        start = len(mark) if mark == self._marks.opening else 0
        head = _GEMMA_HEAD.match(text, start)
        if head is None:
            is_begun = _BEGUN_GEMMA_HEAD.fullmatch(text, start) is not None
            return None if is_begun else ParsedSpan(len(mark))
        end = self._find_end(text, head.end(), (self._marks.quote,))
        if end is None:
            return None
        try:
            if self._is_broken:
                return ParsedSpan(len(mark))
            arguments = _GemmaReader(text[head.end() : end], self._marks.quote).read()
            return ParsedSpan(end, (Call(head[1], dump(arguments)),))
        except (ValueError, RecursionError):
            return ParsedSpan(len(mark))


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
            return unique_members(self._items("}", self._member))
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
