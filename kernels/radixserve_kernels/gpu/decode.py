"""Paged attention of one query a row, the keys of each row cut into splits that run side by side.

A program attends one row's queries of one K/V head over one split of its keys. With several splits
the states (output, lse) go to a workspace, and a second kernel merges them. The grid depends on the
number of rows, heads and splits only: a captured graph serves rows of any length.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from radixserve_kernels.attention_features import PLAIN, AttentionFeatures
from radixserve_kernels.gpu import records
from radixserve_kernels.gpu.attention import (
    LOG2_E,
    MAX_GROUP,
    attend_keys,
    attend_splits,
    decode_blocks,
    empty_state,
    exact_keys,
    first_seen,
    hadamard_transform,
    keys_per_split,
    merge_split,
    precision_of,
    row_keys,
    write_state,
)
from radixserve_kernels.gpu.launch import KernelLaunch, kernel, power_of_2, tl, wait_for_inputs
from radixserve_kernels.gpu.records import (
    LONG_ROW_KEYS,
    MIN_SPLIT_KEYS,
    AttentionOutput,
    KVSplit,
    PagedKeys,
)
from radixserve_kernels.stored_kv import hadamard_size, split_int8, stored_head_dim

BLOCK_SPLITS = 16  # read by the merge


@kernel(
    varying=(
        *("indptr_ptr", "indices_ptr", "last_ptr", "lse_ptr", "fixed_splits"),
        *("window", "chunk"),
    )
)
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    indptr_ptr,  # [R + 1]
    indices_ptr,  # [total pages]
    last_ptr,  # [R]
    out_ptr,
    lse_ptr,
    scale,
    window,
    chunk,
    cap,
    stride_q_row,
    stride_q_head,
    stride_slot,
    stride_kv_head,
    k_scale_ptr,
    v_scale_ptr,
    stride_scale,
    stride_out_row,
    stride_out_head,
    stride_out_split,
    num_heads,
    fixed_splits,
    group: tl.constexpr,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    min_keys: tl.constexpr,
    max_keys: tl.constexpr,
    precision: tl.constexpr,
    has_span: tl.constexpr,
    has_cap: tl.constexpr,
    split_keys: tl.constexpr,
    is_split: tl.constexpr,
    has_scales: tl.constexpr,
    hadamard_dim: tl.constexpr,
    restores_out: tl.constexpr,
    pdl: tl.constexpr,
):
    """Grid [R, Hkv, splits]. split_keys: of exact results, those of a split; 0: others. is_split:
    each program computes one of these splits. has_scales: K and V are integers with scales, stored
    after `hadamard_transform` over blocks of `hadamard_dim`; restores_out: apply it to the output,
    which no merge follows."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    kv_split = tl.program_id(2)
    num_kv_splits = tl.num_programs(2)
    wait_for_inputs(pdl)
    first_page, num_keys = row_keys(row, indptr_ptr, last_ptr, page_size)
    lowest = 0
    if has_span:
        lowest = first_seen(num_keys - 1, window, chunk)
    if split_keys == 0:
        seen = num_keys - lowest
        size = keys_per_split(seen, num_kv_splits, fixed_splits, min_keys, max_keys, block_keys)
        begin = lowest + kv_split * size
        end = tl.minimum(begin + size, num_keys)
    else:
        begin = lowest // block_keys * block_keys
        end = num_keys
        if is_split:
            begin = tl.maximum(begin, kv_split * split_keys)
            end = tl.minimum(end, (kv_split + 1) * split_keys)

    features = tl.arange(0, block_dim)
    member = tl.arange(0, block_rows)
    head = kv_head * group + member
    is_query = member < group
    cells = q_ptr + row.to(tl.int64) * stride_q_row + head[:, None] * stride_q_head
    is_read = is_query[:, None] & (features < head_dim)[None, :]
    query = tl.load(cells + features[None, :], mask=is_read, other=0.0)
    if has_scales:
        wide = query.to(tl.float32)
        query = hadamard_transform(wide, block_rows, block_dim, hadamard_dim).to(query.dtype)

    limit = tl.zeros([block_rows], tl.int32) + end
    lower = tl.zeros([block_rows], tl.int32) + lowest
    kv_offset = kv_head * stride_kv_head
    pool = (
        k_ptr + kv_offset,
        v_ptr + kv_offset,
        indices_ptr + first_page,
        stride_slot,
        k_scale_ptr + kv_head,
        v_scale_ptr + kv_head,
        stride_scale,
    )
    if split_keys == 0:
        state = empty_state(block_rows, block_dim)
        state = attend_keys(
            *(query, state, pool, begin, end, limit, lower, scale, cap, page_size),
            *(head_dim, block_dim, block_keys, precision, True, False, has_cap, has_scales),
        )
    else:
        state = attend_splits(
            *(query, pool, begin, end, 0, limit, lower, scale, cap, page_size, head_dim),
            *(block_rows, block_dim, block_keys, split_keys, precision, False, has_span, has_cap),
            has_scales,
        )
    out_row = row.to(tl.int64) * stride_out_row + kv_split * stride_out_split
    out_cells = out_row + head * stride_out_head
    lse_cells = (row.to(tl.int64) * num_heads + head) * num_kv_splits + kv_split
    write_state(
        *(state, out_ptr, lse_ptr, out_cells, lse_cells, is_query, head_dim, block_rows, block_dim),
        *(is_split, hadamard_dim if restores_out else 0),
    )


