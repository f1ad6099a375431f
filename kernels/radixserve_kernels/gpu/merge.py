"""The merge of two attention states over disjoint keys."""

from __future__ import annotations

from torch import Tensor

from radixserve_kernels.gpu.launch import KernelLaunch, kernel, power_of_2, tl, wait_for_inputs

BLOCK_CELLS = 2_048  # features of some heads at a time


@kernel(varying=("lse_a_ptr", "lse_b_ptr", "lse_ptr"))
def merge_states_kernel(
    a_ptr,
    lse_a_ptr,
    b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    num_heads,
    stride_a_row,
    stride_a_head,
    stride_lse_a,
    stride_b_row,
    stride_b_head,
    stride_lse_b,
    stride_out_row,
    stride_out_head,
    stride_lse,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_heads: tl.constexpr,
    pdl: tl.constexpr,
):
    """Grid [T, blocks of heads]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    features = tl.arange(0, block_dim)
    is_head = head < num_heads
    wait_for_inputs(pdl)
    lse_a = tl.load(lse_a_ptr + row * stride_lse_a + head, is_head, float("-inf"))
    lse_b = tl.load(lse_b_ptr + row * stride_lse_b + head, is_head, float("-inf"))
    m_i = tl.maximum(lse_a, lse_b)
    shift = tl.where(m_i == float("-inf"), 0.0, m_i)
    share_a = tl.exp2(lse_a - shift)
    share_b = tl.exp2(lse_b - shift)
    l_i = share_a + share_b
    is_feature = (features < head_dim)[None, :]  # a part of no share may hold anything
    cells = a_ptr + row * stride_a_row + head[:, None] * stride_a_head + features[None, :]
    a = tl.load(cells, mask=(share_a > 0.0)[:, None] & is_feature, other=0.0).to(tl.float32)
    cells = b_ptr + row * stride_b_row + head[:, None] * stride_b_head + features[None, :]
    b = tl.load(cells, mask=(share_b > 0.0)[:, None] & is_feature, other=0.0).to(tl.float32)
    out = a * share_a[:, None] + b * share_b[:, None]
    out = out / tl.where(l_i > 0.0, l_i, 1.0)[:, None]
    tl.debug_barrier()  # out and lse may be what another warp has still to load
    cells = out_ptr + row * stride_out_row + head[:, None] * stride_out_head + features[None, :]
    tl.store(cells, out.to(out_ptr.dtype.element_ty), mask=is_head[:, None] & is_feature)
    tl.store(lse_ptr + row * stride_lse + head, shift + tl.log2(l_i), mask=is_head)


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> list[KernelLaunch]:
    """See `gpu_ops.merge_states`; `out` and `lse` are written."""
    num_tokens, num_heads, head_dim = out_a.shape
    assert all(x.stride(-1) == 1 for x in (out_a, lse_a, out_b, lse_b, out, lse)), "must lie dense"
    block_dim = power_of_2(head_dim)
    block_heads = min(power_of_2(num_heads), max(BLOCK_CELLS // block_dim, 1))
    arguments = {
        "a_ptr": out_a,
        "lse_a_ptr": lse_a,
        "b_ptr": out_b,
        "lse_b_ptr": lse_b,
        "out_ptr": out,
        "lse_ptr": lse,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "block_dim": block_dim,
        "block_heads": block_heads,
    }
    for name, tensor in (("a", out_a), ("b", out_b), ("out", out)):
        arguments[f"stride_{name}_row"] = tensor.stride(0)
        arguments[f"stride_{name}_head"] = tensor.stride(1)
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        arguments[f"stride_{name}"] = tensor.stride(0)
    return [
        KernelLaunch(merge_states_kernel, (num_tokens, -(-num_heads // block_heads)), arguments)
    ]
