"""The branch benchmark: one small run of everything, and its reports; no time is asserted."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks.conftest import ROOT, Run


@pytest.mark.long
def test_a_quick_run(tmp_path: Path, run: Run) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- branch-cpu -->\nstale\n<!-- end -->\nafter\n")
    options = ["--quick", "--json", "--save", str(tmp_path), "--page", str(page)]
    result = run("bench_branch.py", *options)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert (tmp_path / "branch-cpu.json").read_text() == result.stdout
    assert {"cpu", "cores", "torch", "transformers", "threads", "attention"} <= set(
        document["settings"]
    )
    cases = {case["name"]: case for case in document["cases"]}
    assert set(cases) == {"a", "b", "c", "d3", "e"}
    for case in cases.values():
        assert case["checks"]
        assert all(case["checks"].values())
        assert all(len(row) == len(case["columns"]) for row in case["rows"])
    names = {name: [row[0] for row in case["rows"]] for name, case in cases.items()}
    assert names["a"] == ["radix", "cold", "transformers"]
    assert names["b"] == ["tree", "flat"]
    computed = {name: [row[4] for row in cases[name]["rows"]] for name in ("a", "d3")}
    assert computed == {"a": [67, 256, 256], "d3": [24, 72]}
    assert [row[2:] for row in cases["e"]["rows"]] == [[0, 0, 8], [0, 8 * 9 * 4_096, 8]]
    markdown = (tmp_path / "branch-cpu.md").read_text()
    assert "| transformers |" in markdown
    assert "- ok: the prompt is computed once, its last token once a sample" in markdown
    text = page.read_text()
    assert text.startswith("before\n<!-- branch-cpu -->\nMeasured with: cpu ")
    assert text.endswith("|\n<!-- end -->\nafter\n")
    assert "stale" not in text
    assert "| page size 16 |" in text


def test_failed_claims_are_told() -> None:
    bench = importlib.import_module("bench_branch")
    rows = [("one", 0.123456), ("two", None)]
    case = bench.Case("x", "title", ("", "s"), rows, {"good": True, "bad": False})
    assert case.failed == ["x: bad"]
    text = case.section().text()
    assert "ok: good" in text
    assert "FAILED: bad" in text
    assert "0.123" in text
    assert bench.Case("x", "title", ("", "s"), rows, {"good": True}).failed == []


def test_a_page_without_markers_is_refused() -> None:
    replace_block = importlib.import_module("harness.report").replace_block
    with pytest.raises(ValueError, match="no place for the tables"):
        replace_block("<!-- branch-cpu --> no end", "branch-cpu", "text")
    page = replace_block((ROOT / "docs" / "branching.md").read_text(), "branch-cpu", "here it is")
    assert "<!-- branch-cpu -->\nhere it is\n<!-- end -->" in page


def test_new_tokens_of_a_chat() -> None:
    """Two sessions, a template head of two tokens, two turns, answers of three tokens."""
    base, work = importlib.import_module("engine.base"), importlib.import_module("branching.work")
    first = ((1, 2, 5, 9), (1, 2, 6, 9))
    second = tuple((*prompt, 70, 71, 72, 8) for prompt in first)
    answers = [base.Answer([0, 0, 0], prompt=prompt) for prompt in (*first, *second)]
    # of the first turn 1 2, then 5 9 and 6 9; of the second the last token said and the new one
    assert work.new_tokens(answers, num_sessions=2, num_new=3) == 6 + 2 * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "a,z"], "no such case: z"), (["--repeats", "0"], "must be at least 1")],
)
def test_wrong_arguments(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_branch.py", *arguments])
    with pytest.raises(SystemExit) as leaving:
        importlib.import_module("bench_branch").main()
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err
