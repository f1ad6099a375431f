"""The calls, files, records and matches of a request do not grow unnoticed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent


# The tool as a command, once for each list of options: one process imports torch for all of them.
PROGRAM = """
import runpy, sys
tool, *commands = sys.argv[1:]
for command in commands:
    sys.argv = [tool, *command.split()]
    runpy.run_path(tool, run_name="__main__")
"""
FIGURES = (
    r"(\d+) calls in (\d+) files.*?(\d+) kinds of objects, (\d+) of them records"
    r".*?matched (\d+) times"
)


class Traces(NamedTuple):
    """Calls and files of a decode step; kinds of objects, and of records; matches."""

    plain: list[int]
    with_advice: list[int]
    with_drafts: list[int]


@pytest.fixture(scope="module")
def traces() -> Traces:
    printed = subprocess.run(
        [
            *(sys.executable, "-c", PROGRAM, "tools/trace_request.py"),
            *("", "--advice", "--max-draft-tokens=32"),
        ],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    of_runs = re.findall(FIGURES, printed, re.DOTALL)
    assert len(of_runs) == 3, printed
    return Traces(*(list(map(int, figures)) for figures in of_runs))


def test_a_request_costs_no_more_calls_than_it_did(traces: Traces) -> None:
    num_calls, num_files, num_kinds, num_records, num_matches = traces.plain
    assert 20 < num_calls <= 81
    assert 5 < num_files <= 28
    assert 5 < num_records < num_kinds <= 30
    assert num_records <= 16
    assert 1 <= num_matches <= 2


def test_following_the_traffic_costs_no_call_in_a_step(traces: Traces) -> None:
    num_calls, num_files, *_ = traces.with_advice
    assert num_calls <= 81
    assert num_files <= 28


def test_drafts_cost_few_calls_where_nothing_is_drafted(traces: Traces) -> None:
    num_calls, num_files, *_ = traces.with_drafts
    assert 81 < num_calls <= 81 + 8
    assert num_files <= 28 + 5
