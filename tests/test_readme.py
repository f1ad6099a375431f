"""The README's Python runs as it stands there, and its quick start has two commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_quick_start_is_two_commands() -> None:
    section = README.split("## Quick start")[1].split("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    demo, tests = block.strip().splitlines()
    assert demo.startswith("pip install") and demo.endswith("radixserve demo")  # noqa: PT018
    assert tests.startswith("pip install") and tests.endswith("pytest")  # noqa: PT018


@pytest.mark.parametrize("code", PYTHON, ids=["runtime", "cache"])
def test_examples_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    out = capsys.readouterr().out
    if "Runtime" in code:
        assert "cached_len=" in out
        assert "computed_tokens=" in out
    else:
        assert out.startswith("60 Lookup(cached_len=60, reason='diverged', position=60, ")
        assert out.rstrip().endswith("found=5)")
