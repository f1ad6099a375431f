"""`CudaAttentionPlan`: a step's attention as kernel launches over paged K and V; numpy only.

    unique   every token once, causally: against the pages that its row does not share. Rows of one
             token (decode) and rows of several (extend) are two launches, of different kernels
    shared   one launch per level of pages that several rows have in common, without a mask; results
             are merged with `unique` by log-sum-exp

A launch covers neighbouring tokens, so the tokens may have to be put in another order first. The
names qo_indptr, kv_indptr, kv_indices and last_page_len mean what they mean in FlashInfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.attention.base import AttentionMetadata, IndexArray
from radixserve.attention.cuda.cascade import (
    SharedNode,
    covered_pages,
)

MAX_KERNEL_PAGE_SIZE = 64  # tokens of the largest page that kernels are asked to read


class PageRanges(NamedTuple):
    """`lengths` page ids of each request, from `first` on in the batch's kv_indices; both [n]."""

    first: IndexArray
    lengths: IndexArray


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """n requests over neighbouring tokens of a step. Request i has the queries
    [qo_indptr[i], qo_indptr[i + 1]) and reads kv_lens[i] keys on the pages
    kv_indices[kv_indptr[i] : kv_indptr[i + 1]].

    A request may be without pages: its queries see nothing here. Or without queries: padding.
    """

    first: int  # the launch's tokens are [first, end) of the plan's order
    end: int
    qo_indptr: IntArray  # [n + 1] from 0 to end - first
    kv_indptr: IntArray  # [n + 1] from 0
    kv_indices: IntArray | slice | PageRanges  # page ids, or which of the batch's they are
    last_page_len: IntArray  # [n] tokens in the last page; 0 without pages
    kv_lens: IntArray  # [n]
    max_q: int  # most queries of a request
    is_causal: bool  # the last query sees all keys, the one before it all but the last ...;
    # else every query sees every key

    @property
    def num_requests(self) -> int:
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        return self.end - self.first

    @property
    def num_pages(self) -> int:
        return int(self.kv_indptr[-1])

    @property
    def is_decode(self) -> bool:
        """Every request has one query and at least one key."""
        return self.is_causal and self.max_q == 1


@dataclass(frozen=True, slots=True)
class CudaAttentionPlan:
    unique: tuple[LaunchPlan, ...]
    shared: tuple[LaunchPlan, ...]
    order: IndexArray | None  # [T] which of the batch's tokens lies where; None: all in place

    @property
    def launches(self) -> tuple[LaunchPlan, ...]:
        return (*self.unique, *self.shared)

    @property
    def wrapper_keys(self) -> list[str]:
        """A name for each launch, the same for launches of one kind in every plan."""
        kinds = ["decode" if launch.is_decode else "extend" for launch in self.unique]
        return kinds + [f"level {level}" for level in range(len(self.shared))]


def plan_rows(
    host: AttentionMetadata, page_size: int, nodes: Sequence[SharedNode], kernel_page_size: int
) -> CudaAttentionPlan:
    """The plan of a step, for kernels that read pages of `kernel_page_size` tokens."""
    num_new = np.diff(host.qo_indptr)
    is_long = num_new > 1
    rows, is_moved = _row_order(nodes, is_long)
    covered = covered_pages(nodes, len(rows))
    change = np.flatnonzero(np.diff(is_long[rows])) + 1
    launches, first = [], 0
    for members in np.split(rows, change.tolist()):
        launches.append(unique_launch(host, members, page_size, covered, first))
        first = launches[-1].end
    levels = [
        level_launch(host, list(level), page_size, rows)
        for _, level in groupby(nodes, key=lambda node: node.level)
    ]
    return CudaAttentionPlan(
        unique=tuple(
            on_kernel_pages(launch, host, page_size, kernel_page_size) for launch in launches
        ),
        shared=tuple(
            on_kernel_pages(launch, host, page_size, kernel_page_size) for launch in levels
        ),
        order=_token_order(host, rows, num_new) if is_moved else None,
    )


def tree_order(nodes: Sequence[SharedNode], is_long: np.ndarray) -> IndexArray:
    """[R] the rows in an order in which those of every node lie next to each other.

    is_long [R]: rows of several new tokens come after the others, so that a node with both kinds
    has two runs. Else nodes and rows are in the order of their first row, rows of no node last.
    """
    num_rows = len(is_long)
    depth = max((node.level + 1 for node in nodes), default=0)
    keys = np.full((depth, num_rows), num_rows)
    for node in nodes:
        keys[node.level, node.rows] = node.rows[0]
    return np.lexsort((np.arange(num_rows), *keys[::-1], is_long))


def choose_kernel_page_size(page_size: int, wanted: int | None = None) -> int:
    """Tokens of a page as kernels are asked to read it, a divisor of `page_size`.

    `wanted`, where it is one; else the largest up to MAX_KERNEL_PAGE_SIZE. Pages of K and V lie
    token after token, so that a page can be read as several smaller ones.
    """
    if wanted is not None:
        if not 0 < wanted <= page_size or page_size % wanted:
            raise ValueError(f"pages of {page_size} tokens cannot be read as pages of {wanted}")
        return wanted
    largest = min(page_size, MAX_KERNEL_PAGE_SIZE)
    return max(size for size in range(1, largest + 1) if page_size % size == 0)


