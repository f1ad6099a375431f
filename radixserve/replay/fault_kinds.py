"""`kind_of`: what changed between two prompts, by the text of the change or its size.

MENDS has the kinds, and what to do about each.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from radixserve.arrays import IntArray

Decode = Callable[[Sequence[int]], str]

DATE, IDENTIFIER, COMPACTED, RENAMED = (
    "date or time",
    "request id",
    "compacted history",
    "renamed tool",
)
ORDER, PAGE, BLANKS, THOUGHTS = "changing order", "page", "whitespace", "dropped thinking"
SPLIT, MOVED, OTHER = "tokenisation", "moved system prompt", "changed text"
MENDS = {
    DATE: "move it to the end of the last message, and leave it there in the history",
    IDENTIFIER: "move it to the end of the last message, or leave it out",
    COMPACTED: "append to the history, and compact it rarely",
    RENAMED: "keep the names of tools",
    ORDER: "sort tools and documents",
    PAGE: "use smaller pages, or a cache that matches to the token",
    BLANKS: "write the same white space each time",
    THOUGHTS: "keep the thinking in the history",
    SPLIT: "send token ids, or let the server keep those of the conversation",
    MOVED: "keep the system prompt in front",
    OTHER: "move what changes to the end",
}
HISTORIES = (COMPACTED, THOUGHTS)  # which lose a text of their own each time
KEPT_AT_THE_END = (DATE, IDENTIFIER, OTHER)  # what a mended prompt says later

_CONTEXT = 16  # tokens of text around a change
_SHORT = 64  # tokens of a date, an id or a name with what stands around it
_LONG = 16  # tokens that a compacted history or a thought has at least

_NAMES = (calendar.month_name, calendar.month_abbr, calendar.day_name, calendar.day_abbr)
_CALENDAR = "|".join(sorted({name for names in _NAMES for name in names if name}))
_DATE = re.compile(
    r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}|\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?|\b(?:1[6-9]|2[0-3])\d{8}(?:\d{3})?\b"
    rf"|\b(?:{_CALENDAR})\b[., ]*\d|\d(?:st|nd|rd|th)? (?:{_CALENDAR})\b"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b",
    re.IGNORECASE,
)
_IDENTIFIER = re.compile(
    r"\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{8,}|\b[0-9a-f]{8,}\b|\b\d{5,}\b", re.IGNORECASE
)
_TOOL_NAME = re.compile(r"[\"']?(?:name|function|tool)[\"']?\s*[:=]\s*[\"']?[\w.-]*$")
_THOUGHT = re.compile(
    r"<(think|thinking|thought|reasoning|analysis|seed:think)>.*?(?:</\1>|$)"
    r"|\[THINK\].*?(?:\[/THINK\]|$)|<\|channel\|>(?:analysis|thought).*?(?:<\|end\|>|<channel\|>|$)",
    re.DOTALL,
)


class Gap(NamedTuple):
    """Tokens of an earlier request that another one has in other words, with what is around."""

    before: IntArray
    removed: IntArray
    added: IntArray
    after: IntArray

    @classmethod
    def between(
        cls,
        prompt: IntArray,
        other: IntArray,
        span: tuple[int, int],
        other_span: tuple[int, int],
    ) -> Gap:
        """`span`, `other_span`: where the prompt and the earlier request differ."""
        (start, end), (other_start, other_end) = span, other_span
        return cls(
            prompt[max(0, start - _CONTEXT) : start],
            other[other_start:other_end],
            prompt[start:end],
            prompt[end : end + _CONTEXT],
        )


def kind_of(gap: Gap, decode: Decode | None, *, in_answer: bool, is_history: bool) -> str:
    """The kind of a change.

    in_answer   of an answer of the earlier request, not of its prompt
    is_history  the earlier request may be of the same conversation
    """
    num_removed, num_added = len(gap.removed), len(gap.added)
    if decode is not None:
        kind = _kind_of_text(*(decode(part.tolist()) for part in gap))
        if kind in (SPLIT, BLANKS, THOUGHTS) or (max(num_removed, num_added) <= _SHORT and kind):
            return kind
    if is_history and num_removed >= _LONG and num_added < num_removed:
        return THOUGHTS if in_answer and decode is None else COMPACTED
    return OTHER


def _kind_of_text(before: str, removed: str, added: str, after: str) -> str:
    """A kind that the text shows, or ""."""
    if added == removed:
        return SPLIT
    if "".join(added.split()) == "".join(removed.split()):
        return BLANKS
    thoughts = [match.span() for match in _THOUGHT.finditer(before + removed + after)]
    low, high = len(before), len(before) + len(removed)
    thought = sum(max(0, min(high, end) - max(low, start)) for start, end in thoughts)
    if thought > 0.8 * len(removed) and len(added) < len(removed):
        return THOUGHTS
    for kind, pattern in ((DATE, _DATE), (IDENTIFIER, _IDENTIFIER)):
        if all(_touches(pattern, before, text, after) for text in (removed, added)):
            return kind
    return RENAMED if _TOOL_NAME.search(before) or '"name"' in added else ""


def _touches(pattern: re.Pattern[str], before: str, text: str, after: str) -> bool:
    """Whether a match overlaps the text, or touches it."""
    low, high = len(before), len(before) + len(text)
    return any(
        match.end() >= low and match.start() <= high
        for match in pattern.finditer(before + text + after)
    )


def kind_of_order(runs: list[tuple[int, int, int]], position: int, num_prompt: int) -> str:
    """The kind of a change in which the same text has another order.

    runs        by place in the request: (start there, start and end in the earlier request)
    num_prompt  tokens of the earlier request's prompt: the system prompt moved if what stood first
                there stands behind the prompt's end here
    """
    front = min(runs, key=lambda run: run[1])
    is_last = any(run[0] < front[0] and run[2] >= num_prompt - 1 for run in runs)
    return MOVED if is_last and front[1] - position <= _CONTEXT else ORDER
