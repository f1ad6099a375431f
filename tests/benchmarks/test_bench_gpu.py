"""The GPU benchmark on the CPU: every part runs, what is wrong is found, jobs stay apart."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radixserve.attention.cuda import cascade
from radixserve.attention.cuda import flashinfer as flashinfer_backend
from radixserve.models.sizes import SIZES
from radixserve.output import Completion
from tests.attention.fake_flashinfer import Fake, mark_sides

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def benchmarks_on_path() -> Iterator[None]:
    """And what the parts change in this process as it was before."""
    with pytest.MonkeyPatch.context() as patch:
        folders = [str(folder) for folder in (ROOT / "benchmarks", ROOT, ROOT / "kernels")]
        patch.syspath_prepend(folders[0])
        patch.setenv("PYTHONPATH", os.pathsep.join(folders))
        for name in ("SHARE_BYTES", "MERGE_TOKENS"):
            patch.setattr(cascade, name, getattr(cascade, name))
        yield
    SIZES.pop("bench-tiny", None)


def load(name: str) -> Any:
    return importlib.import_module(f"gpu.{name}")


def dry_bench(rows: list[Any], **settings: Any) -> Any:
    ceilings = load("limits").Ceilings(1e10, 1e11)
    given = {"is_dry": True, "ceilings": ceilings, **settings}
    keep = {"row": rows.append}
    return (
        load("settings")
        .Settings(**given)
        .open(lambda kind, value: keep.get(kind, lambda _: None)(value))
    )


# -- the whole dry run, in this process ---------------------------------------------------------


def run_here(jobs: Any, settings: Any, log: Path, tell: Any, **_: Any) -> dict[str, Any]:
    """`run_jobs` without processes."""
    del log
    attempt = load("jobs").attempt
    return {
        job.group: attempt(job, settings, lambda *told, job=job: tell(job.group, *told))
        for job in jobs
    }


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict[str, Any], Path]:
    """Exit code, output, results.json and the folder."""
    folder = tmp_path_factory.mktemp("gpu")
    run = load("session")
    groups = ("rows", "draws", "attention bf16 16", "triton bf16", "flashinfer bf16")
    specs = [replace(spec, groups=groups) if spec.name == "kernels" else spec for spec in run.PARTS]
    counts = "2 passed, 40 deselected in 1.00s\n"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out:
        patch.setattr(run, "run_jobs", run_here)
        patch.setattr(run, "PARTS", specs)  # the kernels' other groups differ in dtype and size
        patch.setattr(load("part_kernels"), "PAGE_SIZES", (16,))
        done = type("Done", (), {"stdout": counts, "stderr": "", "returncode": 0})
        patch.setattr(load("part_tests").subprocess, "run", lambda *_, **__: done)
        code = run.run_all(run.parse_arguments(["--out", str(folder), "--dry-run"]))
    return code, out.getvalue(), json.loads((folder / "results.json").read_text()), folder


def test_every_part_runs(dry_run: tuple[int, str, dict[str, Any], Path]) -> None:
    code, out, document, folder = dry_run
    assert code == 0, out
    names = [spec.name for spec in load("session").PARTS]
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
    "kernels": ["cases", "worst error of what is allowed"],
    "parity": ["tokens", "ties", "replays", "shared steps", "hidden ms"],
    "tests": ["passed", "failed", "error", "skipped"],
    "decode": ["step ms", "+-", "limit ms", "of limit", "device ms", "host share", "tok/s"],
    "prefill": ["first token ms", "limit ms", "of limit", "tok/s", "cold / cached"],
    "shared": ["flat ms", "limit ms", "cascade ms", "its limit", "gain"],
    "throughput": ["on s", "off s", "off / on", "computed", "of ideal"],
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
    assert goals["beam"] == ["tok/s of the best answers"]
    profiles = [row["details"].get("profile") for row in parts["decode"]["rows"]]
    assert any(isinstance(one, dict) and one for one in profiles)
    kernels = {row["name"].split(",")[0] for row in parts["kernels"]["rows"]}
    assert {
        "rms_norm",
        "add_rms_norm",
        "silu_and_mul",
        "rope_and_store",
        "copy_page_prefixes",
        "flat_indices",
        "argmax",
        "token_logprob",
        "sample",
        "decode",
        "extend",
        "merge_states",
        "steps",
        "graphs",
    } <= kernels
    skipped = [row["skipped"] for row in parts["kernels"]["rows"] if row["skipped"]]
    assert skipped == ["no flashinfer: the device is cpu"]


def test_parts_of_an_earlier_run_are_kept(
    dry_run: tuple[int, str, dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = load("session"), dry_run[3]
    before = json.loads((folder / "results.json").read_text())
    monkeypatch.setattr(run, "run_jobs", run_here)
    options = ["--out", str(folder), "--dry-run", "--parts", "beam"]
    assert run.run_all(run.parse_arguments(options)) == 0
    after = json.loads((folder / "results.json").read_text())
    assert list(after["parts"]) == list(before["parts"])
    for name, part in before["parts"].items():
        assert (after["parts"][name] == part) == (name != "beam")
    assert run.run_all(run.parse_arguments([*options, "--page-size", "16", "--quick"])) == 0
    other = json.loads((folder / "results.json").read_text())
    assert list(other["parts"]) == ["limits", "beam"]  # other settings; the limits are needed


def test_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = load("session")
    monkeypatch.setattr(run, "run_jobs", run_here)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.run_all(run.parse_arguments(["--out", str(tmp_path)])) == 2
    assert "PyTorch finds no CUDA device; --dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parts", "beam,z"], "no such part: z; there are limits,"),
        (["--page-size", "0"], "1 to 64"),
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
    row = report.Row(
        "slow", {"ms": 1234.5, "x": None}, (far, report.Check("share", 0.01, 0.03, True))
    )
    slow = report.Part("decode", "steps", [row], is_done=True)
    assert slow.state == "ok"
    assert slow.misses == ["slow: of the limit 0.5, target 0.85"]
    assert "MISSED: of the limit >= 0.85; met: share <= 0.03" in slow.table()
    assert "1,234" in slow.table()
    assert "not judged" in replace(row, checks=(replace(far, is_judged=False),)).verdict
    wrong = report.Part(
        "kernels", "k", [row, report.Row("bad", failed="NaN | it is")], is_done=True
    )
    broken = report.Part("beam", "b", troubles=["killed by SIGKILL"], is_done=True)
    empty = report.Part("x", "x", is_done=True)
    absent = report.Part("y", "y", [report.Row("y", skipped="no room")], is_done=True)
    parts = {part.name: part for part in (slow, wrong, broken, empty, absent)}
    states = [part.state for part in parts.values()]
    assert states == ["ok", "FAILED", "FAILED", "FAILED", "skipped"]
    assert report.Part("z", "z", [row]).state == "unfinished"
    run = report.Report({"gpu": "none"}, tmp_path, parts)
    summary = run.summary()
    assert "MISSED decode: slow: of the limit 0.5, target 0.85" in summary
    assert "FAILED kernels: bad: NaN | it is" in summary
    assert "FAILED beam: killed by SIGKILL" in summary
    assert "1 of 2 targets met" in summary
    run.save()
    assert "| FAILED: NaN / it is |" in (tmp_path / "results.md").read_text()
    again = report.load_parts(tmp_path, {"gpu": "none"}, parts)
    assert {name: part.document() for name, part in again.items()} == {
        name: part.document() for name, part in parts.items()
    }
    assert report.load_parts(tmp_path, {"gpu": "other"}, parts) == {}


# -- what is wrong is found ---------------------------------------------------------------------


def kernel_rows(bench: Any, check: Any, *args: Any) -> dict[str, str]:
    """What failed, by kernel, with memory poisoned as in the part."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        check(bench, *args)
    finally:
        torch.use_deterministic_algorithms(False)
    return {}