def page_ids(launch: LaunchPlan, host: AttentionMetadata) -> IntArray:
    """The launch's page ids, from the batch where it only names a range of them."""
    places = launch.kv_indices
    if isinstance(places, PageRanges):
        return _take_ranges(host.kv_indices, *places)
    return host.kv_indices[places] if isinstance(places, slice) else places


# -- rows in order --------------------------------------------------------------------------------


def _row_order(nodes: Sequence[SharedNode], is_long: np.ndarray) -> tuple[IndexArray, bool]:
    """The rows so that kinds and nodes lie together, and whether any is moved."""
    in_place = np.arange(len(is_long))
    if not nodes and int((is_long[1:] != is_long[:-1]).sum()) < 2:
        return in_place, False
    order = tree_order(nodes, is_long)
    return order, bool((order != in_place).any())


def _token_order(host: AttentionMetadata, rows: IndexArray, num_new: IndexArray) -> IndexArray:
    if int(num_new.max()) == 1:
        return host.qo_indptr[rows]
    count = num_new[rows]
    ends = np.cumsum(count)
    return np.repeat(host.qo_indptr[rows] - (ends - count), count) + np.arange(ends[-1])


# -- launches -------------------------------------------------------------------------------------


def unique_launch(
    host: AttentionMetadata, rows: IndexArray, page_size: int, covered: IndexArray, first: int
) -> LaunchPlan:
    """The `rows`' new tokens against the pages after each row's first `covered` [R] ones.

    `first`: the place of the first of these tokens in the plan's order.
    """
    num_new = host.qo_indptr[rows + 1] - host.qo_indptr[rows]
    start = host.kv_indptr[rows] + covered[rows]
    count = host.kv_indptr[rows + 1] - start
    kv_lens = host.seq_lens[rows] - covered[rows] * page_size
    qo_indptr = indptr(num_new)
    kv_indices: slice | PageRanges = slice(int(start[0]), int(start[-1] + count[-1]))
    if not bool((start[1:] == start[:-1] + count[:-1]).all()):
        kv_indices = PageRanges(start, count)
    return LaunchPlan(
        first=first,
        end=first + int(qo_indptr[-1]),
        qo_indptr=qo_indptr,
        kv_indptr=indptr(count),
        kv_indices=kv_indices,
        last_page_len=((kv_lens - 1) % page_size + 1).astype(np.int32),
        kv_lens=kv_lens.astype(np.int32),
        max_q=int(num_new.max()),
        is_causal=True,
    )


def level_launch(
    host: AttentionMetadata, nodes: Sequence[SharedNode], page_size: int, order: IndexArray
) -> LaunchPlan:
    """The nodes, all of one level: one request a run of a node's rows in `order` [R].

    Rows between two runs that are in none of the nodes form requests without pages; the launch ends
    where no node's rows follow.
    """
    node_of = np.full(len(order), -1)
    for number, node in enumerate(nodes):
        node_of[node.rows] = number
    node_of = node_of[order]
    inside = np.flatnonzero(node_of >= 0)
    first_row, end_row = int(inside[0]), int(inside[-1]) + 1
    node_of = node_of[first_row:end_row]
    bounds = np.flatnonzero(np.diff(node_of, prepend=-2, append=-2))  # of the runs
    tokens = indptr(np.diff(host.qo_indptr)[order])
    num_new = np.diff(tokens[first_row + bounds])
    which = node_of[bounds[:-1]]
    has_pages = which >= 0
    pages = [host.page_tables[node.rows[0]][node.first : node.end] for node in nodes]
    count = np.where(has_pages, np.array([node.num_pages for node in nodes])[which], 0)
    return LaunchPlan(
        first=int(tokens[first_row]),
        end=int(tokens[end_row]),
        qo_indptr=indptr(num_new),
        kv_indptr=indptr(count),
        kv_indices=np.concatenate(
            [pages[node_number] for node_number in which[has_pages].tolist()], dtype=np.int32
        ),
        last_page_len=np.where(has_pages, page_size, 0).astype(np.int32),
        kv_lens=(count * page_size).astype(np.int32),
        max_q=int(num_new.max()),
        is_causal=False,
    )


def on_kernel_pages(
    launch: LaunchPlan, host: AttentionMetadata, page_size: int, kernel_page_size: int
) -> LaunchPlan:
    """The same on pages of `kernel_page_size` tokens, a divisor of `page_size`."""
    if kernel_page_size == page_size:
        return launch
    pages, factor = page_ids(launch, host), page_size // kernel_page_size
    smaller = np.repeat(pages * np.int32(factor), factor)
    smaller += np.tile(np.arange(factor, dtype=np.int32), len(pages))
    count = -(-launch.kv_lens.astype(np.int64) // kernel_page_size)
    first = launch.kv_indptr[:-1].astype(np.int64) * factor
    last = (launch.kv_lens - 1) % kernel_page_size + 1
    return replace(
        launch,
        kv_indptr=indptr(count),
        kv_indices=_take_ranges(smaller, first, count),
        last_page_len=np.where(launch.kv_lens > 0, last, 0).astype(np.int32),
    )


def indptr(lengths: NDArray[np.signedinteger]) -> IntArray:
    """[n + 1] int32: 0 and the running sums."""
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _take_ranges(values: IntArray, first: IndexArray, count: IndexArray) -> IntArray:
    """The ranges [first[i], first[i] + count[i]) of `values`, concatenated."""
    if not len(first):
        return values[:0]
    ends = (first + count).tolist()
    return np.concatenate([values[a:b] for a, b in zip(first.tolist(), ends, strict=True)])
