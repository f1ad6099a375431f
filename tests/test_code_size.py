"""Bounds on what makes code hard to read: long functions, branches, layouts kept by hand."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"radixserve": ROOT / "radixserve", "kernels": ROOT / "kernels" / "radixserve_kernels"}
MOST_LINES = 80  # of a function
# Functions that are longer, by package. Kernels for GPUs have a line for each of many arguments.
NUM_LONG = {"radixserve": 1, "kernels": 5}
MOST_BRANCHES = 15  # McCabe's complexity of a function
NUM_BRANCHED = 2  # functions with more, of both packages
NUM_SKIPS = 5  # lines that ruff does not format, of both packages


def sources(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_functions_are_short(package: str) -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sources(PACKAGES[package])
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MOST_LINES
    ]
    assert len(long) <= NUM_LONG[package], long


def test_few_functions_have_many_branches() -> None:
    pytest.importorskip("ruff", reason="ruff comes with the extra [test]")
    bound = f"lint.mccabe.max-complexity = {MOST_BRANCHES}"
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901"]
    command += ["--config", bound, "--output-format", "json", *map(str, PACKAGES.values())]
    found = json.loads(subprocess.run(command, check=False, capture_output=True).stdout)
    places = [f"{one['filename']}:{one['location']['row']} {one['message']}" for one in found]
    assert len(places) <= NUM_BRANCHED, places


def test_ruff_formats_nearly_every_line() -> None:
    mark = "# fmt: " + "skip"
    lines = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in PACKAGES.values()
        for path in sources(folder)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if mark in line
    ]
    assert len(lines) <= NUM_SKIPS, lines
