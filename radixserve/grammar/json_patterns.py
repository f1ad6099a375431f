r"""Patterns of JSON schemas that llguidance reads too widely, made narrower.

In llguidance 1.9 a character class that has control characters lets every escape of JSON pass, \"
and \\ too, though the class may leave these two out: "[^\"]" takes a string of one quote. Such a
class does without control characters here, so that what it takes is right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_CONTROL = "\x01"
_NO_CONTROLS = r"&&[^\x00-\x1f]"
_PROPERTY = re.compile(r"\\p(?:\{[^C^][^}]*\}|[^C{])")  # of letters, digits and the like
_UNSURE = re.compile(r"\\[pP]|\\[xu]\{|&&|--|~~|\[:|.\[")  # Python's re reads it otherwise
_VALUES = ("const", "enum", "default", "examples")  # keywords whose values are no schemas


def narrowed(schema: Any) -> Any:
    """A copy of a schema with such patterns replaced. O(schema)."""
    if isinstance(schema, list):
        return [narrowed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "pattern" and isinstance(value, str):
            found[name] = narrowed_pattern(value)
        elif name == "patternProperties" and isinstance(value, Mapping):
            found[name] = {narrowed_pattern(key): narrowed(one) for key, one in value.items()}
        else:
            found[name] = value if name in _VALUES else narrowed(value)
    return found


def narrowed_pattern(pattern: str) -> str:
    """The expression with its classes as above."""
    return "".join(
        f"[{part}{_NO_CONTROLS}]" if is_class and _is_read_too_widely(part) else part
        for part, is_class in _parts(pattern)
    )


def _parts(pattern: str) -> Iterator[tuple[str, bool]]:
    """The expression in pieces, and whether each is a character class: a bracketed one, or one of a
    letter."""
    at = 0
    while at < len(pattern):
        begin, is_class = at, False
        at += 1
        if pattern[begin] == "\\":
            letter = pattern[at : at + 1]
            at += 1
            is_class = letter in ("D", "S", "W", "p", "P")
            if letter in ("p", "P"):
                end = pattern.find("}", at) if pattern[at : at + 1] == "{" else at
                at = len(pattern) if end < 0 else end + 1
        elif pattern[begin] == "[":
            at, is_class = _end_of_class(pattern, begin), True
        yield pattern[begin:at], is_class


def _end_of_class(pattern: str, at: int) -> int:
    """The place after the bracket that closes the one at `at`."""
    depth = 0
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 1
        elif pattern[at] == "[":
            depth += 1
            at += pattern[at + 1 : at + 2] == "^"
            at += pattern[at + 1 : at + 2] == "]"  # a first one stands for itself
        elif pattern[at] == "]":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    return at


def _is_read_too_widely(character_class: str) -> bool:
    """Whether it has control characters, but not both the quote and the backslash."""
    if not character_class.startswith("[^"):
        character_class = _PROPERTY.sub("", character_class)
        if character_class in ("", "[]"):
            return False
    if _UNSURE.search(character_class):
        return True
    try:
        found = re.compile(character_class, re.DOTALL)
    except re.error:  # llguidance says what is wrong with it
        return False
    takes = (found.fullmatch(character) is not None for character in (_CONTROL, '"', "\\"))
    has_controls, has_quote, has_backslash = takes
    return has_controls and not (has_quote and has_backslash)
