"""The router's benchmark: one small run; no time is asserted."""

from __future__ import annotations

import json

from tests.benchmarks.conftest import Run


def test_a_small_run(run: Run) -> None:
    options = ["--edges", "640", "--replicas", "4", "--choices", "8", "--json"]
    result = run("bench_router.py", *options)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert "choice us, median" in str(found)
    assert "events/s while built" in str(found)
