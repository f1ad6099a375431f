"""The shared parts of the attention kernels: the loop over paged keys, and the block sizes.

A tile holds the queries of one K/V head as rows: all query heads that share it, so that its keys
and values are read once. Scores are kept in base 2: exp(x) is exp2(x * log2(e)).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from radixserve_kernels.gpu.launch import Capability, kernel, power_of_2, tl

LOG2_E = math.log2(math.e)
MAX_GROUP = 128  # query heads of one K/V head


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """rows queries (of all heads of a group) against keys at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


@kernel()
def row_keys(row, indptr_ptr, last_ptr, page_size: tl.constexpr):
    """The place of a row's first page in the list of pages, and the number of its keys."""
    first_page = tl.load(indptr_ptr + row)
    num_pages = tl.load(indptr_ptr + row + 1) - first_page
    return first_page, tl.maximum((num_pages - 1) * page_size + tl.load(last_ptr + row), 0)


@kernel()
def empty_state(block_rows: tl.constexpr, block_dim: tl.constexpr):
    """The state of queries that have seen no key, base 2.

    m_i [rows] float32: the maximum score so far; l_i [rows] float32: the sum of exp2(score - m_i);
    acc [rows, block_dim] float32: the sum of exp2(score - m_i) * value.
    """
    m_i = tl.full([block_rows], float("-inf"), tl.float32)
    l_i = tl.zeros([block_rows], tl.float32)
    return m_i, l_i, tl.zeros([block_rows, block_dim], tl.float32)


@kernel()
def cap_scores(scores, scale, cap):
    """cap * tanh(scores * scale / cap), scale and cap in base 2."""
    return cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * (scale / cap * 2.8853900817779268))))


