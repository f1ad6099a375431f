"""`kind_of`: what changed between two prompts, by the text of the change or its size.

MENDS has the kinds, and what to do about each.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple
from unicodedata import category, normalize

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
FORM = "character form"
MENDS = {
    DATE: "move it to the end of the last message, and leave it there in the history",
    IDENTIFIER: "move it to the end of the last message, or leave it out",
    COMPACTED: "append to the history, and compact it rarely",
    RENAMED: "keep the names of tools",
    ORDER: "sort tools and documents",
    PAGE: "use smaller pages, or a cache that matches to the token",
    BLANKS: "write the same white space each time",
    FORM: "write characters in one form, such as NFC, without escapes",
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
    r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(?::[\d.,]+)?"
    r"|(?<![\w.])\d{1,4}([-/.])\d{1,2}\1\d{1,4}(?![\d.]\d)"  # 2026-11-30, 30.11.2026
    r"|\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?"
    r"|\b20\d{6}(?:T\d{4,6}Z?)?\b"  # 20261130T101500Z
    r"|\b(?:1[6-9]|2[0-3])\d{8}(?:\d{3}){0,2}\b"  # seconds since 1970, or parts of them
    rf"|\b(?:{_CALENDAR})\b[., ]*\d|\d(?:st|nd|rd|th)? (?:of )?(?:{_CALENDAR})\b"
    r"|\b(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b"
    r"|\b\d{1,2}\.?(?: de)? [^\W\d_]{3,12}\.?,?(?: de)? (?:19|20)\d\d\b"  # in other languages
    r"|\d+ ?[\u5e74\u6708\u65e5\u6642\u65f6\u5206\u79d2]"  # in Chinese and Japanese
    r"|\d+ ?[\ub144\uc6d4\uc77c\uc2dc\ubd84\ucd08]"  # in Korean
    r"|\b\d+(?:[.,]\d+)? ?(?:(?:second|minute|hour|day|week|sec|min|hr)s?|m?s|h)\b",
    re.IGNORECASE,
)
_IDENTIFIER = re.compile(
    r"\b(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{8,}|\b[0-9a-f]{8,}\b|\b\d{5,}\b"
    r"|\b\d{1,3}(?:\.\d{1,3}){3}\b|[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    re.IGNORECASE,
)
_TOOL_NAME = re.compile(
    r"(?:[\"']?(?:name|function|tool)[\"']?\s*[:=]\s*[\"']?[\w.-]*"
    r"|\b(?:type|def|function)(?:\s+[\w.-]*)?)$"
)
_NUMBERS, _WORDS = re.compile(r"\d+"), re.compile(r"\w+|[^\w\s]")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014", "''\"\"--")
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
        texts = [decode(part.tolist()) for part in gap]
        kind = _kind_of_form(*texts)
        if not kind and max(num_removed, num_added) <= _SHORT:
            kind = _kind_of_words(*texts)
        if kind:
            return kind
    if is_history and num_removed >= _LONG and num_added < num_removed:
        return THOUGHTS if in_answer and decode is None else COMPACTED
    return OTHER


def _kind_of_form(before: str, removed: str, added: str, after: str) -> str:
    """A kind of texts of any length: the same one in another form, or without thinking; or ""."""
    if added == removed:
        return SPLIT
    if _dense(added) == _dense(removed):
        return BLANKS
    if _plain(added) == _plain(removed):
        return FORM
    thoughts = [match.span() for match in _THOUGHT.finditer(before + removed + after)]
    low, high = len(before), len(before) + len(removed)
    thought = sum(max(0, min(high, end) - max(low, start)) for start, end in thoughts)
    if thought > 0.8 * len(removed) and len(added) < len(removed):
        return THOUGHTS
    return ""


def _kind_of_words(before: str, removed: str, added: str, after: str) -> str:
    """A kind that the words of short texts show, or ""."""
    same = _num_equal(added, removed)
    before, added, removed = before + added[:same], added[same:], removed[same:]
    same = _num_equal(added[::-1], removed[::-1])
    after = added[len(added) - same :] + after
    added, removed = added[: len(added) - same], removed[: len(removed) - same]
    dates, ids = (
        [_longest(pattern, before, text, after) for text in (removed, added)]
        for pattern in (_DATE, _IDENTIFIER)
    )
    if _shows(dates, removed, added) and sum(dates) >= sum(ids):
        return DATE
    if _TOOL_NAME.search(before) or '"name"' in added:
        return RENAMED
    if _shows(ids, removed, added) or (
        added and _NUMBERS.sub("0", added) == _NUMBERS.sub("0", removed)
    ):
        return IDENTIFIER
    return ""


def _shows(sizes: list[int], *texts: str) -> bool:
    """Whether matches of these sizes make out texts; one may be empty, and a third of the
    other one is a match then."""
    return all(
        size if text else 3 * other > len(other_text)
        for size, text, other, other_text in zip(
            sizes, texts, sizes[::-1], texts[::-1], strict=True
        )
    )


def is_reordered(gap: Gap, decode: Decode | None) -> bool:
    """Whether a short text has its words in another order."""
    if decode is None or not 2 < len(gap.added) <= _SHORT or not 2 < len(gap.removed) <= _SHORT:
        return False
    texts = (_seen(decode(part.tolist())) for part in (gap.added, gap.removed))
    added, removed = map(_WORDS.findall, texts)
    return added != removed and sorted(added) == sorted(removed)


def _longest(pattern: re.Pattern[str], before: str, text: str, after: str) -> int:
    """The length of the longest match that overlaps the text, or touches it; 0 for none."""
    low, high = len(before), len(before) + len(text)
    matches = pattern.finditer(before + text + after)
    sizes = [len(match[0]) for match in matches if match.end() >= low and match.start() <= high]
    return max(sizes, default=0)


def _dense(text: str) -> str:
    """A text without white space and characters that are not seen."""
    return "".join(_seen(text).split())


def _seen(text: str) -> str:
    return "".join(character for character in text if category(character) != "Cf")


def _num_equal(text: str, other: str) -> int:
    """The length of the common prefix."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(text), len(other)))


def _plain(text: str) -> str:
    """A text without escapes of JSON, typographic quotes and the forms that Unicode equates."""
    text = _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)
    return _dense(normalize("NFKC", text).translate(_QUOTES))


def kind_of_order(runs: list[tuple[int, int, int]], position: int, num_prompt: int) -> str:
    """The kind of a change in which the same text has another order.

    runs        by place in the request: (start there, start and end in the earlier request)
    num_prompt  tokens of the earlier request's prompt: the system prompt moved if what stood first
                there stands behind the prompt's end here
    """
    front = min(runs, key=lambda run: run[1])
    is_last = any(run[0] < front[0] and run[2] >= num_prompt - 1 for run in runs)
    return MOVED if is_last and front[1] - position <= _CONTEXT else ORDER
