"""bench_step.py prints each part of a step."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.conftest import Run


def test_the_parts_of_a_step_are_measured(run: Run, tmp_path: Path) -> None:
    options = ("--rows", "1,2", "--tokens", "8", "--quick", "--json", "--save", str(tmp_path))
    data = json.loads(run("bench_step.py", *options).stdout)
    assert [row[0] for row in data["rows"]] == [1, 2]
    for _, *parts, step, overhead in data["rows"]:
        assert all(part > 0 for part in parts)
        assert abs(sum(parts) - step) < 1
        assert 0 < float(overhead.rstrip("%")) < 100
    assert (tmp_path / "step-cpu-tiny-float32.md").exists()
