"""What happens to q, k and v between their projection and attention, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from radixserve_kernels.gpu.attention import hadamard_transform
from radixserve_kernels.gpu.launch import KernelLaunch, kernel, power_of_2, tl, wait_for_inputs
from radixserve_kernels.stored_kv import FP8_MAX, LEAST, hadamard_size, split_int8

BLOCK_CELLS = 1_024  # features of some heads of one token at a time


@kernel()
def in_range(x, largest: tl.constexpr):
    """float32 x cut off at `largest`; what is not finite becomes NaN."""
    near = tl.minimum(tl.maximum(x, -largest), largest)
    return tl.where(tl.abs(x) < float("inf"), near, float("nan"))


@kernel()
def to_int8(
    x,  # float32 [heads, block_dim], zeros beyond the head
    block_heads: tl.constexpr,
    block_dim: tl.constexpr,
    hadamard_dim: tl.constexpr,
    least: tl.constexpr,
):
    """The integers [heads, block_dim] and scales [heads] of each head: the bits of `to_stored`."""
    wide = hadamard_transform(x, block_heads, block_dim, hadamard_dim)
    size = tl.abs(wide)
    is_finite = tl.sum((size < float("inf")).to(tl.int32), 1) == block_dim
    largest = tl.max(size, 1)
    exact = tl.div_rn(largest, tl.full([block_heads], 127.0, tl.float32))
    exact = tl.where(largest >= least, exact, 0.0)
    bits = (exact.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000  # a bfloat16, rounded up
    scale = bits.to(tl.float32, bitcast=True)
    is_scaled = (scale > 0.0) & is_finite
    divisor = tl.where(is_scaled, scale, 1.0)
    inverse = tl.div_rn(tl.full([block_heads], 1.0, tl.float32), divisor)
    numbers = tl.where(is_scaled[:, None], wide * inverse[:, None], 0.0)
    numbers = (numbers + 12582912.0) - 12582912.0  # 1.5 * 2**23: to the nearest, ties to even
    return numbers.to(tl.int8), tl.where(is_finite, scale, float("nan"))


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
    k_scale_ptr,  # [num_slots, Hkv] bfloat16, read if hadamard_dim
    v_scale_ptr,
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
    stride_scale,
    stride_scale_head,
    is_centered: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_heads: tl.constexpr,
    hadamard_dim: tl.constexpr,
    least: tl.constexpr,
    largest: tl.constexpr,
    pdl: tl.constexpr,
):
    """Grid [T, blocks of the Hq + 2 Hkv heads]. hadamard_dim: of `to_int8`; 0: nothing becomes
    integers. largest: the pool's largest number; None: all are cast as they are."""
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
    if (slot >= 0) & ((tl.program_id(1) + 1) * block_heads > num_heads):
        k_new, v_new = turned, x
        is_head = (head >= num_heads) & (head < num_rotated)
        is_value_head = (head >= num_rotated) & (head < num_rotated + num_kv_heads)
        if hadamard_dim:
            new = tl.where(is_rotated[:, None], turned, x).to(tl.float32)
            k_new, scale = to_int8(new, block_heads, block_dim, hadamard_dim, least)
            v_new = k_new
            scale_row = slot * stride_scale
            scales = k_scale_ptr + scale_row + (head - num_heads) * stride_scale_head
            tl.store(scales, scale.to(tl.bfloat16), mask=is_head)
            scales = v_scale_ptr + scale_row + (head - num_rotated) * stride_scale_head
            tl.store(scales, scale.to(tl.bfloat16), mask=is_value_head)
        if largest is not None:
            k_new, v_new = (
                in_range(turned.to(tl.float32), largest),
                in_range(x.to(tl.float32), largest),
            )
        is_key = (head >= num_heads)[:, None] & is_rotated[:, None] & is_cell
        kv_head = (head - num_heads)[:, None]
        k_cells = k_ptr + slot * stride_k + kv_head * stride_k_head + feature[None, :]
        tl.store(k_cells, k_new.to(k_ptr.dtype.element_ty), mask=is_key)
        is_value = (head >= num_rotated)[:, None] & is_cell
        kv_head = (head - num_rotated)[:, None]
        v_cells = v_ptr + slot * stride_v + kv_head * stride_v_head + feature[None, :]
        tl.store(v_cells, v_new.to(v_ptr.dtype.element_ty), mask=is_value)


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
    scales_last: bool,
    out: Tensor,
) -> list[KernelLaunch]:
    """See `gpu_ops.rope_and_store`; `out` [T, Hq, D] is written."""
    k_scales, v_scales = k_slots, v_slots
    if has_scales := k_slots.dtype == torch.int8:
        k_slots, k_scales = split_int8(k_slots, scales_last=scales_last)
        v_slots, v_scales = split_int8(v_slots, scales_last=scales_last)
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
        "k_scale_ptr": k_scales,
        "v_scale_ptr": v_scales,
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
        "stride_scale": k_scales.stride(0) if has_scales else 0,
        "stride_scale_head": k_scales.stride(1) if has_scales else 0,
        "hadamard_dim": hadamard_size(head_dim) if has_scales else 0,
        "least": LEAST,
        "largest": FP8_MAX if k_slots.dtype == torch.float8_e4m3fn else None,
    }
    grid = (len(qkv), -(-num_all // block_heads))
    # What is stored has the reference's bits: no product and sum becomes one operation.
    return [KernelLaunch(rope_and_store_kernel, grid, arguments, enable_fp_fusion=not has_scales)]
