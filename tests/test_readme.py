"""The README's Python runs as it stands there, and its quick start has two commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
SECTIONS = {section.partition("\n")[0]: section for section in README.split("\n## ")[1:]}
PYTHON = {
    name: code
    for name, section in SECTIONS.items()
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
}
PRINTED = {
    "In Python": r"Lookup\(cached_len=.*\nUsage\(.*computed_tokens=",
    "Chat": r"Usage\(.*computed_tokens=",
    "Branches": r"^\d The json module.* and",
    "The cache alone": r"^60 Lookup\(cached_len=60, reason='diverged', position=60, .*found=5\)$",
}


def test_quick_start_is_two_commands() -> None:
    section = README.split("## Quick start")[1].split("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    demo, tests = block.strip().splitlines()
    assert demo.startswith("pip install") and demo.endswith("radixserve demo")  # noqa: PT018
    assert tests.startswith("pip install") and tests.endswith("pytest")  # noqa: PT018


@pytest.mark.parametrize("name", PYTHON)
def test_examples_run(
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(PYTHON[name], "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert re.search(PRINTED[name], out.rstrip(), re.DOTALL), out