@kernel()
def first_seen(position, window, chunk):
    """The first position that a query at `position` sees, by a window and a chunk; 0: none."""
    first = tl.where(window > 0, position + 1 - window, 0)
    first = tl.maximum(first, tl.where(chunk > 0, position // tl.maximum(chunk, 1) * chunk, 0))
    return tl.maximum(first, 0)


@kernel()
def hadamard_transform(
    x,  # float32 [rows, block_dim]
    rows: tl.constexpr,
    block_dim: tl.constexpr,
    size: tl.constexpr,  # of a block, a power of two
):
    """The bits of `multiply_hadamard`: each stage adds and subtracts neighbours, and puts the sums
    of a block before its differences."""
    for stage in tl.static_range(12):
        if 1 << stage < size:
            low, high = tl.split(tl.reshape(x, [rows, block_dim // size, size // 2, 2]))
            halves = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
            x = tl.reshape(halves, [rows, block_dim])
    return x * size**-0.5


@kernel()
def attend_keys(
    query,  # [rows, block_dim]
    state,  # see `empty_state`
    pool,  # K and V at the K/V head, page ids at the row's first, the stride of a slot; scales of
    # K and V at the K/V head and the stride of a slot's, read if has_scales
    begin,
    end,  # keys
    limit,  # [rows] number of keys that each query sees; read if is_masked
    lower,  # [rows] the first of them; read if has_span, which is always masked
    scale,
    cap,  # of scores, base 2; read if has_cap
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_keys: tl.constexpr,
    precision: tl.constexpr,
    is_masked: tl.constexpr,
    has_span: tl.constexpr,
    has_cap: tl.constexpr,
    has_scales: tl.constexpr,
):
    """The state after the keys [begin, end); without a mask these are whole blocks of keys."""
    m_i, l_i, acc = state
    k_ptr, v_ptr, pages_ptr, stride_slot, k_scale_ptr, v_scale_ptr, stride_scale = pool
    features = tl.arange(0, block_dim)
    for start in range(begin, end, block_keys):
        position = start + tl.arange(0, block_keys)
        if is_masked:
            is_key = position < end
            if has_span:
                is_key = is_key & (position >= tl.min(lower, 0))
            pages = tl.load(pages_ptr + position // page_size, mask=is_key, other=0)
            is_read = is_key[:, None] & (features < head_dim)[None, :]
        else:
            pages = tl.load(pages_ptr + position // page_size)
            is_read = (features < head_dim)[None, :]
        slots = pages.to(tl.int64) * page_size + position % page_size
        cells = slots[:, None] * stride_slot + features[None, :]
        if is_masked or head_dim != block_dim:
            keys = tl.load(k_ptr + cells, mask=is_read, other=0.0)
            values = tl.load(v_ptr + cells, mask=is_read, other=0.0)
        else:
            keys = tl.load(k_ptr + cells)
            values = tl.load(v_ptr + cells)
        keys = keys.to(query.dtype)
        if has_scales:
            scales = slots * stride_scale
            if is_masked:
                k_scale = tl.load(k_scale_ptr + scales, mask=is_key, other=0.0).to(tl.float32)
                v_scale = tl.load(v_scale_ptr + scales, mask=is_key, other=0.0).to(tl.float32)
            else:
                k_scale = tl.load(k_scale_ptr + scales).to(tl.float32)
                v_scale = tl.load(v_scale_ptr + scales).to(tl.float32)
            values = values.to(tl.float32) * v_scale[:, None]
        values = values.to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision=precision)
        if has_scales:
            scores = scores * k_scale[None, :]
        factor = scale
        if has_cap:
            scores = cap_scores(scores, scale, cap)
            factor = 1.0
        if is_masked:
            is_seen = position[None, :] < limit[:, None]
            if has_span:
                is_seen = is_seen & (position[None, :] >= lower[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1) * factor)
        shift = m_new
        if is_masked:  # a query may have seen no key yet
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2(scores * factor - shift[:, None])
        alpha = tl.exp2(m_i - shift)
        l_i = l_i * alpha + tl.sum(weights, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=precision)
        m_i = m_new
    return m_i, l_i, acc


@kernel()
def attend_splits(
    query,
    pool,
    begin,  # a multiple of block_keys
    end,
    seen_by_all,  # keys that every query sees; read if not has_span
    limit,
    lower,
    scale,
    cap,
    page_size: tl.constexpr,
    head_dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
    block_keys: tl.constexpr,
    split_keys: tl.constexpr,
    precision: tl.constexpr,
    has_whole: tl.constexpr,  # whether keys that every query sees are read without a mask
    has_span: tl.constexpr,
    has_cap: tl.constexpr,
    has_scales: tl.constexpr,
):
    """The state after the keys [begin, end), see `attend_keys`: each split of the keys has a state
    of its own, and these are merged in order. Splits begin at multiples of split_keys, so that the
    result is the same if each of them is computed by another program."""
    m_i, l_i, acc = empty_state(block_rows, block_dim)
    for split in range(begin // split_keys * split_keys, end, split_keys):
        first = tl.maximum(split, begin)
        last = tl.minimum(split + split_keys, end)
        whole = 0
        state = empty_state(block_rows, block_dim)
        if has_whole:
            whole = tl.maximum(tl.minimum(seen_by_all, last) - first, 0) // block_keys * block_keys
            state = attend_keys(
                *(query, state, pool, first, first + whole, limit, lower, scale, cap),
                *(page_size, head_dim, block_dim, block_keys, precision, False, has_span, has_cap),
                has_scales,
            )
        state = attend_keys(
            *(query, state, pool, first + whole, last, limit, lower, scale, cap),
            *(page_size, head_dim, block_dim, block_keys, precision, True, has_span, has_cap),
            has_scales,
        )
        out, lse = finished(state)
        m_i, l_i, acc = merge_split(m_i, l_i, acc, out, lse)
    return m_i, l_i, acc


@kernel()
def merge_split(m_i, l_i, acc, out, lse):
    """The state of finished splits after another one. Sums are fused in one way wherever it is
    inlined."""
    m_new = tl.maximum(m_i, lse)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2(m_i - shift)
    weight = tl.exp2(lse - shift)
    l_i = tl.fma(l_i, alpha, weight)
    acc = tl.fma(acc, alpha[:, None] + tl.zeros_like(acc), out * weight[:, None])
    return m_new, l_i, acc


@kernel()
def finished(state):
    """The output and the lse of each query."""
    m_i, l_i, acc = state
    return acc / tl.where(l_i > 0.0, l_i, 1.0)[:, None], m_i + tl.log2(l_i)


@kernel()
def keys_per_split(
    num_keys,
    num_kv_splits,
    fixed_splits,
    min_keys: tl.constexpr,
    max_keys: tl.constexpr,
    block_keys: tl.constexpr,
):
    """Keys of each split: a row has fixed_splits splits, more where those exceed max_keys."""
    fixed = tl.minimum(tl.cdiv(num_keys, fixed_splits), max_keys)
    size = tl.maximum(tl.maximum(tl.cdiv(num_keys, num_kv_splits), fixed), min_keys)
    return tl.cdiv(size, block_keys) * block_keys


@kernel()
def write_state(
    state,
    out_ptr,
    lse_ptr,
    out_cells,  # [rows] where each query's output begins
    lse_cells,  # [rows]
    is_query,  # [rows]
    head_dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_dim: tl.constexpr,
    is_split: tl.constexpr,
    hadamard_dim: tl.constexpr,  # of `hadamard_transform` over the output; 0: none
):
    """Store the finished output and, unless its pointer is None, the lse of each query. is_split:
    the state is that of `attend_splits` after a single split, which has these already."""
    if is_split:
        lse, _, out = state
    else:
        out, lse = finished(state)
    if hadamard_dim:
        out = hadamard_transform(out, block_rows, block_dim, hadamard_dim)
    features = tl.arange(0, block_dim)
    is_written = is_query[:, None] & (features < head_dim)[None, :]
    cells = out_ptr + out_cells[:, None] + features[None, :]
    tl.store(cells, out.to(out_ptr.dtype.element_ty), mask=is_written)
    if lse_ptr is not None:
        tl.store(lse_ptr + lse_cells, lse, mask=is_query)


def exact_keys(head_dim: int, dtype: torch.dtype) -> int:
    """Keys at a time of every kernel where results depend on a query's own keys alone."""
    return 32 if dtype == torch.float32 or head_dim > 128 else 64


def decode_blocks(group: int, head_dim: int, dtype: torch.dtype) -> BlockSizes:
    """16 KB each of K and V at a time at 128 features, two such blocks under way.

    Page ids are loaded one step before the keys, so that 5 stages keep 2 blocks of keys in flight.
    """
    rows = max(power_of_2(group), 16)
    if dtype == torch.float32:  # no tensor cores: products of small tiles
        return BlockSizes(rows, 32, 8, 2)
    return BlockSizes(rows, 32 if head_dim > 128 else 64, 4 if rows <= 32 else 8, 5)


def extend_blocks(
    num_rows: int,
    head_dim: int,
    dtype: torch.dtype,
    capability: Capability,
    *,
    has_scales: bool = False,
) -> BlockSizes:
    """num_rows: queries times heads of a group in the longest row. has_scales: K and V are integers
    with scales, which take registers of Ampere's that the largest tile has not got.

    Hopper and Blackwell servers have 227 KB of shared memory and multiply out of it. The others
    hold the queries in registers too, which leaves fewer of them for keys.
    """
    if dtype == torch.float32:
        return BlockSizes(16, 16, 8, 1)
    is_wide, is_server = head_dim > 128, capability[0] in (9, 10)
    if num_rows <= 16:
        return BlockSizes(16, 32 if is_wide else 64, 4, 5)
    if has_scales and not is_server:
        return BlockSizes(32, 32, 8, 3)
    is_small = num_rows <= 64 or is_wide
    rows, num_warps = (64, 8 if is_wide else 4) if is_small else (128, 8)
    return BlockSizes(rows, 64 if is_server else 32, num_warps, 3)


def exact_extend_blocks(
    num_rows: int,
    head_dim: int,
    dtype: torch.dtype,
    capability: Capability,
    *,
    has_scales: bool = False,
) -> BlockSizes:
    """`extend_blocks` with `exact_keys` at a time; where those are more, or K and V are integers
    with scales, of fewer queries."""
    blocks = extend_blocks(num_rows, head_dim, dtype, capability, has_scales=has_scales)
    keys = exact_keys(head_dim, dtype)
    # With 4 warps Ampere's registers do not do; with 128 queries Hopper's do not do for integers.
    if (keys > blocks.keys or has_scales) and blocks.rows > 64:
        blocks = replace(extend_blocks(64, head_dim, dtype, capability), num_warps=8)
    return replace(blocks, keys=keys)


def is_long(blocks: BlockSizes) -> bool:
    """Whether they are those of many queries, which another card may want otherwise."""
    return blocks.rows == 128


def precision_of(q: Tensor) -> str:
    """float32 is for exactness: no tf32."""
    return "ieee" if q.dtype == torch.float32 else "tf32"
