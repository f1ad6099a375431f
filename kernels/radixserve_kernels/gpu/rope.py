"""What happens to q, k and v between their projection and attention, in one pass."""

from __future__ import annotations

from torch import Tensor

from radixserve_kernels.gpu.launch import KernelLaunch, kernel, power_of_2, tl, wait_for_inputs

BLOCK_CELLS = 1_024  # features of some heads of one token at a time


@kernel(varying=("positions_ptr", "slots_ptr"))
def rope_and_store_kernel(
    qkv_ptr,  # [T, (Hq + 2 Hkv) * D]
    positions_ptr,  # [T] int64
    slots_ptr,  # [T] int64
    cos_sin_ptr,  # [positions, D] float32, or None
    norm_ptr,  # [Hq + Hkv, D] or None
    q_ptr,  # [T, Hq, D]
    k_ptr,  # [num_slots, Hkv, D]
    v_ptr,
    eps,
    num_heads,
    num_kv_heads,
    stride_qkv,
    stride_norm,
    stride_q_row,
    stride_q_head,
    stride_k,
    stride_k_head,
    stride_v,
    stride_v_head,
    is_centered: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_heads: tl.constexpr,
    pdl: tl.constexpr,
):
    """Grid [T, blocks of the Hq + 2 Hkv heads]."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    feature = tl.arange(0, block_dim)
    num_rotated = num_heads + num_kv_heads
    is_rotated = head < num_rotated
    is_cell = (head < num_rotated + num_kv_heads)[:, None] & (feature < head_dim)[None, :]
    cells = qkv_ptr + token * stride_qkv + head[:, None] * head_dim + feature[None, :]
    wait_for_inputs(pdl)
    x = tl.load(cells, mask=is_cell, other=0.0)

    turned = x
    if norm_ptr is not None:
        wide = x.to(tl.float32)
        if is_centered:
            centered = wide - tl.sum(wide, 1)[:, None] / head_dim
            wide = tl.where((feature < head_dim)[None, :], centered, 0.0)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / head_dim + eps)
        is_weight = is_rotated[:, None] & (feature < head_dim)[None, :]
        weights = norm_ptr + head[:, None] * stride_norm + feature[None, :]
        weight = tl.load(weights, mask=is_weight, other=0.0).to(tl.float32)
        turned = (wide * scale[:, None] * weight).to(x.dtype)
    if cos_sin_ptr is not None:
        pairs = tl.reshape(turned.to(tl.float32), [block_heads, block_dim // 2, 2])
        even, odd = tl.split(pairs)  # [heads, pairs]
        pair = tl.arange(0, block_dim // 2)
        table = cos_sin_ptr + tl.load(positions_ptr + token) * head_dim + pair
        cos = tl.load(table, mask=pair < head_dim // 2, other=0.0)[None, :]
        sin = tl.load(table + head_dim // 2, mask=pair < head_dim // 2, other=0.0)[None, :]
        pairs = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        turned = tl.reshape(pairs, [block_heads, block_dim]).to(x.dtype)

    is_query = (head < num_heads)[:, None] & is_cell
    cells = q_ptr + token * stride_q_row + head[:, None] * stride_q_head + feature[None, :]
    tl.store(cells, turned.to(q_ptr.dtype.element_ty), mask=is_query)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        is_key = (head >= num_heads)[:, None] & is_rotated[:, None] & is_cell
        kv_head = (head - num_heads)[:, None]
        cells = k_ptr + slot * stride_k + kv_head * stride_k_head + feature[None, :]
        tl.store(cells, turned.to(k_ptr.dtype.element_ty), mask=is_key)
        is_value = (head >= num_rotated)[:, None] & is_cell
        kv_head = (head - num_rotated)[:, None]
        cells = v_ptr + slot * stride_v + kv_head * stride_v_head + feature[None, :]
        tl.store(cells, x.to(v_ptr.dtype.element_ty), mask=is_value)


def rope_and_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor | None,
    k_slots: Tensor,
    v_slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
    qk_norm: Tensor | None,
    eps: float,
    is_centered: bool,
    out: Tensor,
) -> list[KernelLaunch]:
    """See `gpu_ops.rope_and_store`; `out` [T, Hq, D] is written."""
    tensors = (qkv, positions, slots, k_slots, v_slots, out)
    assert all(tensor.stride(-1) == 1 for tensor in tensors), "features must lie dense"
    assert cos_sin is None or cos_sin.is_contiguous(), "the table must lie dense"
    num_all, head_dim = num_heads + 2 * num_kv_heads, out.shape[2]
    assert qkv.shape[1] == num_all * head_dim, f"{qkv.shape[1]} features are not {num_all} heads"
    block_dim = power_of_2(head_dim)
    block_heads = min(power_of_2(num_all), max(BLOCK_CELLS // block_dim, 1))
    arguments = {
        "qkv_ptr": qkv,
        "positions_ptr": positions,
        "slots_ptr": slots,
        "cos_sin_ptr": cos_sin,
        "norm_ptr": qk_norm,
        "q_ptr": out,
        "k_ptr": k_slots,
        "v_ptr": v_slots,
        "eps": eps,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "stride_qkv": qkv.stride(0),
        "stride_norm": 0 if qk_norm is None else qk_norm.stride(0),
        "stride_q_row": out.stride(0),
        "stride_q_head": out.stride(1),
        "stride_k": k_slots.stride(0),
        "stride_k_head": k_slots.stride(1),
        "stride_v": v_slots.stride(0),
        "stride_v_head": v_slots.stride(1),
        "is_centered": is_centered,
        "head_dim": head_dim,
        "block_dim": block_dim,
        "block_heads": block_heads,
    }
    grid = (len(qkv), -(-num_all // block_heads))
    return [KernelLaunch(rope_and_store_kernel, grid, arguments)]
