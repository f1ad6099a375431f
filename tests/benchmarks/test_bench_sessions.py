"""The benchmark of session headers: its workloads, and a small run; no figure is asserted."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from tests.benchmarks.conftest import Run


def test_the_built_in_shape_fits_the_context() -> None:
    bench: Any = importlib.import_module("bench_sessions")
    workload = bench.built_in(20, 0.25)
    assert workload == bench.built_in(20, 0.25)
    assert len({turn.conversation for turn in workload.turns}) == 20
    lengths = dict[str, int]()
    for turn in workload.turns:
        before = lengths.get(turn.conversation, workload.num_shared)
        lengths[turn.conversation] = before + turn.num_new + turn.num_output
    assert max(lengths.values()) <= bench.MAX_LENGTH
    requests = list(bench.requests_of(workload, 2, 10, 0))
    assert len(requests) == 3 * len(workload.turns)
    assert sum(conversation is None for conversation, _, _ in requests) == 2 * len(workload.turns)


def test_a_trace_gives_lengths_and_the_tokens_shared(tmp_path: Path) -> None:
    bench: Any = importlib.import_module("bench_sessions")
    path = tmp_path / "small.jsonl"
    shared = list(range(100, 120))
    records = [
        {"time": 0, "session": "a", "tokens": [*shared, 1, 2], "output_length": 4},
        {"time": 1, "session": "b", "tokens": [*shared, 3, 4], "output_length": 2},
        {"time": 2, "session": "a", "tokens": [*shared, *range(1, 13)], "output_length": 2},
        {"time": 3, "session": "c", "tokens": [*shared, 7], "output_length": 2},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    workload = bench.of_trace(path, 1, 2, 1.0)
    assert (workload.name, workload.num_shared) == ("small", 20)
    assert workload.turns == [
        bench.Turn("a", 2, 4), bench.Turn("b", 2, 2), bench.Turn("a", 6, 2)
    ]  # fmt: skip


@pytest.mark.long
def test_a_quick_run(tmp_path: Path, run: Run) -> None:
    result = run("bench_sessions.py", "--quick", "--json", "--save", tmp_path)
    assert result.returncode == 0, result.stderr
    runs = json.loads(result.stdout)["runs"]
    without, with_header, roomy = runs.values()
    assert without["agents"]["requests"] == with_header["agents"]["requests"] > 8
    assert roomy["evicted"] == 0 < without["evicted"]
    assert roomy["agents"]["cached"] >= with_header["agents"]["cached"]
    assert (tmp_path / "sessions-http.md").exists()