@kernel(varying=("lse_ptr", "num_kv_splits"))
def merge_exact_splits_kernel(
    split_out_ptr,  # [T, Hq, splits, D] float32
    split_lse_ptr,  # [T, Hq, splits] float32
    out_ptr,
    lse_ptr,  # [T, Hq] or None
    num_kv_splits,
    stride_out_row,
    stride_out_head,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    hadamard_dim: tl.constexpr,
    pdl: tl.constexpr,
):
    """Grid [T, Hq]. In order, as `attend_splits` merges them."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    none = tl.arange(0, 1)
    cell = row * tl.num_programs(1) + head + none
    features = tl.arange(0, block_dim)
    wait_for_inputs(pdl)
    m_i, l_i, acc = empty_state(1, block_dim)
    for kv_split in range(num_kv_splits):
        index = cell * num_kv_splits + kv_split
        lse = tl.load(split_lse_ptr + index)
        is_read = (lse > float("-inf"))[:, None] & (features < head_dim)[None, :]
        cells = split_out_ptr + index[:, None] * head_dim + features[None, :]
        out = tl.load(cells, mask=is_read, other=0.0)
        m_i, l_i, acc = merge_split(m_i, l_i, acc, out, lse)
    out_cells = row * stride_out_row + head * stride_out_head + none
    state = (m_i, l_i, acc)
    write_state(
        *(state, out_ptr, lse_ptr, out_cells, cell, none == 0, head_dim, 1, block_dim, False),
        hadamard_dim,
    )


@kernel(varying=("lse_ptr", "num_kv_splits"))
def merge_splits_kernel(
    split_out_ptr,  # [T, Hq, splits, D] float32
    split_lse_ptr,  # [T, Hq, splits] float32
    out_ptr,
    lse_ptr,  # [T, Hq] or None
    num_kv_splits,
    stride_out_row,
    stride_out_head,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_splits: tl.constexpr,
    hadamard_dim: tl.constexpr,
    pdl: tl.constexpr,
):
    """Grid [T, Hq]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    cell = row * tl.num_programs(1) + head
    features = tl.arange(0, block_dim)
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    wait_for_inputs(pdl)
    acc = tl.zeros([block_dim], tl.float32)
    for start in range(0, num_kv_splits, block_splits):
        kv_split = start + tl.arange(0, block_splits)
        index = cell * num_kv_splits + kv_split
        lse = tl.load(split_lse_ptr + index, kv_split < num_kv_splits, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(lse - shift)
        is_read = (weight > 0.0)[:, None] & (features < head_dim)[None, :]
        cells = split_out_ptr + index[:, None] * head_dim + features[None, :]
        states = tl.load(cells, mask=is_read, other=0.0)
        alpha = tl.exp2(m_i - shift)
        acc = acc * alpha + tl.sum(states * weight[:, None], 0)
        l_i = l_i * alpha + tl.sum(weight, 0)
        m_i = m_new
    out = acc / tl.where(l_i > 0.0, l_i, 1.0)
    if hadamard_dim:
        restored = hadamard_transform(tl.reshape(out, [1, block_dim]), 1, block_dim, hadamard_dim)
        out = tl.reshape(restored, [block_dim])
    cells = out_ptr + row * stride_out_row + head * stride_out_head + features
    tl.store(cells, out.to(out_ptr.dtype.element_ty), mask=features < head_dim)
    if lse_ptr is not None:
        tl.store(lse_ptr + cell + tl.arange(0, 1), m_i + tl.log2(l_i))


def decode(
    q: Tensor,
    keys: PagedKeys,
    scale: float,
    split: KVSplit,
    result: AttentionOutput,
    features: AttentionFeatures = PLAIN,
) -> list[KernelLaunch]:
    """See `gpu_ops.decode`; `result` is written."""
    blocks = decode_blocks(group_of(q, keys), q.shape[2], q.dtype)
    arguments = attention_arguments(q, keys, scale, features)
    if split.is_exact:
        blocks = replace(blocks, keys=exact_keys(q.shape[2], q.dtype))
    arguments |= split_arguments(split) | {
        "fixed_splits": split.fixed_splits,
        "block_rows": blocks.rows,
        "block_keys": blocks.keys,
    }
    state, merge = split_state(q, split, result, hadamard_dim_of(keys))
    grid = (len(q), keys.k_slots.shape[1], split.num_splits)
    attend = KernelLaunch(
        *(decode_kernel, grid, arguments | state, blocks.num_warps, blocks.num_stages),
        enable_fp_fusion=not split.is_exact,
    )
    return [attend, *merge]


def group_of(q: Tensor, keys: PagedKeys) -> int:
    """Query heads of a K/V head."""
    num_heads, num_kv_heads = q.shape[1], keys.k_slots.shape[1]
    group, rest = divmod(num_heads, num_kv_heads)
    assert not rest, f"{num_heads} query heads cannot share {num_kv_heads} key heads evenly"
    assert group <= MAX_GROUP, f"{group} query heads of a key head are more than {MAX_GROUP}"
    return group


def attention_arguments(
    q: Tensor, keys: PagedKeys, scale: float, features: AttentionFeatures
) -> dict[str, Any]:
    """The arguments that both attention kernels take."""
    window, chunk = features.span
    cap = features.logits_soft_cap or 0.0
    k_slots, v_slots = keys.k_slots, keys.v_slots
    k_scales, v_scales, stride_scale = k_slots, v_slots, 0
    if has_scales := k_slots.dtype == torch.int8:
        k_slots, k_scales = split_int8(k_slots, scales_last=True)
        v_slots, v_scales = split_int8(v_slots, scales_last=True)
        stride_scale = k_scales.stride(0)
    assert k_slots.shape[2] == q.shape[2], "queries and keys have the same features"
    assert scale > 0, f"scores are scaled by a positive number, not {scale}"
    assert q.stride(2) == k_slots.stride(2) == 1, "features must lie dense"
    assert k_slots.stride() == v_slots.stride(), "K and V must lie alike"
    return {
        "q_ptr": q,
        "k_ptr": k_slots,
        "v_ptr": v_slots,
        "indptr_ptr": keys.kv_indptr,
        "indices_ptr": keys.kv_indices,
        "last_ptr": keys.last_page_len,
        "scale": scale * LOG2_E,
        "window": window,
        "chunk": chunk,
        "cap": cap * LOG2_E,
        "has_span": bool(window or chunk),
        "has_cap": bool(cap),
        "stride_q_row": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_slot": k_slots.stride(0),
        "stride_kv_head": k_slots.stride(1),
        "k_scale_ptr": k_scales,
        "v_scale_ptr": v_scales,
        "stride_scale": stride_scale,
        "has_scales": has_scales,
        "hadamard_dim": hadamard_dim_of(keys),
        "group": group_of(q, keys),
        "num_heads": q.shape[1],
        "min_keys": MIN_SPLIT_KEYS,
        "max_keys": LONG_ROW_KEYS,
        "page_size": keys.page_size,
        "head_dim": q.shape[2],
        "block_dim": max(power_of_2(q.shape[2]), 16),
        "precision": precision_of(q),
    }


def hadamard_dim_of(keys: PagedKeys) -> int:
    """Returns the block size of `hadamard_transform`; 0 if K and V are stored as they are."""
    if keys.k_slots.dtype != torch.int8:
        return 0
    return hadamard_size(stored_head_dim(keys.k_slots.shape[2], torch.int8))


def split_arguments(split: KVSplit) -> dict[str, Any]:
    """How both attention kernels split the keys of exact results."""
    return {
        "split_keys": records.EXACT_SPLIT_KEYS if split.is_exact else 0,
        "is_split": split.is_exact and split.num_splits > 1,
    }


def split_state(
    q: Tensor, split: KVSplit, result: AttentionOutput, hadamard_dim: int
) -> tuple[dict[str, Any], list[KernelLaunch]]:
    """Where an attention kernel writes its states, and the merge of splits that follows."""
    out, lse = result
    assert out.stride(2) == 1, "features must lie dense"
    assert lse is None or lse.is_contiguous(), "lse must lie dense"
    if split.num_splits == 1:
        names = {"out_ptr": out, "lse_ptr": lse, "stride_out_split": 0}
        names["restores_out"] = hadamard_dim > 0
        return names | _strides(out), []
    states, state_lse = _workspace(q, split)
    arguments = {
        "split_out_ptr": states,
        "split_lse_ptr": state_lse,
        "out_ptr": out,
        "lse_ptr": lse,
        "num_kv_splits": split.num_splits,
        "head_dim": q.shape[2],
        "block_dim": power_of_2(q.shape[2]),
        "hadamard_dim": hadamard_dim,
    }
    merge_kernel = merge_exact_splits_kernel
    if not split.is_exact:
        merge_kernel, arguments = merge_splits_kernel, arguments | {"block_splits": BLOCK_SPLITS}
    merge = KernelLaunch(
        *(merge_kernel, tuple(q.shape[:2]), arguments | _strides(out)),
        enable_fp_fusion=not split.is_exact,
    )
    names = {"out_ptr": states, "lse_ptr": state_lse, "stride_out_split": q.shape[2]}
    names["restores_out"] = False
    return names | _strides(states), [merge]


def _workspace(q: Tensor, split: KVSplit) -> tuple[Tensor, Tensor]:
    """Memory for the splits' outputs [T, Hq, splits, D] and lse [T, Hq, splits], float32."""
    shape = (*q.shape[:2], split.num_splits, q.shape[2])
    num_lse = math.prod(shape[:3])
    num_numbers = math.prod(shape)
    workspace = split.workspace
    if workspace is None:
        workspace = q.new_empty(num_numbers + num_lse, dtype=torch.float32)
    assert workspace.dtype == torch.float32, f"a workspace is float32, not {workspace.dtype}"
    assert len(workspace) >= num_numbers + num_lse, (
        f"a workspace of {len(workspace)} numbers is too small for {num_numbers + num_lse}"
    )
    return workspace[:num_numbers].view(shape), workspace[num_numbers : num_numbers + num_lse]


def _strides(out: Tensor) -> dict[str, int]:
    return {"stride_out_row": out.stride(0), "stride_out_head": out.stride(1)}
