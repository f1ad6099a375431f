"""The GPU benchmark on the CPU: every part runs, what is wrong is found, jobs stay apart."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixserve.attention.cuda import cascade
from radixserve.models.sizes import SIZES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_path() -> Iterator[None]:
    """And what the parts change in this process as it was before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        for name in ("SHARE_BYTES", "MERGE_TOKENS"):
            patch.setattr(cascade, name, getattr(cascade, name))
        yield


def load(name: str) -> Any:
    return importlib.import_module(f"gpu.{name}")


def dry_bench(rows: list[Any], **settings: Any) -> Any:
    ceilings = load("limits").Ceilings(1e10, 1e11)
    given = load("jobs").Settings(**{"is_dry": True, "ceilings": ceilings, **settings})
    return load("bench").Bench(given, lambda kind, one: rows.append(one) if kind == "row" else None)


# -- the whole dry run, in this process ---------------------------------------------------------


class JobHere:
    """A job without a process."""

    def __init__(self, module: str, group: str, settings: Any, *_: Any) -> None:
        self.group, self._told = group, list[str]()
        tell = lambda *one: self._told.append(json.dumps(one, default=float))  # noqa: E731
        load("jobs").attempt(module, group, settings, tell)

    def finish(self) -> None:
        pass

    def told(self) -> list[Any]:
        return [json.loads(one) for one in self._told]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict[str, Any], Path]:
    """Exit code, output, results.json and the folder."""
    folder = tmp_path_factory.mktemp("gpu")
    run = load("session")
    counts = "2 passed, 40 deselected in 1.00s\n"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.setattr(run, "Job", JobHere)
        done = SimpleNamespace(stdout=counts, stderr="", returncode=0)
        # Of this module alone: compiling kernels runs the compiler.
        fake = SimpleNamespace(run=lambda *_, **__: done)
        patch.setattr(load("part_tests"), "subprocess", fake)
        code = run.run_all(run.parse_arguments(["--out", str(folder), "--dry-run"]))
    return code, out.getvalue(), json.loads((folder / "results.json").read_text()), folder


def test_every_part_runs(dry_run: tuple[int, str, dict[str, Any], Path]) -> None:
    code, out, document, folder = dry_run
    assert code == 0, out
    names = [*load("session").PARTS]
    assert list(document["parts"]) == names
    for name, part in document["parts"].items():
        assert part["state"] == "ok", (name, part)
        assert part["rows"]
    assert {"torch", "triton", "transformers", "cores", "python"} <= set(document["settings"])
    assert len(out) < 12_000
    assert out.count("dry run on the CPU: figures mean nothing") == 2  # first and last
    assert sorted(path.name for path in folder.iterdir()) == [
        "log.txt",
        "results.json",
        "results.md",
    ]
    markdown = (folder / "results.md").read_text()
    assert "dry run on the CPU: figures mean nothing" in markdown
    for name in names:
        assert f"\n{name}: " in out
        assert f"\n## {name}: " in markdown


FIELDS = {  # of one row of each table
    "limits": ["TB/s", "ms", "+-"],
    "choose": ["triton"],
    "tests": ["passed", "failed", "error", "skipped"],
    "host": ["host ms", "least", "us a row"],
    "decode": ["step ms", "+-", "limit ms", "of limit", "device ms", "host share", "tok/s"],
    "prefill": ["first token ms", "limit ms", "of limit", "tok/s", "cold / cached"],
    "shared": ["flat ms", "limit ms", "cascade ms", "its limit", "gain"],
    "throughput": ["on s", "off s", "off / on", "computed", "of ideal"],
    "sharegpt": ["s", "limit s", "tok/s out"],
    "beam": ["s", "limit s", "of limit", "tok/s", "all beams"],
}


