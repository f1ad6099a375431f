"""Kinds of changes by their texts: forms of dates, ids, names, white space and characters."""

from __future__ import annotations

from collections.abc import Sequence
from unicodedata import normalize

import numpy as np
import pytest

from radixserve.replay.fault_kinds import (
    BLANKS,
    DATE,
    FORM,
    IDENTIFIER,
    OTHER,
    RENAMED,
    SPLIT,
    Gap,
    is_reordered,
    kind_of,
)

DATES = [
    ("2026-11-30", "2026-12-01"),
    ("2026-11-30T10:15:00Z", "2026-11-30T10:15:01Z"),
    ("2026-11-30T10:15:00.123456+00:00", "2026-11-30T11:17:02.5+00:00"),
    ("20261130T101500Z", "20261130T101612Z"),
    ("1796033700", "1796033811"),
    ("1796033700123", "1796033811456"),
    ("1796033700.25", "1796033811.75"),
    ("1796033700123456", "1796033811456123"),
    ("Mon, 30 Nov 2026 10:15:00 +0000", "Tue, 01 Dec 2026 11:00:00 +0000"),
    ("November 30, 2026", "December 1, 2026"),
    ("11/30/2026", "12/01/2026"),
    ("10:15 AM", "11:20 PM"),
    ("Monday", "Tuesday"),
    ("the 4th of May", "the 11th of June"),
    ("30. November 2026", "1. Dezember 2026"),
    ("30 novembre 2026", "1 décembre 2026"),
    ("30 de noviembre de 2026", "1 de diciembre de 2026"),
    ("30 ноября 2026", "1 декабря 2026"),
    ("30.11.2026 10:15", "01.12.2026 11:20"),
    ("2026年11月30日", "2026年12月1日"),
    ("2026년 11월 30일", "2026년 12월 1일"),
    ("3 minutes ago", "17 minutes ago"),
    ("12.5 s", "31.2 s"),
    ("(35 min ago) ", ""),
]
IDS = [
    ("f47ac10b-58cc-4372-a567-0e02b2c3d479", "0b9e1f5a-8c1d-4f5e-9a51-7f1c2d3e4f50"),
    ("9f86d081884c7d65", "60303ae22b998861"),
    ("0x7ffd5e8c", "0x7ffd5f10"),
    ("#17", "#18"),
    ("4711", "4712"),
    ("req_9aZk3TqLm2", "req_b7Xp0VwRn5"),
    ("01ARZ3NDEKTSV4RRFFQ69G5FAV", "01BX5ZZKBKACTAV9WEVGEMMVRZ"),
    ("10.0.12.7", "192.168.3.44"),
    ("ann@example.com", "bob.b@example.org"),
    ("0.8444218515", "0.7579544029"),
]
NAMES = [
    ('{"name": "', "search_v1", "search_v2"),
    ('{"type": "function", "name": "', "mcp__0f3a__read", "mcp__9b1c__read"),
    ('<tool name="', "search", "lookup"),
    ("type ", "search", "lookup"),
    ("def ", "search", "lookup"),
]


def kind(before: str, removed: str, added: str, after: str = " and so it goes on") -> str:
    parts = (before, removed, added, after)
    tokens = [np.asarray([ord(character) for character in part], np.int32) for part in parts]
    return kind_of(Gap(*tokens), decode, in_answer=False, is_history=False)


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


@pytest.mark.parametrize(("old", "new"), DATES)
def test_dates(old: str, new: str) -> None:
    """Also where a tokenizer has their beginning in common."""
    same = next((n for n, pair in enumerate(zip(old, new, strict=False)) if len(set(pair)) > 1), 0)
    for cut in (0, same):
        assert kind(f"It is {old[:cut]}", old[cut:], new[cut:]) == DATE
        assert kind(f"It is {old[:cut]}", new[cut:], old[cut:]) == DATE


@pytest.mark.parametrize(("old", "new"), IDS)
def test_identifiers(old: str, new: str) -> None:
    assert kind("Request ", old, new) == IDENTIFIER


@pytest.mark.parametrize(("before", "old", "new"), NAMES)
def test_names_of_tools(before: str, old: str, new: str) -> None:
    assert kind(before, old, new, '", "description"') == RENAMED


def test_the_same_text_in_another_form() -> None:
    text = "Grüße an\nalle: café, “so”"
    blanks = ("\r\n", "\u00a0", "\u200b\n", "\n\n\t", "")
    for blank in blanks:
        assert kind("", text, text.replace("\n", blank)) == BLANKS
    assert kind("", "[1, 2]", "[1,2]") == BLANKS
    escaped = text.replace("ü", "\\u00fc").replace("é", "\\u00e9")
    for other in (normalize("NFD", text), escaped, text.replace("“", '"').replace("”", '"')):
        assert kind("", text, other) == FORM
    assert kind("", text, text) == SPLIT


def test_words_in_another_order() -> None:
    old, new = '"tier": "gold", "region": "eu"', '"region": "eu", "tier": "gold"'
    gap = [
        np.asarray([ord(character) for character in part], np.int32) for part in ("", old, new, "")
    ]
    assert is_reordered(Gap(*gap), decode)
    assert not is_reordered(Gap(gap[0], gap[1], gap[1], gap[3]), decode)
    assert not is_reordered(Gap(*gap), None)


def test_other_words_are_none_of_these() -> None:
    for old, new in (("a red ball", "a blue box"), ("yes", ""), ("v2", "v3 or so")):
        assert kind("She has ", old, new) == OTHER
