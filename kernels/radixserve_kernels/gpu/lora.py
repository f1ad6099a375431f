"""What adapters add to a product: of each row b (a x), with the a and b of the row's adapter.

Two kernels, as in Punica and S-LoRA: `lora_shrink_kernel` computes a x, `lora_expand_kernel` adds
b (a x). The depth of a x is divided into parts of `SPLIT_DEPTH`, which run side by side; the second
kernel adds them up in their order. So a row's bits depend on its own tokens and adapter alone.

An adapter is known by the address of its header, see `records.LoraRows`: it may lie anywhere, and a
captured graph computes with those that its step names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixserve_kernels.gpu.attention import precision_of
from radixserve_kernels.gpu.extend import ROWS_AT_ONCE, find_row
from radixserve_kernels.gpu.launch import KernelLaunch, kernel, tl
from radixserve_kernels.gpu.records import LORA_RANKS, LoraRows

BLOCK_COLUMNS, BLOCK_DEPTH_BYTES = 128, 128
SPLIT_DEPTH = 2_048  # features of x that one program of the first kernel sums
RANK_PROGRAMS = 4  # that share the ranks of a tile
VARYING = ("headers_ptr", "indptr_ptr", "order_ptr", "inner_ptr", "entry", "num_groups", "num_rows")


@kernel()
def find_rows(tile, indptr_ptr, num_groups, tile_rows: tl.constexpr, groups_at_once: tl.constexpr):
    """A tile's adapter, the place of its first row, and the end of that adapter's rows."""
    group, first_tile = find_row(tile, indptr_ptr, num_groups, tile_rows, groups_at_once)
    first = tl.load(indptr_ptr + group) + (tile - first_tile) * tile_rows
    return group, first, tl.load(indptr_ptr + group + 1)


@kernel(varying=VARYING)
def lora_shrink_kernel(
    x_ptr,  # [T, K]
    headers_ptr,  # [G] addresses
    indptr_ptr,  # [G + 1]
    order_ptr,  # [P]
    inner_ptr,  # [parts of the depth, P, R] float32
    entry,
    num_groups,
    num_rows,  # P
    max_rank,  # R
    depth,  # K
    stride_x,
    tile_rows: tl.constexpr,
    block_rank: tl.constexpr,
    block_depth: tl.constexpr,
    split_depth: tl.constexpr,
    rank_programs: tl.constexpr,
    groups_at_once: tl.constexpr,
    precision: tl.constexpr,
):
    """Grid [programs that share the ranks, tiles of an adapter's rows, parts of the depth]."""
    tile = tl.program_id(1)
    group, first, end = find_rows(tile, indptr_ptr, num_groups, tile_rows, groups_at_once)
    if first >= end:
        return
    header = tl.load(headers_ptr + group).to(tl.pointer_type(tl.int64)) + entry
    rank = tl.load(header + 2).to(tl.int32)
    a_ptr = tl.load(header).to(tl.pointer_type(x_ptr.dtype.element_ty))
    place = first + tl.arange(0, tile_rows)
    is_row = place < end
    token = tl.load(order_ptr + place, mask=is_row, other=0)
    inner = tl.arange(0, block_depth)
    part = tl.program_id(2)
    end_depth = tl.minimum((part + 1) * split_depth, depth)
    x_cells = x_ptr + token[:, None] * stride_x + inner[None, :]
    out_cells = inner_ptr + (part.to(tl.int64) * num_rows + place[:, None]) * max_rank
    for rank_begin in range(tl.program_id(0) * block_rank, rank, rank_programs * block_rank):
        number = rank_begin + tl.arange(0, block_rank)
        a_cells = a_ptr + number.to(tl.int64)[None, :] * depth + inner[:, None]
        sums = tl.zeros([tile_rows, block_rank], tl.float32)
        for begin in range(part * split_depth, end_depth, block_depth):
            is_inner = begin + inner < end_depth
            x = tl.load(x_cells + begin, mask=is_row[:, None] & is_inner[None, :], other=0.0)
            a = tl.load(a_cells + begin, mask=is_inner[:, None], other=0.0)
            sums = tl.dot(x, a, sums, input_precision=precision)
        tl.store(out_cells + number[None, :], sums, mask=is_row[:, None])


@kernel(varying=VARYING)
def lora_expand_kernel(
    inner_ptr,  # [parts of the depth, P, R] float32
    headers_ptr,  # [G] addresses
    indptr_ptr,  # [G + 1]
    order_ptr,  # [P]
    out_ptr,  # [T, N]
    entry,
    num_groups,
    num_rows,  # P
    max_rank,  # R
    num_parts,
    num_columns,
    stride_out,
    tile_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_rank: tl.constexpr,
    groups_at_once: tl.constexpr,
    precision: tl.constexpr,
):
    """Grid [blocks of columns, tiles of an adapter's rows]."""
    tile = tl.program_id(1)
    group, first, end = find_rows(tile, indptr_ptr, num_groups, tile_rows, groups_at_once)
    if first >= end:
        return
    header = tl.load(headers_ptr + group).to(tl.pointer_type(tl.int64)) + entry
    rank = tl.load(header + 2).to(tl.int32)
    if rank == 0:
        return
    b_ptr = tl.load(header + 1).to(tl.pointer_type(out_ptr.dtype.element_ty))
    place = first + tl.arange(0, tile_rows)
    is_row = place < end
    token = tl.load(order_ptr + place, mask=is_row, other=0)
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    is_column = column < num_columns
    b_cells = b_ptr + column.to(tl.int64)[None, :] * rank
    cells = inner_ptr + place.to(tl.int64)[:, None] * max_rank
    sums = tl.zeros([tile_rows, block_columns], tl.float32)
    for rank_begin in range(0, rank, block_rank):
        number = rank_begin + tl.arange(0, block_rank)
        inner = tl.zeros([tile_rows, block_rank], tl.float32)
        for part in range(num_parts):
            some = cells + part * num_rows.to(tl.int64) * max_rank + number[None, :]
            inner += tl.load(some, mask=is_row[:, None], other=0.0)
        b = tl.load(b_cells + number[:, None], mask=is_column[None, :], other=0.0)
        sums = tl.dot(inner.to(b.dtype), b, sums, input_precision=precision)
    out_cells = out_ptr + token[:, None] * stride_out + column[None, :]
    mask = is_row[:, None] & is_column[None, :]
    out = tl.load(out_cells, mask=mask, other=0.0).to(tl.float32) + sums
    tl.store(out_cells, out.to(out_ptr.dtype.element_ty), mask=mask)


def add_lora(x: Tensor, rows: LoraRows, entry: int, out: Tensor) -> list[KernelLaunch]:
    """See `gpu_ops.add_lora`; `out` is added to."""
    assert x.stride(1) == out.stride(1) == 1, "features must lie dense"
    assert x.dtype == out.dtype, "adapters have one dtype"
    (num_tokens, depth), num_columns = x.shape, out.shape[1]
    num_rows, num_groups = len(rows.order), len(rows.headers)
    assert num_rows <= num_tokens, "a row has one adapter"
    num_parts = -(-depth // SPLIT_DEPTH)
    inner = x.new_empty((num_parts, num_rows, rows.max_rank), dtype=torch.float32)
    tile_rows = _tile_rows(num_rows / max(num_groups, 1))
    num_tiles = num_rows // tile_rows + num_groups if num_rows else 0
    both: dict[str, Any] = {
        "headers_ptr": rows.headers,
        "indptr_ptr": rows.indptr,
        "order_ptr": rows.order,
        "inner_ptr": inner,
        "entry": entry,
        "num_groups": num_groups,
        "num_rows": num_rows,
        "max_rank": rows.max_rank,
        "tile_rows": tile_rows,
        "block_rank": LORA_RANKS,
        "groups_at_once": ROWS_AT_ONCE,
        "precision": precision_of(x),
    }
    shrink = both | {
        "x_ptr": x,
        "depth": depth,
        "stride_x": x.stride(0),
        "block_depth": BLOCK_DEPTH_BYTES // x.element_size(),
        "split_depth": SPLIT_DEPTH,
        "rank_programs": RANK_PROGRAMS,
    }
    expand = both | {
        "out_ptr": out,
        "num_parts": num_parts,
        "num_columns": num_columns,
        "stride_out": out.stride(0),
        "block_columns": BLOCK_COLUMNS,
    }
    grid = (-(-num_columns // BLOCK_COLUMNS), num_tiles)
    return [
        KernelLaunch(lora_shrink_kernel, (RANK_PROGRAMS, num_tiles, num_parts), shrink, 4, 3),
        KernelLaunch(lora_expand_kernel, grid, expand, 4, 2),
    ]


def _tile_rows(rows_per_adapter: float) -> int:
    """Rows of a tile: a power of two, 16 to 64, of which few stay empty."""
    return 16 if rows_per_adapter <= 16 else 32 if rows_per_adapter <= 64 else 64
