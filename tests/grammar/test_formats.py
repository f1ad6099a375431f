"""The texts of string formats: what is taken and what is kept out."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
import uuid
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra [grammar]")

from benchmarks.json_schema_suite import Vocabulary, load_vocabulary, takes, walk
from radixserve.grammar.backend import compile_matcher
from radixserve.grammar.formats import PATTERNS
from radixserve.structured_outputs import StructuredOutput

LONG = ".".join(["a" * 63] * 4)  # 255 characters
CASES = {
    "date": (["2024-02-29", "2000-02-29", "2023-02-28", "0001-01-01", "9999-12-31"],
             ["2023-02-29", "1900-02-29", "2100-02-29", "2024-02-30", "2023-04-31", "0000-01-01",
              "0000-02-29", "2023-1-01", "12023-01-01", "2023-13-01", "2023-00-01", "2023-01-00"]),
    "time": (["12:00:00Z", "23:59:59.123456789Z", "00:00:00+02:00", "12:00:00-23:59"],
             ["12:00:00", "24:00:00Z", "12:60:00Z", "22:59:60Z", "12:00:00+24:00", "12:00Z",
              "12:00:00.Z", "12:00:00.1234567890Z"]),
    "date-time": (["2024-02-29T12:00:00Z", "2023-12-31T23:59:59.5+01:00"],
                  ["2023-02-29T12:00:00Z", "2023-02-28 12:00:00Z", "2023-02-28T12:00:00"]),
    "duration": (["P1D", "PT1H", "P1W", "P1Y2M", "P1YT1H", "P1Y2M3DT4H5M6S", "PT1H1M", "P2M1D"],
                 ["P", "PT", "P1DT", "P1W2D", "PT0.5S", "p1d", "P1.5D", "P1Y1D", "PT1H1S", "1D"]),
    "hostname": (["a", "a.b", "A" * 63, "ab-cd", "a--b", "1.2.3.4", LONG[:253], "ab-c", "a-1.b"],
                 ["", "-a", "a-", "a" * 64, LONG, LONG[:254], "a..b", "a.", "a_b", "ab--cd",
                  "xn--x", "ab--"]),
    "email": (["a@b.cc", "a.b+c@d-e.example"],
              ["a@", "@b.cc", "a b@c.dd", "a..b@c.dd", ".a@c.dd", "a.@c.dd", "a@b", "a@-b.cc",
               f"{'a' * 65}@b.cc", f"a@{LONG}", "a@b..cc"]),
    "ipv4": (["1.2.3.4", "255.255.255.255"], ["256.1.1.1", "01.2.3.4", "1.2.3", "1.2.3.4.5"]),
    "ipv6": (["::1", "::", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::"],
             ["1::2::3", "1:2:3:4:5:6:7", "12345::", "fe80::1%eth0"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"],
             ["123e4567e89b12d3a456426614174000", "123e4567-e89b-12d3-a456-42661417400g"]),
    "uuid4": (["123e4567-e89b-42d3-a456-426614174000"],
              ["123e4567-e89b-12d3-a456-426614174000", "123e4567-e89b-42d3-c456-426614174000"]),
    "uri": (["http://a", "urn:x", "mailto:a@b", "http://[::1]:80/x?y#z"],
            ["a", "//a", "http://a b", "http://a/%zz", "http://a:port"]),
    "json-pointer": (["", "/a/0", "/~0~1"], ["a", "/~", "/~2"]),
    "relative-json-pointer": (["0", "1/a", "0#"], ["/a", "01", "-1/a"]),
    "byte": (["", "YQ==", "YWI=", "YWJj"], ["a", "Y===", "YQ=", "Y-=="]),
    "no-such-format": (["anything", ""], []),
}  # fmt: skip
READERS: dict[str, Any] = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    **{f"uuid{version}": uuid.UUID for version in (1, 3, 4, 5)},
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary()


def start_of(schema: Any, vocabulary: Vocabulary) -> Any:
    return compile_matcher(StructuredOutput(json=schema), vocabulary.table)


@pytest.mark.parametrize("name", list(CASES))
def test_texts_of_a_format(name: str, vocabulary: Vocabulary) -> None:
    start = start_of({"type": "string", "format": name}, vocabulary)
    taken, kept_out = CASES[name]
    for text in taken:
        assert takes(start.deep_copy(), vocabulary, text), text
    for text in kept_out:
        assert not takes(start.deep_copy(), vocabulary, text), text


def test_every_day_of_the_calendar() -> None:
    pattern = re.compile(PATTERNS["date"])
    for year in (1, 4, 100, 400, 1900, 2000, 2023, 2024, 2100, 9996, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    datetime.date.fromisoformat(text)
                    is_day = True
                except ValueError:
                    is_day = False
                assert bool(pattern.fullmatch(text)) == is_day, text


@pytest.mark.parametrize("name", list(READERS))
def test_random_texts_are_read_by_python(name: str, vocabulary: Vocabulary) -> None:
    start = start_of({"type": "string", "format": name}, vocabulary)
    texts = [walk(start.deep_copy(), vocabulary, random.Random(seed)) for seed in range(30)]
    assert any(texts)
    for text in texts:
        if text is not None:
            READERS[name](json.loads(text))


def test_a_format_beside_other_keywords(vocabulary: Vocabulary) -> None:
    for schema, taken, kept_out in (
        ({"format": "date"}, ["2024-02-29", 5, None], ["2023-02-29"]),
        ({"type": "string", "format": "date", "pattern": "^2024"}, ["2024-02-29"], ["2023-01-01"]),
        ({"format": "hostname", "maxLength": 3}, ["abc"], ["abcd"]),
        ({"format": "date", "enum": ["2024-02-29", "2023-02-29"]}, ["2024-02-29"], ["2023-02-29"]),
        ({"properties": {"format": {"const": 1}}}, [{"format": 1}], []),
        ({"type": ["string", "null"], "format": "date-time"}, [None], ["x"]),
    ):  # fmt: skip
        start = start_of(schema, vocabulary)
        for value in taken:  # type: ignore[attr-defined]
            assert takes(start.deep_copy(), vocabulary, value), (schema, value)
        for value in kept_out:  # type: ignore[attr-defined]
            assert not takes(start.deep_copy(), vocabulary, value), (schema, value)
