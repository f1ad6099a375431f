"""What the attention kernels have in common: the walk over paged keys, and the block sizes.

A tile holds the queries of one K/V head as rows: all query heads that share it, so that its keys
and values are read once. Scores are kept in base 2: exp(x) is exp2(x * log2(e)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from radixserve_kernels.gpu.launch import Capability, kernel, power_of_2, tl

LOG2_E = math.log2(math.e)
MAX_GROUP = 128  # query heads of one K/V head


@dataclass(frozen=True, slots=True)
class Blocks:
    """rows queries (of all heads of a group) against keys at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@kernel()
def attend_keys(
    query,  # [rows, block_dim]
    best,  # [rows] float32: the best score so far, base 2
    total,  # [rows] float32: the sum of exp2(score - best)
    mixed,  # [rows, block_dim] float32: the values by those weights
    k_ptr,  # at the K/V head
    v_ptr,
    pages_ptr,  # at the row's first page
    begin,
    end,  # keys
    limit,  # [rows] the keys that each query sees; of meaning where is_masked
    scale,
    stride_slot,  # of K and V
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_keys: tl.constexpr,
    precision: tl.constexpr,
    is_masked: tl.constexpr,
):
    """Go on with the sums over keys [begin, end); without a mask that is whole blocks of keys."""
    features = tl.arange(0, block_dim)
    for start in range(begin, end, block_keys):
        place = start + tl.arange(0, block_keys)
        if is_masked:
            pages = tl.load(pages_ptr + place // page_size, mask=place < end, other=0)
            is_read = (place < end)[:, None] & (features < head_dim)[None, :]
        else:
            pages = tl.load(pages_ptr + place // page_size)
            is_read = (features < head_dim)[None, :]
        slots = pages.to(tl.int64) * page_size + place % page_size
        cells = slots[:, None] * stride_slot + features[None, :]
        if is_masked or head_dim != block_dim:
            keys = tl.load(k_ptr + cells, mask=is_read, other=0.0)
            values = tl.load(v_ptr + cells, mask=is_read, other=0.0)
        else:
            keys = tl.load(k_ptr + cells)
            values = tl.load(v_ptr + cells)
        scores = tl.dot(query, tl.trans(keys), input_precision=precision)
        if is_masked:
            scores = tl.where(place[None, :] < limit[:, None], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1) * scale)
        shift = new_best
        if is_masked:  # a query may have seen no key yet
            shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores * scale - shift[:, None])
        fade = tl.exp2(best - shift)
        total = total * fade + tl.sum(weights, 1)
        mixed = mixed * fade[:, None]
        mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision=precision)
        best = new_best
    return best, total, mixed


@kernel()
def part_keys(
    num_keys,
    num_parts,
    num_even,
    least_keys: tl.constexpr,
    most_keys: tl.constexpr,
    block_keys: tl.constexpr,
):
    """Keys of each part: a row in num_even parts, in more where those get longer than most_keys."""
    even = tl.minimum(tl.cdiv(num_keys, num_even), most_keys)
    size = tl.maximum(tl.maximum(tl.cdiv(num_keys, num_parts), even), least_keys)
    return tl.cdiv(size, block_keys) * block_keys


@kernel()
def write_state(
    best,
    total,
    mixed,
    out_ptr,
    lse_ptr,
    out_cells,  # [rows] where each query's output begins
    lse_cells,  # [rows]
    is_query,  # [rows]
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
):
    """Store the finished output and, unless its pointer is None, the lse of each query."""
    features = tl.arange(0, block_dim)
    out = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
    is_written = is_query[:, None] & (features < head_dim)[None, :]
    cells = out_ptr + out_cells[:, None] + features[None, :]
    tl.store(cells, out.to(out_ptr.dtype.element_ty), mask=is_written)
    if lse_ptr is not None:
        tl.store(lse_ptr + lse_cells, best + tl.log2(total), mask=is_query)


def decode_blocks(group: int, head_dim: int, dtype: torch.dtype) -> Blocks:
    """16 KB each of K and V at a time at 128 features, two such blocks under way.

    Page ids are loaded one step before the keys, so that 5 stages keep 2 blocks of keys in flight.
    """
    rows = max(power_of_2(group), 16)
    if dtype == torch.float32:  # no tensor cores: products of small tiles
        return Blocks(rows, 32, 8, 2)
    return Blocks(rows, 32 if head_dim > 128 else 64, 4 if rows <= 32 else 8, 5)


def extend_blocks(
    num_rows: int, head_dim: int, dtype: torch.dtype, capability: Capability
) -> Blocks:
    """num_rows: queries times heads of a group in the longest row.

    Hopper and Blackwell servers have 227 KB of shared memory and multiply out of it. The others
    hold the queries in registers too, which leaves fewer of them for keys.
    """
    if dtype == torch.float32:
        return Blocks(16, 16, 8, 1)
    is_wide = head_dim > 128
    if num_rows <= 16:
        return Blocks(16, 32 if is_wide else 64, 4, 5)
    is_small = num_rows <= 64 or is_wide
    rows, num_warps = (64, 8 if is_wide else 4) if is_small else (128, 8)
    return Blocks(rows, 64 if capability[0] in (9, 10) else 32, num_warps, 3)


def precision_of(q: Tensor) -> str:
    """float32 is for exactness: no tf32."""
    return "ieee" if q.dtype == torch.float32 else "tf32"
