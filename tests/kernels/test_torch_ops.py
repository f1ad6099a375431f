"""The kernels' torch twins against the formulas, and against transformers' modules."""

from __future__ import annotations

import pytest
import torch

from radixserve_kernels import torch_ops as ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    torch.manual_seed(0)
    module = LlamaRMSNorm(48, 1e-5).to(dtype)
    module.weight.data = torch.randn(48).to(dtype)
    x, residual = torch.randn(2, 7, 48).to(dtype)
    assert torch.equal(ops.rms_norm(x, module.weight, 1e-5), module(x))
    normed, total = ops.add_rms_norm(x, residual, module.weight, 1e-5)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, module(residual + x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_equals_transformers(dtype: torch.dtype) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import (
        LlamaRotaryEmbedding,
        apply_rotary_pos_emb,
    )

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=256)
    module = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 3, 77, 255])
    x = torch.randn(4, 5, 32).to(dtype)  # [T, H, D]
    cos, sin = module(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    tables = ops.rotary_tables(positions, module.inv_freq, module.attention_scaling, dtype)
    assert torch.equal(ops.apply_rotary(x, *tables), expected[0].transpose(0, 1))


def test_silu_and_mul() -> None:
    x = torch.randn(3, 10)
    expected = torch.nn.functional.silu(x[:, :5]) * x[:, 5:]
    assert torch.equal(ops.silu_and_mul(x), expected)


def test_store_kv_writes_only_its_slots() -> None:
    k_cache, v_cache = torch.zeros(2, 9, 2, 4)
    k, v = torch.randn(2, 3, 2, 4)
    slots = torch.tensor([7, 0, 4])
    ops.store_kv(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache[slots], k)
    assert torch.equal(v_cache[slots], v)
    others = torch.tensor([1, 2, 3, 5, 6, 8])
    assert not k_cache[others].any()
    assert not v_cache[others].any()


def test_copy_slots_reads_before_it_writes() -> None:
    kv = torch.randn(3, 2, 6, 2, 4)
    before = kv.clone()
    ops.copy_slots(kv, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 5]))
    assert torch.equal(kv[:, :, [1, 2, 5]], before[:, :, [0, 1, 2]])
    assert torch.equal(kv[:, :, [0, 3, 4]], before[:, :, [0, 3, 4]])
