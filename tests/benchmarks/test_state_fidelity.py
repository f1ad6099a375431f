"""Recurrent states that are rounded, of a small random hybrid."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from radixserve_kernels.cpu_ops import unsupported_reason

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.skipif(bool(unsupported_reason(torch.float32)), reason="no CPU kernels")
def test_of_a_random_hybrid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The more often states are rounded, the further distributions move."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    spec = importlib.util.spec_from_file_location(
        "state_fidelity", BENCHMARKS / "state_fidelity.py"
    )
    assert spec is not None
    assert spec.loader is not None
    command = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(command)
    args = Namespace(width=128, num_prompts=1, prompt=40, tokens=70)
    rows = {form: float(kl) for _, form, kl, _, _ in command.measure("qwen3_5_text", args)}
    assert set(rows) == {*command.FORMS, "K and V int8"}
    assert rows["bfloat16, once"] < rows["int8, Hadamard, every token"]
    assert rows["int8, Hadamard, once"] < rows["int8, Hadamard, every token"]
    assert rows["int8, Hadamard, every token"] > 0
