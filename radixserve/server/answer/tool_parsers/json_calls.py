"""Tool parsers for calls whose arguments are a JSON object.

Hermes and Qwen, Llama 3, Mistral, Granite, Command R, Nemotron, Hunyuan, DeepSeek, and Kimi.
`tool_styles.py` chooses among them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from radixserve.server.answer.tool_parsers.base import (
    Call,
    MarkedParser,
    ParsedSpan,
    begins_with_any,
    call_of,
    read_json,
    skip_space,
)

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
LLAMA_TAG = "<|python_tag|>"
MISTRAL_OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
GRANITE_OPEN = "<|tool_call|>"
ACTION_OPEN, ACTION_CLOSE = "<|START_ACTION|>", "<|END_ACTION|>"
COMMAND_R_OPEN = ("Action: ```json", "Action:\n```json", "Action:```json")
NEMOTRON_OPEN, NEMOTRON_CLOSE = "<TOOLCALL>", "</TOOLCALL>"
HUNYUAN_OPEN, HUNYUAN_CLOSE = "<tool_calls>", "</tool_calls>"
_LONGEST_HEAD = 512  # characters between a mark and its JSON
_MISTRAL_HEAD = re.compile(
    r"\s*([\w.:-]{1,128})\s*(?:\[CALL_ID\]\s*([\w-]{1,64})\s*)?(?:\[ARGS\]\s*)?"
)
_BEGUN_HEAD = re.compile(r"\s*[\w.:\s\[\]-]{0,256}")


class JsonParser(MarkedParser):
    """A JSON object of a call, or a list of them, after a mark: `<tool_call>{"name": ...,
    "arguments": {...}}</tool_call>`. A list is read as calls only if all of its items are calls."""

    def __init__(self, openings: Sequence[str], closing: str = "", *, is_closed: bool) -> None:
        """`is_closed`: a call counts only if its closing mark, another call, or the end of the
        text follows."""
        super().__init__(openings, (closing,) if closing else ())
        self._is_closed = is_closed

    def _read(self, text: str, mark: str, *, is_last: bool) -> ParsedSpan | None:
        start = skip_space(text, len(mark))
        if start == len(text):
            return None
        if text[start] not in "[{":
            return ParsedSpan(start)
        end = self._find_end(text, start)
        if end is None:
            return None
        calls = () if self._is_broken else read_calls(text[start:end])
        rest = text[skip_space(text, end) :]
        if calls and self._is_closed and (rest or not is_last):
            marks = (*self._closings, *self._openings)
            is_closed = begins_with_any(rest, marks, is_last=is_last)
            if is_closed is None:
                return None
            if not is_closed:
                return ParsedSpan(end)
        return ParsedSpan(end, calls)


class Llama3Parser(MarkedParser):
    """Llama 3: `{"name": ..., "parameters": {...}}`, alone or after `<|python_tag|>`.

    An object without the tag is a call if it names one of the tools and stands at the start of the
    answer, or after another call and a semicolon. Python code after the tag is text."""

    starts = True

    def __init__(self, names: Collection[str]) -> None:
        super().__init__((LLAMA_TAG,), (";",))
        self._names = names

    def _continues(self) -> bool:
        return True

    def _read(self, text: str, mark: str, *, is_last: bool) -> ParsedSpan | None:  # noqa: ARG002
        start = skip_space(text, len(mark))
        if start == len(text):
            return None
        if text[start] != "{":
            return ParsedSpan(start)
        end = self._find_end(text, start)
        if end is None:
            return None
        calls = () if self._is_broken else read_calls(text[start:end])
        is_call = mark or all(call.name in self._names for call in calls)
        return ParsedSpan(end, calls if is_call else ())


class MistralParser(MarkedParser):
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and the newer
    `[TOOL_CALLS]name[ARGS]{...}` with a mark for each call. A list is read as calls only if all of
    its items are calls."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__((MISTRAL_OPEN,), bare=[name + ARGS for name in names])

    def _read(self, text: str, mark: str, *, is_last: bool) -> ParsedSpan | None:  # noqa: ARG002
        head_start = len(mark) if mark == MISTRAL_OPEN else 0
        start = skip_space(text, head_start)
        if text.startswith("[", start) and head_start:
            end = self._find_end(text, start)
            if end is None:
                return None
            return ParsedSpan(end, () if self._is_broken else read_calls(text[start:end]))
        brace = text.find("{", start)
        if brace < 0:
            is_begun = _BEGUN_HEAD.fullmatch(text, head_start) is not None
            return None if is_begun else ParsedSpan(max(start, len(mark)))
        head = _MISTRAL_HEAD.fullmatch(text, head_start, brace)
        if head is None:
            return ParsedSpan(len(mark))
        end = self._find_end(text, brace)
        if end is None:
            return None
        calls = () if self._is_broken else _call(head[1], head[2], text[brace:end])
        return ParsedSpan(end, calls)


class CallFrame(NamedTuple):
    """The texts around the JSON arguments of one call.

    opening   the mark before the name
    head      all before the JSON, with the group `name`, maybe also `id`; the mark may be missing
    closings  the texts after the JSON
    """

    opening: str
    head: re.Pattern[str]
    closings: tuple[str, ...]


_DEEPSEEK_OPEN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
_DEEPSEEK_SEP = "<\uff5ctool\u2581sep\uff5c>"
DEEPSEEK = CallFrame(
    _DEEPSEEK_OPEN,
    re.compile(
        f"(?:{_DEEPSEEK_OPEN})?\\s*(?:function{_DEEPSEEK_SEP})?\\s*(?P<name>[\\w.:-]{{1,128}})\\s*"
        f"(?:{_DEEPSEEK_SEP}\\s*|```json\\s*)"
    ),
    ("```", "<\uff5ctool\u2581call\u2581end\uff5c>"),
)
KIMI = CallFrame(
    "<|tool_call_begin|>",
    re.compile(
        r"(?:<\|tool_call_begin\|>)?\s*"
        r"(?P<id>(?:functions\.)?(?P<name>[\w.-]{1,128}?)(?::\d{1,4})?)\s*"
        r"<\|tool_call_argument_begin\|>\s*"
    ),
    ("<|tool_call_end|>",),
)


class FramedParser(MarkedParser):
    """DeepSeek and Kimi: the name, then the arguments as JSON, each call between its own marks."""

    def __init__(self, frame: CallFrame, bare: Sequence[str]) -> None:
        super().__init__((frame.opening,), frame.closings, bare)
        self._frame = frame

    def _read(self, text: str, mark: str, *, is_last: bool) -> ParsedSpan | None:  # noqa: ARG002
        brace = text.find("{")
        if brace < 0:
            is_begun = len(text) <= _LONGEST_HEAD and self._frame.opening not in text[len(mark) :]
            return None if is_begun else ParsedSpan(len(mark))
        head = self._frame.head.fullmatch(text, 0, brace)
        if head is None:
            return ParsedSpan(len(mark))
        end = self._find_end(text, brace)
        if end is None:
            return None
        call_id = head["id"] if "id" in self._frame.head.groupindex else None
        calls = () if self._is_broken else _call(head["name"], call_id, text[brace:end])
        return ParsedSpan(end, calls)


def deepseek_bare(names: Collection[str]) -> list[str]:
    """The openings of DeepSeek's calls of known functions without the mark."""
    return [
        opening
        for name in names
        for opening in (f"{name}{_DEEPSEEK_SEP}", f"function{_DEEPSEEK_SEP}{name}\n")
    ]


def kimi_bare(names: Collection[str]) -> list[str]:
    """The openings of Kimi's calls of known functions without the mark."""
    return [f"functions.{name}:" for name in names]


def read_calls(text: str) -> tuple[Call, ...]:
    """The calls in a JSON object or list; () unless all of it is calls."""
    try:
        value = read_json(text)
    except ValueError:
        return ()
    calls_or_none = [call_of(item) for item in (value if isinstance(value, list) else [value])]
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
    if not isinstance(arguments, dict):
        return None
    return call_of({"name": name, "arguments": arguments, "id": call_id})
