"""Pictures of an advice: what they show, and the report in one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixserve.cli import main
from radixserve.replay import CacheSpec, replay_direct
from radixserve.replay.losses import losses_over_time
from radixserve.replay.workloads import make_workload
from tests.replay.traces import make_trace


@pytest.mark.parametrize("name", ["rag", "code", "multi-turn"])
def test_losses_add_up_to_what_a_replay_computes(name: str) -> None:
    trace = make_workload(name, 120)
    size = 2 * trace.longest
    losses, result = losses_over_time(trace, size), replay_direct(trace, CacheSpec(size))
    assert len(losses.edges) == len(losses.prompts) + 1
    assert losses.prompts.sum() == trace.prompt_tokens
    computed = sum(counts.sum() for counts in losses.computed.values())
    assert trace.prompt_tokens - computed == result.hit_tokens
    assert losses.computed["evicted"].sum() > 0
    if name == "code":
        assert losses.computed["diverged"].sum() > 0


def test_losses_without_times_are_by_request() -> None:
    trace = make_trace([([1, 2, 3, n], ()) for n in range(8)] + [([9] * 90, ())])
    losses = losses_over_time(trace, 80, 4)
    assert losses.edges.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert losses.prompts.sum() == 32  # one does not fit
    assert losses.computed["new"].sum() == 4 + 7


def test_the_command_draws_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra [plot]")
    picture, report = tmp_path / "advice.png", tmp_path / "advice.html"
    options = ["--limit", "30", "--cache-tokens", "9k", "--report", str(report)]
    assert main(["replay", "workload:chat", "--advise", *options, "--save-plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = report.read_text()
    assert page.count("<svg") == 1
    assert "<td>9,000</td>" in page
    assert "LRU by size" in page
    assert "<script" not in page
    assert (
        main(["replay", "workload:code", "--limit", "60", "--diagnose", "--report", str(report)])
        == 0
    )
    assert "why prompts part" in report.read_text()
    capsys.readouterr()
    for wrong in (["--save-plot", "x.png"], ["--report", "x.html"]):
        assert main(["replay", "workload:chat", *wrong]) != 0
        assert "needs --advise" in capsys.readouterr().err
    wrong_end = ["--advise", "--save-plot", str(tmp_path / "x.txt")]
    assert main(["replay", "workload:chat", *wrong_end]) != 0
