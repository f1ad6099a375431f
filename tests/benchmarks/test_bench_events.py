"""The command that measures what a cache's events cost, shrunk."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.conftest import Run


def test_a_row_each(run: Run) -> None:
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    shrunk = ("--prompts", 40, "--tokens", 64, "--repeats", 1)
    done = run("bench_events.py", *shrunk, "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row[0] for row in rows] == ["no log", "a log, taken", "published in blocks of 16"]
    assert "all threads" in run("bench_events.py", *shrunk).stdout
