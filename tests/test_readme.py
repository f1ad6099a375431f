"""The Python of the README and of two pages of docs runs as it stands there, and the README's quick
start has two commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def examples(text: str) -> dict[str, str]:
    """The Python of each chapter."""
    sections = {section.partition("\n")[0]: section for section in text.split("\n## ")[1:]}
    return {
        name: code
        for name, section in sections.items()
        for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    }


PYTHON = examples(README)
BRANCHING = examples((ROOT / "docs" / "branching.md").read_text())
PREFIXES = examples((ROOT / "docs" / "prefixes.md").read_text())
PRINTED = {
    "In Python": r"Lookup\(cached_len=.*\nUsage\(.*computed_tokens=",
    "Chat": r"Usage\(.*computed_tokens=",
    "Branches": r"^\d The json module.* and",
    "Beam search": r"^(-\d\.\d{3} .*\n){4}Usage\(",
    "Search": r"^prompt of 3 tokens 'The json module'\n20 thoughts.*├── ★ .*\n-\d+(\.0)? ",
    "The cache alone": r"^60 Lookup\(cached_len=60, reason='diverged', position=60, .*found=5\)$",
}


def test_quick_start_is_two_commands() -> None:
    section = README.split("## Quick start")[1].split("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    demo, tests = block.strip().splitlines()
    assert demo.startswith("pip install") and demo.endswith("radixserve demo")  # noqa: PT018
    assert tests.startswith("pip install") and tests.endswith("pytest")  # noqa: PT018


PRINTED_PREFIXES = {"Put the static part first": r"^rules 537 195 73%\ntime 27 705 4%$"}
PRINTED_BRANCHING = {
    "A branch is a position": r"^Usage\(.* cached_tokens=0.*\nUsage\(.*\n reads -.*\n eats -",
    "Search": r"thoughts: .*\n└── .*",
}


@pytest.mark.parametrize(
    ("code", "printed"),
    [*((PYTHON[name], PRINTED[name]) for name in PYTHON),
     *((BRANCHING[name], PRINTED_BRANCHING[name]) for name in BRANCHING),
     *((PREFIXES[name], PRINTED_PREFIXES[name]) for name in PREFIXES)],
    ids=[*PYTHON, *(f"docs: {name}" for name in (*BRANCHING, *PREFIXES))],
)  # fmt: skip
def test_examples_run(
    code: str,
    printed: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "an example", "exec"), {})
    out = capsys.readouterr().out
    assert re.search(printed, out.rstrip(), re.DOTALL), out
