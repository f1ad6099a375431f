"""`PagedPlan`: a step's attention as kernel launches over paged K and V; numpy only.

    unique   every token once, causally: against the pages that its row does not share. Rows of one
             token (decode) and rows of several (extend) are two launches, of different kernels
    shared   one launch a level of pages that several rows have in common, without a mask; results
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
from radixserve.attention.base import HostIndex, IndexArray
from radixserve.attention.cuda.cascade import (
    SharedNode,
    count_runs,
    covered_pages,
    saved_pages,
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
class PagedPlan:
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
        return kinds + [f"level {at}" for at in range(len(self.shared))]


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The sizes of a plan for a CUDA graph, the same at every replay."""

    num_rows: int  # of one token each
    max_pages: int  # of all rows together, as the kernels see them
    num_groups: int  # requests of the shared launch; 0: there is none

    @classmethod
    def of_rows(cls, num_rows: int, max_pages: int, num_levels: int) -> GraphShape:
        """Requests of the shared launch: room for about num_rows / 8 nodes and the rows between.

        Few requests let the kernel assume long ones: its tiles hold more of a node's queries then.
        """
        num_groups = min(num_rows, num_rows // 4 + 2) + 1
        return cls(num_rows, max_pages, num_groups if num_levels else 0)


def plan_rows(
    host: HostIndex, page_size: int, nodes: Sequence[SharedNode], kernel_page_size: int
) -> PagedPlan:
    """The plan of a step, for kernels that read pages of `kernel_page_size` tokens."""
    num_new = np.diff(host.qo_indptr)
    is_long = num_new > 1
    rows, is_moved = _row_order(nodes, is_long)
    covered = covered_pages(nodes, len(rows))
    change = np.flatnonzero(np.diff(is_long[rows])) + 1
    launches, first = [], 0
    for members in np.split(rows, change.tolist()):
        launches.append(_unique_launch(host, members, page_size, covered, first))
        first = launches[-1].end
    levels = [
        _level_launch(host, list(level), page_size, rows)
        for _, level in groupby(nodes, key=lambda node: node.level)
    ]
    return PagedPlan(
        unique=tuple(_on_kernel_pages(one, host, page_size, kernel_page_size) for one in launches),
        shared=tuple(_on_kernel_pages(one, host, page_size, kernel_page_size) for one in levels),
        order=_token_order(host, rows, num_new) if is_moved else None,
    )


def plan_graph(
    host: HostIndex,
    page_size: int,
    nodes: Sequence[SharedNode],
    kernel_page_size: int,
    shape: GraphShape,
) -> PagedPlan:
    """The plan of at most shape.num_rows rows of one token, padded to `shape`; in place.

    Nodes are of one level. Raises ValueError if the rows do not fit the shape.
    """
    num_rows = len(host.start)
    if int(host.qo_indptr[-1]) != num_rows or num_rows > shape.num_rows:
        raise ValueError(
            f"{num_rows} rows of {host.qo_indptr[-1]} tokens do not fit a graph of "
            f"{shape.num_rows} rows of one token"
        )
    rows = np.arange(num_rows)
    nodes = _fitting(nodes, rows, shape.num_groups)
    unique = _unique_launch(host, rows, page_size, covered_pages(nodes, num_rows), 0)
    unique = _on_kernel_pages(unique, host, page_size, kernel_page_size)
    if num_rows < shape.num_rows:
        unique = replace(unique, kv_indices=page_ids(unique, host))
        unique = _pad(unique, shape.num_rows, shape.num_rows)
    if unique.num_pages > shape.max_pages:
        raise ValueError(
            f"{unique.num_pages} pages do not fit a graph of {shape.max_pages} pages in all"
        )
    if not shape.num_groups:
        return PagedPlan((unique,), (), None)
    level = _level_launch(host, nodes, page_size, rows) if nodes else _no_requests()
    level = _on_kernel_pages(_from_first_token(level), host, page_size, kernel_page_size)
    return PagedPlan((unique,), (_pad(level, shape.num_groups, shape.num_rows),), None)


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


def page_ids(launch: LaunchPlan, host: HostIndex) -> IntArray:
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


def _token_order(host: HostIndex, rows: IndexArray, num_new: IndexArray) -> IndexArray:
    if int(num_new.max()) == 1:
        return host.qo_indptr[rows]
    count = num_new[rows]
    ends = np.cumsum(count)
    return np.repeat(host.qo_indptr[rows] - (ends - count), count) + np.arange(ends[-1])


def _fitting(
    nodes: Sequence[SharedNode], rows: IndexArray, num_groups: int
) -> Sequence[SharedNode]:
    """Those that save most, as many as surely fit `num_groups` requests with the rows between."""
    most = sorted(nodes, key=lambda node: saved_pages([node], rows), reverse=True)
    kept, num_runs = [], 0
    for node in most:
        num_runs += count_runs(node.rows)
        if 2 * num_runs + 1 > num_groups:
            break
        kept.append(node)
    return kept


# -- launches -------------------------------------------------------------------------------------


def _unique_launch(
    host: HostIndex, rows: IndexArray, page_size: int, covered: IndexArray, first: int
) -> LaunchPlan:
    """The `rows`' new tokens against the pages after each row's first `covered` [R] ones.

    `first`: the place of the first of these tokens in the plan's order.
    """
    num_new = host.qo_indptr[rows + 1] - host.qo_indptr[rows]
    start = host.kv_indptr[rows] + covered[rows]
    count = host.kv_indptr[rows + 1] - start
    kv_lens = host.seq_lens[rows] - covered[rows] * page_size
    qo_indptr = _indptr(num_new)
    kv_indices: slice | PageRanges = slice(int(start[0]), int(start[-1] + count[-1]))
    if not bool((start[1:] == start[:-1] + count[:-1]).all()):
        kv_indices = PageRanges(start, count)
    return LaunchPlan(
        first=first,
        end=first + int(qo_indptr[-1]),
        qo_indptr=qo_indptr,
        kv_indptr=_indptr(count),
        kv_indices=kv_indices,
        last_page_len=((kv_lens - 1) % page_size + 1).astype(np.int32),
        kv_lens=kv_lens.astype(np.int32),
        max_q=int(num_new.max()),
        is_causal=True,
    )


def _level_launch(
    host: HostIndex, nodes: Sequence[SharedNode], page_size: int, order: IndexArray
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
    tokens = _indptr(np.diff(host.qo_indptr)[order])
    num_new = np.diff(tokens[first_row + bounds])
    which = node_of[bounds[:-1]]
    has_pages = which >= 0
    pages = [host.page_tables[node.rows[0]][node.first : node.end] for node in nodes]
    count = np.where(has_pages, np.array([node.num_pages for node in nodes])[which], 0)
    return LaunchPlan(
        first=int(tokens[first_row]),
        end=int(tokens[end_row]),
        qo_indptr=_indptr(num_new),
        kv_indptr=_indptr(count),
        kv_indices=np.concatenate([pages[at] for at in which[has_pages].tolist()], dtype=np.int32),
        last_page_len=np.where(has_pages, page_size, 0).astype(np.int32),
        kv_lens=(count * page_size).astype(np.int32),
        max_q=int(num_new.max()),
        is_causal=False,
    )


def _from_first_token(launch: LaunchPlan) -> LaunchPlan:
    """The same from the plan's first token on: with one request without pages more, if needed."""
    shift = launch.first
    if not shift:
        return launch
    return replace(
        launch,
        first=0,
        qo_indptr=np.concatenate(([0], launch.qo_indptr + shift), dtype=np.int32),
        kv_indptr=np.concatenate(([0], launch.kv_indptr), dtype=np.int32),
        last_page_len=np.concatenate(([0], launch.last_page_len), dtype=np.int32),
        kv_lens=np.concatenate(([0], launch.kv_lens), dtype=np.int32),
        max_q=max(launch.max_q, shift),
    )


def _no_requests() -> LaunchPlan:
    none, zero = np.zeros(0, np.int32), np.zeros(1, np.int32)
    return LaunchPlan(0, 0, zero, zero, none, none, none, 0, is_causal=False)


def _pad(launch: LaunchPlan, num_requests: int, num_tokens: int) -> LaunchPlan:
    """The same with exactly `num_requests` requests over `num_tokens` tokens.

    Requests that are added to a decode read one token of page 0. Those added to other launches are
    without pages: the first has all tokens that are left over, the others none.
    """
    missing, left_over = num_requests - launch.num_requests, num_tokens - launch.num_tokens
    is_decode = launch.is_decode
    assert left_over == missing if is_decode else left_over >= 0
    assert missing > 0 or missing == left_over == 0
    if not missing:
        return launch
    kv_indices = launch.kv_indices
    if is_decode:
        assert isinstance(kv_indices, np.ndarray)
        kv_indices = np.concatenate((kv_indices, np.zeros(missing, np.int32)))
    num_new = np.zeros(missing, np.int64)
    num_new[:1] = left_over
    ones = np.full(missing, int(is_decode))
    return replace(
        launch,
        end=launch.first + num_tokens,
        qo_indptr=_extended(launch.qo_indptr, ones if is_decode else num_new),
        kv_indptr=_extended(launch.kv_indptr, ones),
        kv_indices=kv_indices,
        last_page_len=np.concatenate((launch.last_page_len, ones), dtype=np.int32),
        kv_lens=np.concatenate((launch.kv_lens, ones), dtype=np.int32),
        max_q=1 if is_decode else max(launch.max_q, left_over),
    )


def _on_kernel_pages(
    launch: LaunchPlan, host: HostIndex, page_size: int, kernel_page_size: int
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
        kv_indptr=_indptr(count),
        kv_indices=_take_ranges(smaller, first, count),
        last_page_len=np.where(launch.kv_lens > 0, last, 0).astype(np.int32),
    )


def _indptr(lengths: NDArray[np.signedinteger]) -> IntArray:
    """[n + 1] int32: 0 and the running sums."""
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _extended(indptr: IntArray, lengths: NDArray[np.signedinteger]) -> IntArray:
    return np.concatenate((indptr, indptr[-1] + np.cumsum(lengths)), dtype=np.int32)


def _take_ranges(values: IntArray, first: IndexArray, count: IndexArray) -> IntArray:
    """The ranges [first[i], first[i] + count[i]) of `values`, concatenated."""
    if not len(first):
        return values[:0]
    ends = (first + count).tolist()
    return np.concatenate([values[a:b] for a, b in zip(first.tolist(), ends, strict=True)])
