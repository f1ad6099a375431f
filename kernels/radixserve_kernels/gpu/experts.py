"""Products of the rows of each expert with that expert's weight, and its clamped activation."""

from __future__ import annotations

from torch import Tensor

from radixserve_kernels.gpu.attention import precision_of
from radixserve_kernels.gpu.extend import ROWS_AT_ONCE, find_row
from radixserve_kernels.gpu.launch import KernelLaunch, kernel, tl

BLOCK_COLUMNS, BLOCK_DEPTH_BYTES = 128, 128
BLOCK = 1_024  # features of the activation at a time


@kernel(varying=("order_ptr", "indptr_ptr", "fan_out"))
def grouped_linear_kernel(
    x_ptr,  # [R, K]
    weight_ptr,  # [E, N, K]
    bias_ptr,  # [E, N] or None
    order_ptr,  # [P] the pairs by expert
    indptr_ptr,  # [E + 1]
    out_ptr,  # [P, N]
    fan_out,  # P / R
    num_experts,
    num_columns,
    depth,
    stride_x,
    stride_expert,
    stride_column,
    stride_out,
    tile_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
    experts_at_once: tl.constexpr,
    precision: tl.constexpr,
):
    """Grid [blocks of columns, tiles of an expert's rows]."""
    tile = tl.program_id(1)
    expert, first_tile = find_row(tile, indptr_ptr, num_experts, tile_rows, experts_at_once)
    first = tl.load(indptr_ptr + expert) + (tile - first_tile) * tile_rows
    end = tl.load(indptr_ptr + expert + 1)
    if first >= end:
        return
    place = first + tl.arange(0, tile_rows)
    is_row = place < end
    pair = tl.load(order_ptr + place, mask=is_row, other=0)
    column = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    is_column = column < num_columns
    inner = tl.arange(0, block_depth)
    x_cells = x_ptr + (pair // fan_out)[:, None] * stride_x + inner[None, :]
    weight_cells = weight_ptr + expert.to(tl.int64) * stride_expert
    weight_cells += column.to(tl.int64)[None, :] * stride_column + inner[:, None]
    sums = tl.zeros([tile_rows, block_columns], tl.float32)
    for begin in range(0, depth, block_depth):
        is_inner = begin + inner < depth
        x = tl.load(x_cells + begin, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        mask = is_inner[:, None] & is_column[None, :]
        weight = tl.load(weight_cells + begin, mask=mask, other=0.0)
        sums = tl.dot(x, weight, sums, input_precision=precision)
    if bias_ptr is not None:
        cells = bias_ptr + expert.to(tl.int64) * num_columns + column
        sums += tl.load(cells, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_cells = out_ptr + pair[:, None] * stride_out + column[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(out_cells, sums.to(out_ptr.dtype.element_ty), mask=mask)


@kernel()
def clamped_swiglu_kernel(
    gate_up_ptr,  # [T, 2M]
    out_ptr,  # [T, M]
    alpha,
    limit,
    num_features,  # M
    stride_gate_up,
    stride_out,
    block: tl.constexpr,
):
    """Grid [T, blocks of features]."""
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * block + tl.arange(0, block)
    is_feature = feature < num_features
    cells = gate_up_ptr + row * stride_gate_up + feature
    gate = tl.load(cells, mask=is_feature, other=0.0).to(tl.float32)
    up = tl.load(cells + num_features, mask=is_feature, other=0.0).to(tl.float32)
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, up)
    up = tl.where(up < -limit, -limit, up)
    out = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out + feature, out, mask=is_feature)


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, indptr: Tensor, out: Tensor
) -> list[KernelLaunch]:
    """See `gpu_ops.grouped_linear`; `out` is written."""
    assert x.stride(1) == weight.stride(2) == out.stride(1) == 1, "features must lie dense"
    assert bias is None or bias.is_contiguous(), "features must lie dense"
    num_experts, num_columns, depth = weight.shape
    num_rows = len(order)
    tile_rows = _tile_rows(num_rows / num_experts)
    arguments = {
        "x_ptr": x,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "order_ptr": order,
        "indptr_ptr": indptr,
        "out_ptr": out,
        "fan_out": num_rows // max(len(x), 1),
        "num_experts": num_experts,
        "num_columns": num_columns,
        "depth": depth,
        "stride_x": x.stride(0),
        "stride_expert": weight.stride(0),
        "stride_column": weight.stride(1),
        "stride_out": out.stride(0),
        "tile_rows": tile_rows,
        "block_columns": BLOCK_COLUMNS,
        "block_depth": BLOCK_DEPTH_BYTES // x.element_size(),
        "experts_at_once": ROWS_AT_ONCE,
        "precision": precision_of(x),
    }
    num_tiles = num_rows // tile_rows + num_experts if num_rows else 0
    grid = (-(-num_columns // BLOCK_COLUMNS), num_tiles)
    return [KernelLaunch(grouped_linear_kernel, grid, arguments, 4, 3)]


def _tile_rows(rows_per_expert: float) -> int:
    """Rows of a tile: a power of two, 16 to 64, of which few stay empty."""
    return 16 if rows_per_expert <= 16 else 32 if rows_per_expert <= 64 else 64


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float, out: Tensor) -> list[KernelLaunch]:
    """See `gpu_ops.clamped_swiglu`; `out` is written."""
    assert gate_up.stride(-1) == out.stride(-1) == 1, "features must lie dense"
    num_tokens, num_features = out.shape
    arguments = {
        "gate_up_ptr": gate_up,
        "out_ptr": out,
        "alpha": alpha,
        "limit": limit,
        "num_features": num_features,
        "stride_gate_up": gate_up.stride(0),
        "stride_out": out.stride(0),
        "block": BLOCK,
    }
    grid = (num_tokens, -(-num_features // BLOCK))
    return [KernelLaunch(clamped_swiglu_kernel, grid, arguments)]
