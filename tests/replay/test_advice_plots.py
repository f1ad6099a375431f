"""Pictures of an advice: what they show, and the report in one file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from radixserve.cli import main
from radixserve.replay import CacheSpec, build_paths, replay_direct
from radixserve.replay.edges import edge_finding, tree_edges
from radixserve.replay.losses import losses_over_time
from radixserve.replay.sizing import LruCurve
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


def test_edges_are_read_and_lost_as_in_a_replay() -> None:
    """Sums over edges are those over requests; a shared prompt is the hottest edge."""
    trace = make_workload("rag", 100)
    paths = build_paths(trace)
    hits = LruCurve(trace, paths).hits(2 * trace.longest)
    edges = tree_edges(trace, paths, hits)
    assert edges.hit_tokens.sum() == hits.sum()
    assert edges.lost_tokens.sum() == (paths.reusable - hits).sum() > 0
    assert (edges.parents < np.arange(len(edges.parents))).all()
    for edge in range(len(edges.starts)):
        parent = int(edges.parents[edge])
        end = 0 if parent < 0 else edges.starts[parent] + edges.lengths[parent]
        assert edges.starts[edge] == end
        assert parent < 0 or edges.requests[edge] <= edges.requests[parent]

    small = make_trace([([1, 2, 3, 4, 10 + n, 0], ()) for n in range(4)] * 2)
    paths = build_paths(small)
    edges = tree_edges(small, paths, np.minimum(paths.reusable, 4))
    (hot,) = edges.largest(1, edges.hit_tokens)
    assert (edges.starts[hot], edges.lengths[hot], edges.requests[hot]) == (0, 4, 8)
    assert edges.hit_tokens[hot] == 7 * 4
    assert sorted(edges.lost_tokens.tolist()) == [0, 1, 1, 1, 1]
    finding = edge_finding(small, edges, lambda tokens: f"<{tokens[0]}>")
    assert finding.rows[0] == ["0", "4", "8", "28", "0", "<1>"]
    assert {row[-1] for row in finding.rows[1:]} == {"<10>", "<11>", "<12>", "<13>"}


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
    assert "time to the first token" in page
    assert "edges of the tree" in page
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
