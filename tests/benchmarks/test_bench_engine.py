"""The engine benchmark: workloads, floor, one small run of everyone; no time is asserted."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.conftest import Run


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.mark.parametrize(
    "engines",
    [
        ("radix", "off", "transformers", "copied"),
        pytest.param((), marks=pytest.mark.long, id="everyone"),  # who take seconds to start
    ],
)
def test_a_quick_run(tmp_path: Path, run: Run, engines: tuple[str, ...]) -> None:
    chosen = ["--only-engines", ",".join(engines)] if engines else []
    result = run("bench_engine.py", "--quick", "--json", "--save", str(tmp_path), *chosen)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (tmp_path / "engine-cpu-tiny-float32.json").read_text() == result.stdout
    assert "| radix |" in (tmp_path / "engine-cpu-tiny-float32.md").read_text()
    cases = {(case["workload"], case["arrival"]): case for case in document["cases"]}
    assert set(cases) == {(w, a) for w in ("W1", "W4") for a in ("burst", "sequential")}
    names = set(engines or module("engine.base").DEFAULT) - set(document["absent"])
    assert names >= {"radix", "off", "transformers", "copied"}
    for case in cases.values():
        rows = {row["engine"]: row for row in case["rows"]}
        assert set(rows) == names
        assert case["floor"]["total_s"] > 0
        assert rows["radix"]["num_prefilled"] == case["floor"]["num_prefilled"]
        assert rows["off"]["num_prefilled"] == rows["transformers"]["num_prefilled"]
        for row in rows.values():
            assert row["num_prefilled"] >= case["floor"]["num_prefilled"]
            assert row["agreement"] == {
                "first_tokens_differ": 0,
                "outputs_differ": 0,
                "compared": 4,
            }
            assert 0 < row["first_mean_s"] <= row["wall_s"]
            assert row["cpu_s"] > 0
            assert bool(row["steps"]) == (row["engine"] in ("radix", "hash", "off"))
        assert rows["radix"]["steps"]["steps"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "W1,W9"), "no such workload: W9"),
        (("--only-engines", "radix,sglang"), "no such engine: sglang"),
        (("--repeats", "-1"), "must be at least 1"),
    ],
)
def test_wrong_arguments(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run("bench_engine.py", *arguments)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("name", "num_requests", "num_computed"),
    [("W1", 32, 1_536), ("W2", 48, 4_648), ("W3", 16, 3_072), ("W4", 16, 8_192), ("W5", 16, 1_040)],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_an_ideal_cache(name: str, num_requests: int, num_computed: int, seed: int) -> None:
    workloads = module("harness.workloads")
    size = workloads.FULL[name]
    workload = workloads.make_workload(name, size, 4_096, seed)
    assert workload.num_requests == num_requests
    assert workloads.ideal_computed(workload) == num_computed
    assert workload == workloads.make_workload(name, size, 4_096, seed)


def test_the_floor_of_a_chat() -> None:
    """The formulas once more, as sums over every token."""
    limits, workloads = module("engine.floor"), module("harness.workloads")
    shape = module("harness.shapes").SHAPES["tiny"]
    machine = limits.Limits({"slow": 1e9, "fast": 2e9}, {"weights": 3e7})
    workload = workloads.make_workload(
        "W2", workloads.QUICK["W2"], 4_096, 0
    )  # 2 sessions, 12 + 4 a turn
    layers, head = 4 * 856_064, 4_096 * 256
    attention, kv_bytes = 4 * 4 * 8 * 64, 4 * 4 * 2 * 2 * 64
    assert (shape.layer_weights, shape.head_weights) == (layers, head)
    prefill = decode = 0.0
    for turn in range(3):
        start, end = max(0, turn * 16 - 1), turn * 16 + 12
        tokens = sum(2 * layers + attention * (i + 1) for i in range(start, end))
        prefill += 2 * (tokens + 2 * head) / 2e9
        for length in range(end + 1, end + 4):
            work = 2 * (2 * layers + 2 * head + attention * length) / 2e9
            read = (4 * (layers + head) + kv_bytes * 2 * length) / 3e7
            decode += max(work, read)
    floor = limits.find_floor(shape, "float32", machine, workload, burst=True)
    assert floor.num_prefilled == 2 * (12 + 13 + 13)
    assert floor.prefill_s == pytest.approx(prefill)
    assert floor.decode_s == pytest.approx(decode)
    alone = limits.find_floor(shape, "float32", machine, workload, burst=False)
    assert alone.prefill_s == pytest.approx(prefill)
    assert alone.decode_s > floor.decode_s


def test_experts_that_tokens_read_together() -> None:
    shape = module("harness.shapes").SHAPES["qwen3-moe"]
    each = 4 * 3 * 512 * 192  # of one expert, all layers
    assert shape.weights_read(1) == pytest.approx(shape.layer_weights)
    assert shape.weights_read(2) == pytest.approx(shape.layer_weights + 7 * each)  # 8 of 64 twice
    assert shape.weights_read(10_000) == pytest.approx(shape.layer_weights + 56 * each)


def test_outputs_are_compared_where_prompts_are_the_same() -> None:
    serving, workloads = module("engine.serving"), module("harness.workloads")
    workload = workloads.make_workload(
        "W2", workloads.QUICK["W2"], 4_096, 0
    )  # 3 rounds of 2 sessions
    expected = [[1, 2]] * 6
    outputs = [[1, 2], [1, 3], [9, 2], [9, 9], [9, 9], [1, 2]]
    assert serving.compare(workload, outputs, expected) == {
        "first_tokens_differ": 1,
        "outputs_differ": 2,
        "compared": 3,
    }


def test_published_figures_come_best_first() -> None:
    published = module("engine.serving").published
    found = published("tiny", "float32", "W2", "burst")
    assert next(iter(found.items())) == ("OpenVINO GenAI", 1.75)
    assert list(published("small", "bfloat16", "W4", "burst")) == ["vLLM CPU 0.32"]
    assert published("small", "float32", "W1", "burst") == {}
