"""Tool parsers for calls whose arguments are a JSON object.

Hermes and Qwen, Llama 3, Mistral, Granite, DeepSeek, and Kimi. `tool_styles.py` chooses among them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from radixserve.server.answer.tool_parsers.base import (
    Call,
    MarkedParser,
    ParsedSpan,
    call_of,
    read_call,
    read_json,
)

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
MISTRAL_OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
GRANITE_OPEN = "<|tool_call|>"
_LONGEST_HEAD = 512  # characters between a mark and its JSON, and after it
_MISTRAL_HEAD = re.compile(
    r"\s*([\w.:-]{1,128})\s*(?:\[CALL_ID\]\s*([\w-]{1,64})\s*)?(?:\[ARGS\]\s*)?"
)
_BEGUN_HEAD = re.compile(r"\s*[\w.:\s\[\]-]{0,256}")


class HermesParser(MarkedParser):
    """Hermes and Qwen models: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.

    The closing tag may be missing at the end of the text: some models stop after the object."""

    mark = HERMES_OPEN

    def _read(self, inner: str, *, has_mark: bool, is_last: bool) -> ParsedSpan | None:  # noqa: ARG002
        rest = inner.lstrip()
        if not rest:
            return None
        if rest[0] != "{":
            return ParsedSpan(len(inner) - len(rest))
        end = self._find_end(inner, len(inner) - len(rest))
        if end is None:
            return None
        rest = inner[end:].lstrip()
        size = len(inner) - len(rest)
        if rest.startswith(HERMES_CLOSE):
            size += len(HERMES_CLOSE)
        elif rest and not HERMES_CLOSE.startswith(rest):
            return ParsedSpan(end)
        elif not is_last:
            return None
        elif rest:
            return ParsedSpan(len(inner))
        call = read_call(inner[:end])
        return ParsedSpan(size, () if call is None else (call,))


class Llama3Parser(MarkedParser):
    """Llama 3: `{"name": ..., "parameters": {...}}`, alone or after `<|python_tag|>`.

    An object without the tag is a call if it names one of the tools and stands at the start of the
    answer, or after another call and a semicolon. Python code after the tag is text."""

    mark = LLAMA_TAG
    is_optional = True

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names

    def _read(self, inner: str, *, has_mark: bool, is_last: bool) -> ParsedSpan | None:  # noqa: ARG002
        rest = inner.lstrip(" \t\r\n;")
        if not rest:
            return None
        start = len(inner) - len(rest)
        if rest[0] != "{":
            return ParsedSpan(start)
        end = self._find_end(inner, start)
        if end is None:
            return None
        call = read_call(inner[start:end])
        is_call = call is not None and (has_mark or call.name in self._names)
        return ParsedSpan(end, (call,) if call is not None and is_call else ())


class MistralParser(MarkedParser):
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and the newer
    `[TOOL_CALLS]name[ARGS]{...}` with a mark for each call. A list is read as calls only if all of
    its items are calls."""

    mark = MISTRAL_OPEN

    def _read(self, inner: str, *, has_mark: bool, is_last: bool) -> ParsedSpan | None:  # noqa: ARG002
        rest = inner.lstrip()
        if rest.startswith("["):
            end = self._find_end(inner, len(inner) - len(rest))
            return None if end is None else ParsedSpan(end, _items(inner[:end]))
        brace = inner.find("{")
        if brace < 0:
            is_begun = _BEGUN_HEAD.fullmatch(inner) is not None
            return None if is_begun else ParsedSpan(len(inner) - len(rest))
        head = _MISTRAL_HEAD.fullmatch(inner, 0, brace)
        if head is None:
            return ParsedSpan(brace)
        end = self._find_end(inner, brace)
        return None if end is None else ParsedSpan(end, _call(head[1], head[2], inner[brace:end]))


class GraniteParser(MarkedParser):
    """Granite: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`."""

    mark = GRANITE_OPEN

    def _read(self, inner: str, *, has_mark: bool, is_last: bool) -> ParsedSpan | None:  # noqa: ARG002
        rest = inner.lstrip()
        if not rest:
            return None
        start = len(inner) - len(rest)
        if rest[0] != "[":
            return ParsedSpan(start)
        end = self._find_end(inner, start)
        return None if end is None else ParsedSpan(end, _items(inner[:end]))


class CallFrame(NamedTuple):
    """The texts around the JSON arguments of one call."""

    opening: str
    head: re.Pattern[str]  # between `opening` and the JSON, with the group `name`, maybe also `id`
    closing: str


DEEPSEEK = CallFrame(
    "<\uff5ctool\u2581call\u2581begin\uff5c>",
    re.compile(
        "\\s*(?:function<\uff5ctool\u2581sep\uff5c>)?\\s*(?P<name>[\\w.:-]{1,128})\\s*"
        "(?:<\uff5ctool\u2581sep\uff5c>\\s*|```json\\s*)"
    ),
    "<\uff5ctool\u2581call\u2581end\uff5c>",
)
KIMI = CallFrame(
    "<|tool_call_begin|>",
    re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]{1,128}?)(?::\d{1,4})?)\s*"
        r"<\|tool_call_argument_begin\|>\s*"
    ),
    "<|tool_call_end|>",
)


class FramedParser(MarkedParser):
    """DeepSeek and Kimi: the name, then the arguments as JSON, each call between its own marks."""

    def __init__(self, frame: CallFrame) -> None:
        self.mark = frame.opening
        self._frame = frame
        super().__init__()

    def _read(self, inner: str, *, has_mark: bool, is_last: bool) -> ParsedSpan | None:  # noqa: ARG002
        brace = inner.find("{")
        if brace < 0:
            return None if len(inner) <= _LONGEST_HEAD else ParsedSpan(0)
        head = self._frame.head.fullmatch(inner, 0, brace)
        if head is None:
            return ParsedSpan(0)
        end = self._find_end(inner, brace)
        if end is None:
            return None
        closing = inner.find(self._frame.closing, end, end + _LONGEST_HEAD)
        if closing < 0 and not is_last and len(inner) < end + _LONGEST_HEAD:
            return None
        call_id = head["id"] if "id" in self._frame.head.groupindex else None
        calls = _call(head["name"], call_id, inner[brace:end])
        return ParsedSpan(end if closing < 0 else closing + len(self._frame.closing), calls)


def _items(text: str) -> tuple[Call, ...]:
    """The calls in a JSON list; () unless all items are calls."""
    try:
        calls_or_none = [call_of(item) for item in read_json(text)]
    except ValueError:
        return ()
    calls = tuple(call for call in calls_or_none if call is not None)
    return calls if len(calls) == len(calls_or_none) else ()


def _call(name: str, call_id: str | None, arguments: str) -> tuple[Call, ...]:
    try:
        call = call_from(name, call_id, read_json(arguments))
    except ValueError:
        return ()
    return () if call is None else (call,)


def call_from(name: str, call_id: str | None, arguments: object) -> Call | None:
    """The call with this name; None unless its arguments are an object."""
    return call_of({"name": name, "arguments": arguments, "id": call_id})
