"""The torch operations against the formulas, and against transformers' modules."""

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
    for size in (1e-3, 1.0, 1e3):
        x = (torch.randn(7, 48) * size).to(dtype)
        normed = ops.rms_norm(x, module.weight, torch.tensor(1e-5))
        rounding = 4 * torch.finfo(dtype).eps  # one step of the dtype where the sum rounds over
        torch.testing.assert_close(normed, module(x), rtol=rounding, atol=0)


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
    turns = ops.rotations(positions, module.inv_freq, module.attention_scaling)
    order = ops.pair_halves(torch.arange(32), 32)
    out = ops.apply_rotary(x[..., order], turns)
    assert out.dtype == dtype
    tolerance = 1e-6 if dtype == torch.float32 else 3e-2
    wanted = expected[0].transpose(0, 1)[..., order]
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)


def test_pair_halves() -> None:
    assert ops.pair_halves(torch.arange(12), 6).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    weight = torch.randn(12, 3)
    order = ops.pair_halves(torch.arange(12), 6)
    assert torch.equal(ops.pair_halves(weight, 6), weight[order])


def test_gelu_and_mul() -> None:
    gate, up = torch.randn(2, 3, 5)
    out = ops.act_and_mul(torch.cat((gate, up), -1), "gelu_tanh")
    torch.testing.assert_close(out, torch.nn.functional.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_among_others(activation: str, dtype: torch.dtype) -> None:
    rows = (4 * torch.randn(50, 2 * 37)).to(dtype)
    together = ops.act_and_mul(rows, activation)
    for part in (1, 3, 16):
        each = [ops.act_and_mul(some, activation) for some in rows.split(part)]
        assert torch.equal(torch.cat(each), together)


def test_layer_norm() -> None:
    x, weight = torch.randn(4, 30) + 3, torch.randn(30)
    out = ops.rms_norm(x, weight, torch.tensor(1e-5), is_centered=True)
    torch.testing.assert_close(out, torch.nn.functional.layer_norm(x, (30,), weight))


def test_silu_and_mul() -> None:
    x = torch.randn(3, 10)
    expected = torch.nn.functional.silu(x[:, :5]) * x[:, 5:]
    torch.testing.assert_close(ops.act_and_mul(x), expected)


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
