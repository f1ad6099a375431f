"""Paged attention of rows with several new tokens, whose keys are in the pool already.

A tile is some new tokens of one row, in all heads of one K/V head. Tiles of all rows lie in one
axis of the grid, which the host knows without looking at the rows: row r gets the places from
qo_indptr[r] // tokens + r on, which is enough for its tokens wherever the row begins; places left
over end at once. Keys that all of the tile's queries see come first, without a mask.
"""

from __future__ import annotations

from torch import Tensor

from radixserve_kernels.attention_features import PLAIN, AttentionFeatures
from radixserve_kernels.gpu.attention import (
    BlockSizes,
    attend_keys,
    attend_splits,
    empty_state,
    exact_extend_blocks,
    extend_blocks,
    first_seen,
    hadamard_transform,
    is_long,
    keys_per_split,
    row_keys,
    write_state,
)
from radixserve_kernels.gpu.decode import (
    attention_arguments,
    group_of,
    hadamard_dim_of,
    split_arguments,
    split_state,
)
from radixserve_kernels.gpu.kernel_choice import choice_of
from radixserve_kernels.gpu.launch import (
    Capability,
    KernelLaunch,
    capability_of,
    kernel,
    power_of_2,
    tl,
    wait_for_inputs,
)
from radixserve_kernels.gpu.records import AttentionOutput, KVSplit, PagedKeys

ROWS_AT_ONCE = 128  # looked through for the one that a tile belongs to


@kernel()
def find_row(tile, qo_ptr, num_rows, tile_tokens: tl.constexpr, block: tl.constexpr):
    """The last row that begins at or before this tile, and its first tile."""
    row = tl.full([], -1, tl.int32)
    for start in range(0, num_rows, block):
        some = start + tl.arange(0, block)
        first = tl.load(qo_ptr + some, mask=some < num_rows, other=0) // tile_tokens + some
        row += tl.sum(((first <= tile) & (some < num_rows)).to(tl.int32), 0)
    return row, tl.load(qo_ptr + row) // tile_tokens + row