def test_every_figure_is_there(dry_run: tuple[int, str, dict[str, Any], Path]) -> None:
    parts = dry_run[2]["parts"]
    for name, fields in FIELDS.items():
        rows = [row for row in parts[name]["rows"] if set(fields) <= set(row["cells"])]
        assert rows, name
        values = [value for row in rows for value in row["cells"].values()]
        assert not any(isinstance(value, float) and math.isnan(value) for value in values)
    goals = {
        name: [c["what"] for r in part["rows"] for c in r["checks"]] for name, part in parts.items()
    }
    assert set(goals["decode"]) == {"of the limit", "host share"}
    assert set(goals["prefill"]) == {"of the limit", "cold over cached"}
    assert goals["shared"].count("gain") == 1  # the step's target is for 64 rows
    assert goals["throughput"] == ["loss without reuse"]
    assert set(goals["beam"]) == {"tok/s of the best answers"}
    profiles = [row.get("details", {}).get("profile") for row in parts["decode"]["rows"]]
    assert any(isinstance(one, dict) and one for one in profiles)


def test_parts_of_an_earlier_run_are_kept(
    dry_run: tuple[int, str, dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = load("session"), dry_run[3]
    before = json.loads((folder / "results.json").read_text())
    monkeypatch.setattr(run, "Job", JobHere)
    options = ["--out", str(folder), "--dry-run", "--parts", "beam"]
    assert run.run_all(run.parse_arguments(options)) == 0
    after = json.loads((folder / "results.json").read_text())
    assert list(after["parts"]) == list(before["parts"])
    for name, part in before["parts"].items():
        assert (after["parts"][name] == part) == (name != "beam")
    assert run.run_all(run.parse_arguments([*options, "--page-size", "16"])) == 0
    other = json.loads((folder / "results.json").read_text())
    assert list(other["parts"]) == ["limits", "beam"]  # other settings; the limits are needed


def test_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load("session")
    monkeypatch.setattr(run, "Job", JobHere)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.run_all(run.parse_arguments(["--out", str(tmp_path)])) == 2
    assert "PyTorch finds no CUDA device; --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parts", "beam,z"], "no such part: z; there are limits,"),
        (["--page-size", "0"], "1 to 64"),
        (["--deadline", "5"], "more than 8 seconds"),
        (["--patience", "0"], "more than 0"),
    ],
)
def test_wrong_arguments(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        load("session").parse_arguments(["--out", "x", *options])
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err


# -- limits -------------------------------------------------------------------------------------


def test_limits_of_an_h200() -> None:
    """The floors of a card with 4.3 TB/s and 790 TFLOP/s."""
    limits, shapes = load("limits"), importlib.import_module("harness.shapes")
    shape, card = shapes.Shape.of(SIZES["llama-3.1-8b"]), limits.Ceilings(4.3e12, 790e12)
    assert shape == shapes.Shape.of(SIZES["llama-3-8b"])
    assert round(limits.weight_bytes(shape) / 1e9, 2) == 15.01
    assert limits.kv_bytes(shape) == 131_072
    decodes = {(1, 1_024): 3.52, (8, 1_024): 3.74, (64, 1_024): 5.49, (64, 8_192): 19.5}
    for (rows, keys), expected in {**decodes, (256, 1_024): 12.9}.items():
        found = limits.decode_s(shape, card, rows, keys) * 1e3
        assert found == pytest.approx(expected, rel=5e-3)
    assert round(64 / limits.decode_s(shape, card, 64, 8_192)) == 3_287
    prefills = {(512, 0): 9.1, (4_096, 0): 77.9, (32_768, 0): 935, (512, 8_192): 11.9}
    for (new, cached), expected in {**prefills, (512, 32_768): 20.3}.items():
        found = limits.prefill_s(shape, card, new, cached) * 1e3
        assert found == pytest.approx(expected, rel=5e-3)
    shared = {(64, 8_192): (16.2, 0.62), (256, 1_024): (9.0, 1.25)}
    for (rows, prefix), expected in shared.items():
        flat = limits.flat_s(shape, card, rows, prefix + 128) * 1e3
        cascade = limits.cascade_s(shape, card, rows, prefix, 128) * 1e3
        assert (flat, cascade) == pytest.approx(expected, rel=1e-2)


def test_limits_of_whole_workloads() -> None:
    """One request alone is its prefill and its steps; beams of one are one request."""
    limits, shapes = load("limits"), importlib.import_module("harness.shapes")
    shape, card = shapes.Shape.of(SIZES["qwen3-0.6b"]), limits.Ceilings(4.3e12, 790e12)
    steps = sum(limits.decode_s(shape, card, 1, 1_000 + step) for step in range(1, 8))
    pure = limits.prefill_s(shape, limits.Ceilings(math.inf, card.flops), 1_000)
    assert limits.serving_s(shape, card, [(1_000, 8)]) == pytest.approx(pure + steps)
    assert limits.beams_s(shape, card, 1, 1, 1_000, 8) == pytest.approx(pure + steps)
    two = limits.serving_s(shape, card, [(1_000, 8), (1_000, 4)])
    assert pure * 2 + steps < two < 2 * (pure + steps)


def test_where_together_becomes_faster() -> None:
    crossing = load("part_shared").crossing
    assert crossing((128, 512), (0.5, 2.0)) == pytest.approx(256)
    assert crossing((128, 512, 1_024), (1.2, 0.5, 2.0)) == pytest.approx(1_024 / 2**0.5)
    assert crossing((128, 512), (1.5, 2.0)) == 128
    assert crossing((128, 512), (0.5, 0.9)) is None


# -- the report ---------------------------------------------------------------------------------


def test_misses_and_failures_are_told(tmp_path: Path) -> None:
    report = load("report")
    far = report.Check("of the limit", 0.5, 0.85)

    def row(name: str, *checks: Any, **more: Any) -> dict[str, Any]:
        judged = [check._asdict() for check in checks]
        return {"name": name, "section": "", "cells": {}, "checks": judged, **more}

    missed = row("slow", far, report.Check("share", 0.01, 0.03, True))
    missed["cells"] = {"ms": 1234.5, "x": None}
    slow = report.Part("steps", [missed], is_done=True)
    assert slow.misses == ["slow: of the limit 0.5, target 0.85"]
    assert "not judged" in str(far._replace(is_judged=False))
    wrong = report.Part("t", [missed, row("bad", failed="NaN | it is")], is_done=True)
    broken = report.Part("b", troubles=["killed by SIGKILL"], is_done=True)
    empty = report.Part("x", is_done=True)
    absent = report.Part("y", [row("y", skipped="no room")], is_done=True)
    begun = report.Part("z", [missed])
    names = ("decode", "tests", "beam", "x", "y", "z")
    parts = dict(zip(names, (slow, wrong, broken, empty, absent, begun), strict=True))
    states = [part.state for part in parts.values()]
    assert states == ["ok", "FAILED", "FAILED", "FAILED", "skipped", "unfinished"]
    run = report.Report({"gpu": "none"}, tmp_path, parts)
    text = run.text("decode")
    assert "MISSED: of the limit >= 0.85; met: share <= 0.03" in text
    assert "1,234" in text
    summary = run.summary()
    assert "MISSED decode: slow: of the limit 0.5, target 0.85" in summary
    assert "FAILED tests: bad: NaN | it is" in summary
    assert "FAILED beam: killed by SIGKILL" in summary
    assert "1 of 2 targets met" in summary
    run.save()
    assert "| FAILED: NaN / it is |" in (tmp_path / "results.md").read_text()
    assert report.load_parts(tmp_path, {"gpu": "none"}, parts) == parts
    assert report.load_parts(tmp_path, {"gpu": "other"}, parts) == {}


# -- what only CUDA does ------------------------------------------------------------------------


class FakeEvent:
    """Of a device that takes a second for everything."""

    now = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        FakeEvent.now += 1.0
        self.at = FakeEvent.now

    def query(self) -> bool:
        return False

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) * 1e3