def test_wrong_kernels_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, rows_of = load("kernel_attention"), load("kernel_rows")
    ops = attention.gpu_ops
    decode, norm, flat = ops.decode, ops.rms_norm, ops.flat_indices

    def late(*args: Any, **kwargs: Any) -> Any:
        """The last row is never written."""
        out = decode(*args, **kwargs)
        kwargs["out"][-1] = math.nan
        return out

    def blind(q: Any, *args: Any, **kwargs: Any) -> Any:
        return decode(q, *args, **{**kwargs, "scale": 0.2})

    def greedy(*args: Any, **kwargs: Any) -> Any:
        """Reads one key too many."""
        return decode(*args[:5], args[5] + 1, *args[6:], **kwargs)

    for broken in (late, blind, greedy):
        monkeypatch.setattr(ops, "decode", broken)
        found: list[Any] = []
        kernel_rows(dry_bench(found), attention.check_direct, torch.float32, 16, [(4, 2, 16)])
        failed = [row.name for row in found if row.failed]
        assert failed == ["decode, fp32 pages of 16"], broken
    monkeypatch.setattr(ops, "rms_norm", lambda x, w, eps, out: norm(x, w, eps, out).mul_(1.02))
    monkeypatch.setattr(ops, "flat_indices", lambda *args: flat(*args).clone().flip(0))
    monkeypatch.setattr(ops, "sample", lambda logits, *_: logits.argmin(-1))
    found = []
    kernel_rows(dry_bench(found), rows_of.check_rows)
    kernel_rows(dry_bench(found), rows_of.check_draws)
    assert {row.name for row in found if row.failed} == {"rms_norm", "flat_indices", "sample"}


