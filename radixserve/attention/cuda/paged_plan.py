"""What the CUDA backends do with a step, planned on the host in numpy: parts, levels and order.

    own      every token once, causally: against what its row does not share. Rows of one token and
             rows of several are two parts, for kernels of their own
    shared   one part a level of nodes that several rows have in common, without a mask; results
             are merged with `own` by log-sum-exp

Parts cover neighbouring tokens, so the tokens may have to be put in another order first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from radixserve.attention.base import HostIndex, IndexArray
from radixserve.attention.cuda.cascade import SharedNode, covered_pages
from radixserve.attention.cuda.levels import level_part, saved_pages, spread_part, tree_order
from radixserve.attention.cuda.parts import Part, on_kernel_pages, pad_part, unique_part


@dataclass(frozen=True, slots=True)
class PagedPlan:
    unique: tuple[Part, ...]
    shared: tuple[Part, ...]
    order: IndexArray | None  # [T] which of the batch's tokens lies where; None: all in place


@dataclass(frozen=True, slots=True)
class GraphShape:
    """Of a plan for a CUDA graph: its sizes may not change between replays."""

    num_rows: int  # of one token each
    max_pages: int  # of all rows together, as the kernels see them
    num_groups: int  # requests of the shared part; 0: there is none


def plan_rows(
    host: HostIndex, page_size: int, nodes: Sequence[SharedNode], kernel_page_size: int
) -> PagedPlan:
    """The plan of a step, for kernels that read pages of `kernel_page_size` tokens."""
    num_new = host.qo_indptr[1:] - host.qo_indptr[:-1]
    is_long = num_new > 1
    rows, is_moved = _row_order(nodes, is_long)
    covered = covered_pages(list(nodes), len(rows))
    parts, first = [], 0
    for members in _by_kind(rows, is_long):
        parts.append(unique_part(host, members, page_size, covered, first))
        first = parts[-1].end
    levels = [
        level_part(host, list(level), page_size, rows)
        for _, level in groupby(nodes, key=lambda node: node.level)
    ]
    return PagedPlan(
        unique=tuple(on_kernel_pages(part, host, page_size, kernel_page_size) for part in parts),
        shared=tuple(on_kernel_pages(part, host, page_size, kernel_page_size) for part in levels),
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
    covered = covered_pages(list(nodes), num_rows)
    unique = on_kernel_pages(
        unique_part(host, rows, page_size, covered, 0), host, page_size, kernel_page_size
    )
    if num_rows < shape.num_rows and isinstance(unique.kv_indices, slice):
        unique = replace(unique, kv_indices=host.kv_indices[unique.kv_indices])
    unique = pad_part(unique, shape.num_rows, shape.num_rows)
    if unique.num_pages > shape.max_pages:
        raise ValueError(
            f"{unique.num_pages} pages do not fit a graph of {shape.max_pages} pages in all"
        )
    if not shape.num_groups:
        return PagedPlan((unique,), (), None)
    level = _nothing() if not nodes else spread_part(level_part(host, nodes, page_size, rows))
    level = pad_part(
        on_kernel_pages(level, host, page_size, kernel_page_size), shape.num_groups, shape.num_rows
    )
    return PagedPlan((unique,), (level,), None)


def num_groups_for(num_rows: int) -> int:
    """Requests of a graph's shared part: room for about num_rows / 8 nodes and what lies between.

    Few requests let the kernel assume long ones: its tiles hold more of a node's queries then.
    """
    return min(num_rows, num_rows // 4 + 2) + 1


def _row_order(nodes: Sequence[SharedNode], is_long: np.ndarray) -> tuple[IndexArray, bool]:
    """The rows so that kinds and nodes lie together, and whether any is moved."""
    in_place = np.arange(len(is_long))
    if not nodes and int((is_long[1:] != is_long[:-1]).sum()) < 2:
        return in_place, False
    order = tree_order(nodes, is_long)
    return order, bool((order != in_place).any())


def _by_kind(rows: IndexArray, is_long: np.ndarray) -> list[IndexArray]:
    change = np.flatnonzero(np.diff(is_long[rows])) + 1
    return np.split(rows, change.tolist())


def _token_order(host: HostIndex, rows: IndexArray, num_new: IndexArray) -> IndexArray:
    if int(num_new.max()) == 1:
        return host.qo_indptr[rows]
    count = num_new[rows]
    ends = np.cumsum(count)
    return np.repeat(host.qo_indptr[rows] - (ends - count), count) + np.arange(ends[-1])


def _fitting(
    nodes: Sequence[SharedNode], rows: IndexArray, num_groups: int
) -> Sequence[SharedNode]:
    """Those that save most, as many as surely fit `num_groups` requests with what lies between."""
    most = sorted(nodes, key=lambda node: saved_pages([node], rows), reverse=True)
    kept, num_runs = [], 0
    for node in most:
        num_runs += 1 + int((np.diff(node.rows) > 1).sum())
        if 2 * num_runs + 1 > num_groups:
            break
        kept.append(node)
    return kept


def _nothing() -> Part:
    """No requests."""
    none, zero = np.zeros(0, np.int32), np.zeros(1, np.int32)
    return Part(0, 0, zero, zero, none, none, none, 0, is_causal=False)