@pytest.fixture
def cuda_clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("_sleep", "Event", "Stream", "CUDAGraph", "graph", "synchronize", "mem_get_info"):
        assert hasattr(torch.cuda, name)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return load("bench").Clock(torch.device("cuda", 0))


def test_time_on_a_device(cuda_clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", held.append)
    assert cuda_clock.times(lambda: None, 3) == (1.0, 0.0)
    cuda_clock.hold(0.002)
    assert held == [4_000_000]
    times = load("bench").Times.of([1.0, 2.0, 3.0, 2.0, 2.0])
    assert times.median == 2.0
    assert times.cells()["ms"] == 2_000


def test_the_host_s_share_of_a_step(cuda_clock: Any) -> None:
    """Steps that end every second; on the device alone, once the host is ahead, 0.9 of it."""
    engines = load("timed_engine")

    def step(begin: float, end: float, *, is_held: bool) -> Any:
        marks = []
        for at in (begin, end):
            marks.append(FakeEvent(enable_timing=True))
            marks[-1].at = at
        return engines.Step(*marks, 0.1, is_held, num_rows=2, num_prefill=0, num_keys=20)

    figures = engines.DecodeFigures.of
    timed = [step(at, at + 1.0, is_held=False) for at in range(5)]
    held = [step(9, 9.9, is_held=True), step(11, 11.2, is_held=False), step(13, 13.9, is_held=True)]
    found = figures(cuda_clock, timed, held, 2)
    assert (found.step.median, found.num_keys) == (1.0, 10)
    assert found.device.median == pytest.approx(0.9)
    assert found.host_share == pytest.approx(0.1)
    with pytest.raises(RuntimeError, match="no step was queued before"):
        figures(cuda_clock, timed, held[1:2], 2)
    with pytest.raises(AssertionError):
        figures(cuda_clock, timed, held, 3)


def test_a_row_that_fails_costs_no_other() -> None:
    rows: list[Any] = []
    bench = dry_bench(rows)
    with bench.case("broken", "s"):
        raise ValueError("what is wrong")
    with bench.case("large"):
        raise load("jobs").Skip("no room")
    with bench.case("fine"):
        bench.row("fine", {"ms": 1.0})
    assert [load("report").verdict(row) for row in rows] == [
        "FAILED: ValueError: what is wrong",
        "skipped: no room",
        "",
    ]
    assert rows[0]["section"] == "s"

    def broken_device() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    bench.clock.wait = broken_device
    with pytest.raises(RuntimeError, match="illegal memory access"), bench.case("sticky"):
        raise RuntimeError("of a kernel")
    assert rows[-1]["name"] == "sticky"


def test_what_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = dry_bench([])
    bench.is_dry, bench.device = False, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (79 << 30, 80 << 30))
    bench.check_memory("llama-3.1-8b", 262_144)
    with pytest.raises(load("jobs").Skip, match=r"needs 107 GiB, 79 GiB of 80 GiB are free"):
        bench.check_memory("llama-3.1-8b", 262_144, 2)
    assert issubclass(torch.AcceleratorError, RuntimeError)


def test_lengths_like_those_of_sharegpt() -> None:
    found = load("part_throughput").draw_lengths(1_000)
    means = [sum(side) / len(side) for side in zip(*found, strict=True)]
    assert 130 < means[0] < 175
    assert 300 < means[1] < 350
    assert max(a for a, _ in found) <= 2_048
    assert min(min(one) for one in found) >= 4


def test_computed_tokens_are_judged() -> None:
    judge, bench = load("part_throughput").judge, dry_bench([])
    assert judge([1.0, 1.0005], bench) == ""
    assert "computed again" in judge([1.0, 1.01], bench)
    assert judge([0.9], bench) == ""
    bench.is_dry = False
    assert "other runs" in judge([0.9], bench)
