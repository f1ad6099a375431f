"""What the clients of a cache cost: one small run of each table; no time is asserted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.benchmarks.conftest import Run


def table(run: Run, name: str, *options: object) -> dict[str, Any]:
    result = run("bench_cache_clients.py", "--only", name, *options, "--json")
    assert result.returncode == 0, result.stderr
    (found,) = json.loads(result.stdout)["tables"]
    return dict(found)


def test_hints(run: Run) -> None:
    rows = table(run, "hints", "--prompts", 4, "--tokens", 80, "--shared", 20)["rows"]
    assert [row[0] for row in rows] == ["look-up", "retain", "pin", "demote", "share"]


def test_snapshot(run: Run) -> None:
    pytest.importorskip("fastapi")
    (row,) = table(run, "snapshot", "--nodes", 50)["rows"]
    assert row[0] >= 50


def test_events(run: Run) -> None:
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    shrunk = ("--steps", 40, "--step-tokens", 64, "--repeats", 1)
    rows = table(run, "events", *shrunk)["rows"]
    assert [row[0] for row in rows] == ["no log", "a log, taken", "published in blocks of 16"]
    printed = run("bench_cache_clients.py", "--only", "events", *shrunk).stdout
    assert "all threads" in printed


def test_router(run: Run) -> None:
    rows = table(run, "router", "--edges", 640, "--replicas", 4, "--choices", 8)["rows"]
    assert {"choice us, median", "events/s while built"} <= {row[0] for row in rows}
