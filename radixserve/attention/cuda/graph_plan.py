"""Plans a decode step for a CUDA graph, with the same sizes at every replay; numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.attention.base import AttentionMetadata, IndexArray
from radixserve.attention.cuda.cascade import SharedNode, count_runs, covered_pages, saved_pages
from radixserve.attention.cuda.plan import (
    CudaAttentionPlan,
    LaunchPlan,
    level_launch,
    on_kernel_pages,
    page_ids,
    unique_launch,
)


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


@dataclass(frozen=True, slots=True)
class GraphLevel:
    """A graph's launch over shared pages: the same in every step that finds the same nodes."""

    nodes: Sequence[SharedNode]  # as found; those that do not fit are left to their rows
    covered: IndexArray  # [R] leading pages of each row that the launch reads
    launch: LaunchPlan | None  # None: the shape has none


def plan_level(
    host: AttentionMetadata,
    page_size: int,
    nodes: Sequence[SharedNode],
    kernel_page_size: int,
    shape: GraphShape,
) -> GraphLevel:
    """The launch over `nodes`, of one level, of rows in place; padded to `shape`."""
    rows = np.arange(len(host.start))
    fitting = _fitting(nodes, rows, shape.num_groups)
    launch = None
    if shape.num_groups:
        level = level_launch(host, fitting, page_size, rows) if fitting else _no_requests()
        level = on_kernel_pages(_from_first_token(level), host, page_size, kernel_page_size)
        launch = _pad(level, shape.num_groups, shape.num_rows)
    return GraphLevel(nodes, covered_pages(fitting, len(rows)), launch)


def plan_graph(
    host: AttentionMetadata,
    page_size: int,
    level: GraphLevel,
    kernel_page_size: int,
    shape: GraphShape,
) -> CudaAttentionPlan:
    """The plan of at most shape.num_rows rows of one token, padded to `shape`; in place.

    Raises ValueError if the rows do not fit the shape.
    """
    num_rows = len(host.start)
    if int(host.qo_indptr[-1]) != num_rows or num_rows > shape.num_rows:
        raise ValueError(
            f"{num_rows} rows of {host.qo_indptr[-1]} tokens do not fit a graph of "
            f"{shape.num_rows} rows of one token"
        )
    unique = unique_launch(host, np.arange(num_rows), page_size, level.covered, 0)
    unique = on_kernel_pages(unique, host, page_size, kernel_page_size)
    if num_rows < shape.num_rows:
        unique = replace(unique, kv_indices=page_ids(unique, host))
        unique = _pad(unique, shape.num_rows, shape.num_rows)
    if unique.num_pages > shape.max_pages:
        raise ValueError(
            f"{unique.num_pages} pages do not fit a graph of {shape.max_pages} pages in all"
        )
    return CudaAttentionPlan((unique,), () if level.launch is None else (level.launch,), None)


def _fitting(
    nodes: Sequence[SharedNode], rows: IndexArray, num_groups: int
) -> Sequence[SharedNode]:
    """The nodes that save most pages, as many as fit `num_groups` runs of rows in any case."""
    most = sorted(nodes, key=lambda node: saved_pages([node], rows), reverse=True)
    kept, num_runs = [], 0
    for node in most:
        num_runs += count_runs(node.rows)
        if 2 * num_runs + 1 > num_groups:
            break
        kept.append(node)
    return kept


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


def _extended(indptr: IntArray, lengths: NDArray[np.signedinteger]) -> IntArray:
    return np.concatenate((indptr, indptr[-1] + np.cumsum(lengths)), dtype=np.int32)
