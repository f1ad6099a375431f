"""The loop of docs/rl.md learns something."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "rl.md").read_text()


def test_the_loop_learns(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    section = PAGE.split("\n## A loop\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(code, "docs/rl.md", "exec"), names)
    rewards = names["rewards"]
    assert re.fullmatch(r"0\.\d{3} -> 0\.\d{3}\n", capsys.readouterr().out)
    assert sum(rewards[-3:]) > 1.2 * sum(rewards[:3]), rewards