def test_a_kernel_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = load("kernel_attention")
    monkeypatch.setattr(attention.gpu_ops, "extend", lambda *_, **__: 1 / 0)
    found: list[Any] = []
    kernel_rows(dry_bench(found), attention.check_direct, torch.float32, 16, [(4, 2, 16)])
    failed = {row.name: row.failed for row in found if row.failed}
    assert list(failed) == ["extend, fp32 pages of 16"]
    assert "ZeroDivisionError" in failed["extend, fp32 pages of 16"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """FlashInfer, in torch operations on the CPU."""
    library = Fake()
    monkeypatch.setattr(flashinfer_backend, "unsupported_reason", lambda *_: "")
    monkeypatch.setattr(flashinfer_backend, "import_error", lambda: "")
    monkeypatch.setattr(flashinfer_backend, "load_library", lambda: library.library)
    mark_sides(monkeypatch)
    return library


def test_flashinfer_s_part(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cases call what they are there for, and find what is wrong with it."""
    load("part_shared").always_share()
    backends = load("kernel_backends")
    found: list[Any] = []
    check = ("flashinfer", torch.float16, 16, (4, 2, 16))
    kernel_rows(dry_bench(found), backends.check_backend, *check)
    assert [(row.name, row.failed) for row in found] == [
        ("steps, fp16 pages of 16", ""),
        ("graphs, fp16 pages of 16", ""),
    ]
    assert {"decode.run", "prefill.run", "merge_state_in_place"} <= set(fake.calls)
    monkeypatch.setattr(fake, "_merge_state_in_place", lambda *_: None)
    found.clear()
    kernel_rows(dry_bench(found), backends.check_backend, *check)
    assert all(row.failed for row in found)


def answer(token_ids: list[int], logprobs: list[float], second: tuple[int, float]) -> Completion:
    """With the same second best token everywhere."""
    fields = dict.fromkeys(Completion.__dataclass_fields__)
    tops = [
        {token: lp, second[0]: second[1]} for token, lp in zip(token_ids, logprobs, strict=True)
    ]
    given = {"token_ids": token_ids, "logprobs": logprobs, "top_logprobs": tops}
    return Completion(**{**fields, **given})


def test_tokens_agree_up_to_ties() -> None:
    agree = load("part_parity").agree
    wanted = [answer([5, 6, 7], [-1.0, -1.0, -1.0], (9, -1.05))]
    prompts = [[1]]

    def found(tokens: list[int], logprob: float = -1.0) -> Any:
        return agree(prompts, [answer(tokens, [logprob] * 3, (0, -9.0))], wanted, 0.1)

    assert (found([5, 6, 7]).num_tokens, found([5, 6, 7]).wrong) == (3, "")
    tie = found([5, 9, 1])  # what follows a tie is not compared
    assert (tie.num_tokens, tie.num_ties, tie.wrong) == (1, 1, "")
    assert "token 1: inf below" in found([5, 8, 7]).wrong
    assert "off by 0.2" in found([5, 6, 7], -1.2).wrong
    far = [answer([5, 6, 7], [-1.0, -1.0, -1.0], (9, -1.5))]
    assert "0.5 below" in agree(prompts, [answer([9, 9, 9], [-1.0] * 3, (0, -9.0))], far, 0.1).wrong


def test_parity_notices_what_was_not_tried() -> None:
    """Without shared pages a setting that is to have them fails."""
    parity = load("part_parity")
    settings = {**parity.BASE, "attention_backend": "triton"}
    stats = {"overlapped_s": 0.0}
    seen = {"replays": 0, "shared": 0}
    choices = type("Choices", (), {"attention_backend": "triton"})
    usage = type("Usage", (), {"cached_tokens": 3, "prompt_tokens": 9})
    runs = [[], [type("Answer", (), {"usage": usage})]]
    told = parity._unused(settings, choices, stats, seen, runs)
    assert told == (
        "0 graphs replayed; 0 steps read shared pages together; overlap; "
        "a warm prompt was computed again"
    )


# -- jobs ---------------------------------------------------------------------------------------

FAKE_PART = """
import os, signal, subprocess, sys, time
from gpu.jobs import Skip

class Settings:
    def open(self, tell):
        return tell

def run(tell, group):
    tell("row", group)
    if group == "raises":
        raise ValueError("what is wrong")
    if group == "skips":
        raise Skip("no room")
    if group == "leaves":
        os._exit(7)
    if group == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if group == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        tell("child", child.pid)
        time.sleep(600)
    print("said by", group)
"""


@pytest.fixture
def fake_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Of a part that does everything wrong; its jobs do not import pytest once more."""
    (tmp_path / "fake_part.py").write_text(FAKE_PART)
    monkeypatch.syspath_prepend(str(tmp_path))
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None)
    monkeypatch.delattr(main, "__file__", raising=False)
    yield importlib.import_module("fake_part").Settings()
    del sys.modules["fake_part"]


def test_jobs_cannot_hurt_each_other(tmp_path: Path, fake_settings: Any) -> None:
    jobs = load("jobs")
    groups = ("raises", "skips", "leaves", "dies", "works")
    asked = [jobs.Job("fake_part", group, 250.0) for group in groups]
    told: list[tuple[str, str, Any]] = []
    log = tmp_path / "log.txt"
    ended = jobs.run_jobs(
        asked, fake_settings, log, lambda *one: told.append(one), width=2, method="spawn"
    )
    assert sorted(told) == sorted((group, "row", group) for group in groups)
    assert ended["works"] == jobs.Ended()
    assert ended["skips"] == jobs.Ended(skipped="no room")
    assert ended["raises"].trouble == "raises: ValueError: what is wrong"
    assert ended["leaves"].trouble == "leaves: ended with exit code 7, see the log"
    assert ended["dies"].trouble == "dies: killed by SIGKILL, see the log"
    assert "said by works" in log.read_text()
    assert "ValueError: what is wrong" in log.read_text()


def test_jobs_that_hang_end_with_all_they_started(
    tmp_path: Path, fake_settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, passed, children = load("jobs"), [0.0], []

    def tell(group: str, kind: str, value: Any) -> None:
        """When the job has come so far, its time is over."""
        del group
        if kind == "child":
            children.append(value)
            passed.append(1e6)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[-1])
    monkeypatch.setattr(jobs, "time", clock)
    asked = [jobs.Job("fake_part", "hangs", 250.0)]
    ended = jobs.run_jobs(asked, fake_settings, tmp_path / "log.txt", tell, preload=())
    assert ended["hangs"].trouble == "hangs: no end after 250 s"
    (child,) = children
    for _ in range(200):
        if not is_running(child):
            return
        time.sleep(0.05)
    pytest.fail("what the job started goes on")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIG_DFL)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_jobs_are_started_another_way_if_need_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that was touched before processes were forked can be used in new ones only."""
    run, jobs = load("session"), load("jobs")
    tried = []

    def fake_jobs(asked: Any, *_: Any, method: str) -> Any:
        tried.append(method)
        return {asked[0].group: jobs.Ended("" if method == "spawn" else "it was used before")}

    monkeypatch.setattr(run, "run_jobs", fake_jobs)
    assert run.find_machine(None, tmp_path) == ({}, "", "spawn")
    assert tried == ["forkserver", "spawn"]


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
    return load("clock").Clock(torch.device("cuda", 0))


def test_time_on_a_device(cuda_clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", held.append)
    assert cuda_clock.samples(lambda: None, 3) == [1.0, 1.0, 1.0]
    cuda_clock.hold(0.002)
    assert held == [4_000_000]
    times = load("clock").Times.of([1.0, 2.0, 3.0, 2.0, 2.0])
    assert (times.median, times.num_samples) == (2.0, 5)
    assert times.cells()["ms"] == 2_000


def test_the_host_s_share_of_a_step(cuda_clock: Any) -> None:
    """Steps that end every second; on the device alone, once the host is ahead, 0.9 of it."""
    stages = load("stage")

    def step(begin: float, end: float, *, is_held: bool) -> Any:
        marks = []
        for at in (begin, end):
            marks.append(FakeEvent(enable_timing=True))
            marks[-1].at = at
        return stages.Step(*marks, 0.1, is_held, num_rows=2, num_prefill=0, num_keys=20)

    figures = stages.DecodeFigures.of
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


def test_what_does_not_fit_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = dry_bench([])
    bench.is_dry, bench.device = False, torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (79 << 30, 80 << 30))
    bench.check_memory("llama-3.1-8b", 262_144)
    with pytest.raises(load("jobs").Skip, match=r"needs 111 GiB, 79 GiB of 80 GiB are free"):
        bench.check_memory("llama-3.1-8b", 262_144, 2)
    assert issubclass(torch.AcceleratorError, RuntimeError)


def test_computed_tokens_are_judged() -> None:
    judge, bench = load("part_throughput").judge, dry_bench([])
    assert judge([1.0, 1.0005], bench) == ""
    assert "computed again" in judge([1.0, 1.01], bench)
    assert judge([0.9], bench) == ""
    bench.is_dry = False
    assert "other runs" in judge([0.9], bench)
