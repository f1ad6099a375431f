"""The grouped product of experts, its kernel and its reference, against one product a pair."""

from __future__ import annotations

import pytest
import torch

from radixserve_kernels import gpu_ops

both = pytest.mark.usefixtures("path")  # references, interpreted kernels, compiled ones
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "size", "depth"),
    [(1, 3, 2, 5, 7), (40, 5, 2, 130, 100), (150, 2, 1, 33, 65), (90, 70, 3, 20, 40)],
)
@both
def test_grouped_linear(
    num_tokens: int, num_experts: int, top_k: int, size: int, depth: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, depth + 3).to(dtype)[:, :depth]
    weight = torch.randn(num_experts, size, depth).to(dtype)
    ids = torch.rand(num_tokens, num_experts).argsort(-1)[:, :top_k]
    ids[: num_tokens // 2] %= max(1, num_experts - 2)  # some experts have few rows or none
    order, indptr = gpu_ops.sort_by_expert(ids, num_experts)
    for bias in (None, torch.randn(num_experts, size).to(dtype)):
        out = gpu_ops.grouped_linear(x, weight, bias, order, indptr)
        rows = x.double().repeat_interleave(top_k, 0)
        expected = (weight.double()[ids.flatten()] @ rows[..., None])[..., 0]
        if bias is not None:
            expected += bias.double()[ids.flatten()]
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=10 * tolerance)
        assert torch.equal(gpu_ops.grouped_linear(x, weight, bias, order, indptr), out)


@pytest.mark.parametrize("dtype", DTYPES)
@both
def test_a_row_has_the_same_bits_among_others(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(70, 200).to(dtype), torch.randn(130, 200).to(dtype)
    for bias in (None, torch.randn(130).to(dtype)):
        together = gpu_ops.row_linear(x, weight, bias)
        for part in (1, 3, 20):
            rows = x[:30].split(part)
            each = torch.cat([gpu_ops.row_linear(some, weight, bias) for some in rows])
            assert torch.equal(each, together[:30])
        expected = torch.nn.functional.linear(x, weight, bias)
        tolerance = 1e-4 if dtype == torch.float32 else 0.2
        torch.testing.assert_close(together, expected, rtol=0.02, atol=tolerance)


@both
def test_grouped_linear_of_nothing() -> None:
    order, indptr = gpu_ops.sort_by_expert(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert indptr.tolist() == [0, 0, 0, 0]
    out = gpu_ops.grouped_linear(torch.ones(0, 4), torch.ones(3, 5, 4), None, order, indptr)
    assert out.shape == (0, 5)


def test_pairs_are_sorted_by_expert() -> None:
    order, indptr = gpu_ops.sort_by_expert(torch.tensor([[2, 0], [2, 3], [0, 2]]), 5)
    assert order.tolist() == [1, 4, 0, 2, 5, 3]
    assert indptr.tolist() == [0, 2, 2, 5, 6, 6]


@pytest.mark.parametrize("dtype", DTYPES)
@both
def test_clamped_swiglu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(5, 2 * 1_030)).to(dtype)
    out = gpu_ops.clamped_swiglu(gate_up, 1.7, 3.0)
    gate, up = gate_up.double().chunk(2, -1)
    gate, up = gate.clamp(max=3), up.clamp(-3, 3)
    expected = (up + 1) * gate * (1.7 * gate).sigmoid()
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=4 * step, atol=4 * step)
