"""The comparison of two commits: turns, medians and the verdict, over figures of the test."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def compare() -> Any:
    return importlib.import_module("compare_commits")


def test_commits_take_turns_in_alternating_order(compare: Any) -> None:
    calls: list[str] = []

    def seconds(name: str, value: float) -> Any:
        return lambda: calls.append(name) or {"both": value, name: 1.0}

    found = compare.in_turns(seconds("base", 3.0), seconds("head", 2.0), 3)
    assert calls == ["head", "base", "base", "head", "head", "base"]
    assert found == {"both": [{"base": 3.0, "head": 2.0}] * 3}


@pytest.mark.parametrize(("head", "status"), [(2.0, None), (2.04, None), (2.06, 1)])
def test_a_slower_case_fails_the_command_and_is_named(
    compare: Any,
    head: float,
    status: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pairs = [{"base": 2.0, "head": head}, {"base": 2.0, "head": 9.0}, {"base": 2.0, "head": 0.5}]
    monkeypatch.setattr(compare, "measure", lambda *_: {"decode": pairs, "chat": pairs[2:]})
    monkeypatch.setattr(compare, "checked_out", lambda commit, _: NoTree(commit))
    monkeypatch.setattr(sys, "argv", ["compare_commits.py", "--base", "abc"])
    if status is None:
        compare.main()
    else:
        with pytest.raises(SystemExit, match=r"^slower than 0\.98 of abc: decode$"):
            compare.main()
    lines = capsys.readouterr().out.splitlines()
    ratios = [f"{ratio:.2f}" for ratio in (2.0 / head, 2.0 / 9.0, 2.0 / 0.5)]
    assert lines[-2].split() == ["decode", "2,000", f"{1e3 * head:,.0f}", *ratios]
    assert lines[-1].split() == ["chat", "2,000", "500", "4.00", "4.00", "4.00"]


class NoTree:
    def __init__(self, commit: str) -> None:
        self._commit = commit

    def __enter__(self) -> Path:
        return Path(self._commit)

    def __exit__(self, *_: object) -> None:
        pass


def test_a_base_is_needed(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_commits.py"])
    with pytest.raises(SystemExit) as stopped:
        compare.main()
    assert stopped.value.code == 2
