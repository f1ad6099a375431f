"""The decoder over several backends against the compiled one: logits, and K and V."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixserve.attention.choice import make_backend
from radixserve.models.base import LanguageModel
from radixserve.models.cpu_decoder import load_cpu_decoder
from radixserve.models.decoder import load_decoder
from radixserve.models.source import ModelSource, checkpoint
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.checkpoints import EXPERTS, NATIVE, NATIVE_PARTS, make_checkpoint
from tests.models.forward_steps import SAMPLED, forward_steps
from tests.models.test_decoder import ROPE

CPU = torch.device("cpu")
NUM_PAGES = 700
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in NATIVE},
    "wide heads": ("llama", {"hidden_size": 72, "head_dim": 48}),
    "one key head": ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 1}),
    "all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qk-norm and biases": ("qwen3", {"attention_bias": True, "head_dim": 48}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama3 rope": ("llama", {"rope_parameters": ROPE["llama3"]}),
    "yarn rope": ("qwen3", {"rope_parameters": ROPE["yarn with its own attention factor"]}),
    "one layer": ("mistral", {"num_hidden_layers": 1, "rms_norm_eps": 1e-3}),
    **{family: (family, {}) for family in NATIVE_PARTS},
}


@dataclass
class World:
    """A model with a pool of its own."""

    model: LanguageModel
    backend_name: str
    page_size: int
    kv: Tensor = field(init=False)

    def __post_init__(self) -> None:
        info = self.model.info
        shape = (info.num_layers, 2, NUM_PAGES, self.page_size, info.num_kv_heads, info.head_dim)
        self.kv = torch.zeros(shape, dtype=info.dtype)
        shares = "sliding_window" not in info.attention_features
        self.backend = make_backend(self.backend_name, self.kv, info.num_heads, shares=shares)

    @torch.inference_mode()
    def run(self, rows: list[ScheduledRequest]) -> Tensor:
        batch = build_forward_batch(rows, self.page_size, CPU)
        self.backend.plan(batch)
        return self.model.forward(batch, self.backend)


def compiled(source: ModelSource, dtype: torch.dtype) -> LanguageModel:
    """The same model on the CPU kernels; without them the test is skipped."""
    if reason := unsupported_reason(dtype):
        pytest.skip(reason)
    return load_cpu_decoder(source, dtype)


def compare(
    model: LanguageModel,
    expected: LanguageModel,
    backend: str,
    page_size: int,
    tolerance: float,
    expected_backend: str = "torch",
) -> None:
    """Step for step the same logits, up to `tolerance` of their norm, and the same pool."""
    ours, theirs = World(model, backend, page_size), World(expected, expected_backend, page_size)
    for rows in forward_steps(page_size, page_size, NUM_PAGES, vocab=288):
        got, wanted = ours.run(rows), theirs.run(rows)
        assert got.shape == wanted.shape
        assert got.dtype == torch.float32
        if len(wanted):
            error = float((got - wanted).norm() / wanted.norm())
            assert error <= tolerance
    difference = (ours.kv.float() - theirs.kv.float()).norm() / theirs.kv.float().norm()
    assert float(difference) <= tolerance


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(tmp_path: Path, variant: str) -> None:
    family, fields = VARIANTS[variant]
    source = checkpoint(make_checkpoint(tmp_path, family, seed=3, **fields))
    model = load_decoder(source, torch.float32, CPU)
    expected = compiled(source, torch.float32)
    assert model.info == expected.info
    for page_size, backend in ((1, "torch"), (16, "triton")):
        compare(model, expected, backend, page_size, 1e-5, "cpu")


@pytest.mark.parametrize("family", [*NATIVE, *NATIVE_PARTS])
def test_bfloat16(tmp_path: Path, family: str) -> None:
    """The same weights as in float32, up to rounding; every token has all experts, so that no
    choice hangs on it."""
    fields = {"num_experts_per_tok": 4} if family in EXPERTS else {}
    source = checkpoint(make_checkpoint(tmp_path, family, dtype=torch.bfloat16, **fields))
    model, expected = (load_decoder(source, d, CPU) for d in (torch.bfloat16, torch.float32))
    compare(model, expected, "torch", 2, 0.05)


@pytest.mark.parametrize("family", ["llama", "granite", "gemma2"])
@torch.inference_mode()
def test_logits_in_memory_that_is_given(tmp_path: Path, family: str) -> None:
    source = checkpoint(make_checkpoint(tmp_path, family, dtype=torch.bfloat16))
    world = World(load_decoder(source, torch.bfloat16, CPU), "torch", 2)
    rows = [ScheduledRequest("a", np.arange(1, 6, dtype=np.int32), 0, np.arange(3), SAMPLED)]
    wanted = world.run(rows)
    out = torch.empty_like(wanted)
    world.model.forward_into(out, build_forward_batch(rows, 2, CPU), world.backend)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "cohere", "granite", "gemma2", "smollm3", "qwen2_moe"]
)
@pytest.mark.usefixtures("interpreted")
def test_kernels_themselves(tmp_path: Path, family: str) -> None:
    """In Triton's interpreter, instead of their references."""
    fields = {"hidden_size": 48, "head_dim": 16, "vocab_size": 61, "num_hidden_layers": 2}
    source = checkpoint(make_checkpoint(tmp_path, family, eos_token_id=2, **fields))
    ours = World(load_decoder(source, torch.float32, CPU), "triton", 2)
    theirs = World(compiled(source, torch.float32), "cpu", 2)
    ids = np.arange(1, 10, dtype=np.int32)
    pages = np.array([8, 3, 5, 1, 9], np.int32)
    for rows in (
        [
            ScheduledRequest("a", ids[:5], 0, pages[:3], None),
            ScheduledRequest("b", ids[3:5], 0, pages[4:], SAMPLED),
        ],
        [ScheduledRequest("a", ids[5:8], 5, pages[:4], SAMPLED)],
        [ScheduledRequest("c", ids[:3], 0, pages[4:] + 1 + np.arange(2, dtype=np.int32), SAMPLED)],
    ):
        assert torch.allclose(ours.run(rows), theirs.run(rows), atol=1e-4, rtol=1e-4)
    assert torch.allclose(ours.kv, theirs.kv, atol=1e-4)
