"""Copies of the first tokens of pages over all layers, and page ids from a table into one list."""

from __future__ import annotations

from torch import Tensor

from radixserve_kernels.gpu.launch import KernelLaunch, kernel, power_of_2, tl

MAX_BLOCK = 4_096  # cells of a page at a time
PAGES_AT_ONCE = 1_024  # page ids
PROGRAMS_PER_ROW = 8


@kernel(varying=("copies_ptr",))
def copy_page_prefixes_kernel(
    kv_ptr,  # [L * 2, num_pages, P, Hkv, D]
    copies_ptr,  # [n, 3] int32: source page, destination page, tokens
    token_cells,  # Hkv * D
    stride_half,  # between K and V of a layer, V and the next K
    stride_page,
    block: tl.constexpr,
):
    """Grid [n, L * 2, blocks of a page]."""
    copy = copies_ptr + tl.program_id(0) * 3
    source = tl.load(copy).to(tl.int64)
    destination = tl.load(copy + 1).to(tl.int64)
    num_tokens = tl.load(copy + 2)
    cell = tl.program_id(2) * block + tl.arange(0, block)
    is_copied = cell < num_tokens * token_cells
    half = kv_ptr + tl.program_id(1).to(tl.int64) * stride_half
    cells = tl.load(half + source * stride_page + cell, mask=is_copied)
    tl.store(half + destination * stride_page + cell, cells, mask=is_copied)


@kernel(varying=("table_ptr", "row_of_ptr", "indptr_ptr", "out_ptr", "stride_table"))
def flat_indices_kernel(
    table_ptr,  # [rows, max_pages] int32, all of them
    row_of_ptr,  # [R]
    indptr_ptr,  # [R + 1]
    out_ptr,  # [N]
    stride_table,
    block: tl.constexpr,
):
    """Grid [R, programs of a row]."""
    row = tl.program_id(0)
    source = tl.load(row_of_ptr + row)
    if source >= 0:
        first = tl.load(indptr_ptr + row)
        num_pages = tl.load(indptr_ptr + row + 1) - first
        pages = table_ptr + source.to(tl.int64) * stride_table
        step = tl.num_programs(1) * block
        for start in range(tl.program_id(1) * block, num_pages, step):
            place = start + tl.arange(0, block)
            is_page = place < num_pages
            tl.store(out_ptr + first + place, tl.load(pages + place, mask=is_page), mask=is_page)


def copy_page_prefixes(kv: Tensor, copies: Tensor) -> list[KernelLaunch]:
    """See `gpu_ops.copy_page_prefixes`."""
    assert all(tensor.is_contiguous() for tensor in (kv, copies)), "pool and copies must lie dense"
    assert copies.shape[1] == 3, f"copies have 3 columns, not {copies.shape[1]}"
    num_layers, halves, _, page_size, num_kv_heads, head_dim = kv.shape
    token_cells = num_kv_heads * head_dim
    block = min(power_of_2(page_size * token_cells), MAX_BLOCK)
    arguments = {
        "kv_ptr": kv,
        "copies_ptr": copies,
        "token_cells": token_cells,
        "stride_half": kv.stride(1),
        "stride_page": kv.stride(2),
        "block": block,
    }
    grid = (len(copies), num_layers * halves, -(-page_size * token_cells // block))
    return [KernelLaunch(copy_page_prefixes_kernel, grid, arguments)]


def flat_indices(
    page_table: Tensor, row_of: Tensor, indptr: Tensor, out: Tensor
) -> list[KernelLaunch]:
    """See `gpu_ops.flat_indices`; `out` is written."""
    assert page_table.stride(1) == 1, "page ids of a row must lie dense"
    pages = page_table, page_table.stride(0), page_table.shape[1]
    return [_copy_rows(*pages, row_of, indptr, out)]


def copy_ranges(
    values: Tensor, first: Tensor, indptr: Tensor, out: Tensor, most: int
) -> list[KernelLaunch]:
    """See `gpu_ops.copy_ranges`; `out` is written. A table whose rows begin at every value."""
    return [_copy_rows(values, 1, most, first, indptr, out)]


def _copy_rows(
    values: Tensor,
    stride: int,
    most: int,
    row_of: Tensor,
    indptr: Tensor,
    out: Tensor,
) -> KernelLaunch:
    arguments = {
        "table_ptr": values,
        "row_of_ptr": row_of,
        "indptr_ptr": indptr,
        "out_ptr": out,
        "stride_table": stride,
        "block": PAGES_AT_ONCE,
    }
    grid = (len(row_of), min(-(-most // PAGES_AT_ONCE), PROGRAMS_PER_ROW))
    return KernelLaunch(flat_indices_kernel, grid, arguments)
