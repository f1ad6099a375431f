"""The calls, files, records and matches of a request do not grow unnoticed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def trace(*options: str) -> list[int]:
    """Calls and files of a decode step; kinds of objects, and of records; matches."""
    printed = subprocess.run(
        [sys.executable, "tools/trace_request.py", *options],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    figures = re.search(
        r"(\d+) calls in (\d+) files.*?(\d+) kinds of objects, (\d+) of them records"
        r".*?matched (\d+) times",
        printed,
        re.DOTALL,
    )
    assert figures is not None, printed
    return list(map(int, figures.groups()))


def test_a_request_costs_no_more_calls_than_it_did() -> None:
    num_calls, num_files, num_kinds, num_records, num_matches = trace()
    assert 20 < num_calls <= 81
    assert 5 < num_files <= 28
    assert 5 < num_records < num_kinds <= 30
    assert num_records <= 16
    assert 1 <= num_matches <= 2


def test_following_the_traffic_costs_no_call_in_a_step() -> None:
    num_calls, num_files, *_ = trace("--advice")
    assert num_calls <= 81
    assert num_files <= 28


def test_drafts_cost_few_calls_where_nothing_is_drafted() -> None:
    num_calls, num_files, *_ = trace("--max-draft-tokens=32")
    assert 81 < num_calls <= 81 + 8
    assert num_files <= 28 + 5