@kernel(
    varying=(
        *("qo_ptr", "indptr_ptr", "indices_ptr", "last_ptr", "lse_ptr", "num_rows"),
        *("window", "chunk"),
    )
)
def extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    qo_ptr,  # [R + 1]
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
    num_rows,
    is_causal: tl.constexpr,
    group: tl.constexpr,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    min_keys: tl.constexpr,
    max_keys: tl.constexpr,
    tile_tokens: tl.constexpr,
    rows_at_once: tl.constexpr,
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
    """Grid [tiles, Hkv, splits]; the last tiles of a row, which have most keys, come first.

    split_keys, is_split, has_scales, restores_out: see `decode_kernel`.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    kv_split = tl.program_id(2)
    num_kv_splits = tl.num_programs(2)
    wait_for_inputs(pdl)
    row, first_tile = find_row(tile, qo_ptr, num_rows, tile_tokens, rows_at_once)
    first_token = tl.load(qo_ptr + row)
    num_new = tl.load(qo_ptr + row + 1) - first_token
    offset = (tile - first_tile) * tile_tokens
    if offset >= num_new:
        return
    first_page, num_keys = row_keys(row, indptr_ptr, last_ptr, page_size)

    features = tl.arange(0, block_dim)
    member = tl.arange(0, block_rows)
    new = offset + member // group  # among the row's new tokens
    head = kv_head * group + member % group
    is_query = (member < tile_tokens * group) & (new < num_new)
    token = (first_token + new).to(tl.int64)
    is_read = is_query[:, None] & (features < head_dim)[None, :]
    cells = q_ptr + (token * stride_q_row + head * stride_q_head)[:, None] + features[None, :]
    query = tl.load(cells, mask=is_read, other=0.0)
    if has_scales:
        wide = query.to(tl.float32)
        query = hadamard_transform(wide, block_rows, block_dim, hadamard_dim).to(query.dtype)

    if is_causal:
        limit = num_keys - num_new + new + 1  # [rows] keys that each query sees
        seen_by_all = num_keys - num_new + offset + 1
        seen = tl.minimum(num_keys, seen_by_all + tile_tokens - 1)
    else:
        limit = tl.zeros([block_rows], tl.int32) + num_keys
        seen_by_all = num_keys
        seen = num_keys
    lower = limit
    lowest = 0
    if has_span:  # every query's own position is limit - 1
        lower = first_seen(limit - 1, window, chunk)
        lowest = first_seen(num_keys - num_new + offset, window, chunk)
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
        span = seen - lowest
        size = keys_per_split(span, num_kv_splits, num_kv_splits, min_keys, max_keys, block_keys)
        begin = lowest + kv_split * size
        end = tl.minimum(begin + size, seen)
        whole = tl.maximum(tl.minimum(seen_by_all, end) - begin, 0) // block_keys * block_keys
        if has_span:
            whole = 0
        state = empty_state(block_rows, block_dim)
        for is_masked in tl.static_range(2):
            first = begin + whole * is_masked
            last = begin + whole if is_masked == 0 else end
            state = attend_keys(
                *(query, state, pool, first, last, limit, lower, scale, cap),
                *(page_size, head_dim, block_dim, block_keys, precision, is_masked == 1),
                *(has_span, has_cap, has_scales),
            )
    else:
        begin = lowest // block_keys * block_keys
        end = seen
        if is_split:
            begin = tl.maximum(begin, kv_split * split_keys)
            end = tl.minimum(end, (kv_split + 1) * split_keys)
        state = attend_splits(
            *(query, pool, begin, end, seen_by_all, limit, lower, scale, cap, page_size, head_dim),
            *(block_rows, block_dim, block_keys, split_keys, precision, not has_span, has_span),
            *(has_cap, has_scales),
        )
    out_cells = token * stride_out_row + head * stride_out_head + kv_split * stride_out_split
    lse_cells = (token * num_heads + head) * num_kv_splits + kv_split
    write_state(
        *(state, out_ptr, lse_ptr, out_cells, lse_cells, is_query, head_dim, block_rows, block_dim),
        *(is_split, hadamard_dim if restores_out else 0),
    )


def extend(
    q: Tensor,
    keys: PagedKeys,
    qo_indptr: Tensor,
    scale: float,
    causal: bool,
    max_q: int,
    split: KVSplit,
    result: AttentionOutput,
    features: AttentionFeatures = PLAIN,
    capability: Capability | None = None,  # by default that of the GPU that q lies on
) -> list[KernelLaunch]:
    """See `gpu_ops.extend`; `result` is written."""
    assert causal or features.span == (0, 0), "a window or chunk goes by the places of queries"
    group, num_rows = group_of(q, keys), len(keys.last_page_len)
    choose = exact_extend_blocks if split.is_exact else extend_blocks
    shape = max_q * group, q.shape[2], q.dtype, capability or capability_of(q)
    blocks = choose(*shape, has_scales=hadamard_dim_of(keys) > 0)
    measured = choice_of(q.device).extend_tile
    if measured is not None and is_long(blocks) and not split.is_exact:
        blocks = BlockSizes(*measured)
    block_rows = max(blocks.rows, power_of_2(group))
    tile_tokens = block_rows // group
    arguments = attention_arguments(q, keys, scale, features)
    arguments |= split_arguments(split) | {
        "qo_ptr": qo_indptr,
        "num_rows": num_rows,
        "is_causal": causal,
        "block_rows": block_rows,
        "block_keys": blocks.keys,
        "tile_tokens": tile_tokens,
        "rows_at_once": ROWS_AT_ONCE,
    }
    state, merge = split_state(q, split, result, hadamard_dim_of(keys))
    num_tiles = len(q) // tile_tokens + num_rows if len(q) else 0
    grid = (num_tiles, keys.k_slots.shape[1], split.num_splits)
    attend = KernelLaunch(
        *(extend_kernel, grid, arguments | state, blocks.num_warps, blocks.num_stages),
        enable_fp_fusion=not split.is_exact,
    )
    return [attend, *merge]
