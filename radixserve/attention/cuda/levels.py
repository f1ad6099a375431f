"""From nodes of shared pages to levels: parts in which each node's pages are read once; numpy only.

Rows of a node must lie next to each other to be read with one request; `tree_order` puts them so.
Where they do not, each run of neighbours is a request of its own, and reads the pages once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from radixserve.attention.base import HostIndex, IndexArray
from radixserve.attention.cuda.cascade import SharedNode
from radixserve.attention.cuda.parts import Part, indptr_of, take_ranges


def tree_order(nodes: Sequence[SharedNode], is_long: np.ndarray) -> IndexArray:
    """[R] the rows in an order in which those of every node lie next to each other.

    is_long [R]: rows of several new tokens come behind the others, so that a node with both kinds
    has two runs. Else nodes and rows are in the order of their first row, rows of no node last.
    """
    num_rows = len(is_long)
    depth = max((node.level + 1 for node in nodes), default=0)
    keys = np.full((depth, num_rows), num_rows)
    for node in nodes:
        keys[node.level, node.rows] = node.rows[0]
    return np.lexsort((np.arange(num_rows), *keys[::-1], is_long))


def limit_levels(nodes: list[SharedNode], max_levels: int) -> list[SharedNode]:
    """The nodes with at most `max_levels` above each other, parents before children.

    Where there are more, the nodes go whose going costs the fewest tokens read more often: a node
    with children hands its pages to each of them, a leaf to its rows.
    """
    nodes = list(nodes)
    while nodes and (deepest := max(node.level for node in nodes)) >= max_levels:
        bottom = next(node for node in nodes if node.level == deepest)
        chain = [node for node in nodes if bottom.rows[0] in node.rows]
        victim = min(chain, key=lambda node: _loss(node, nodes))
        nodes = [_without(victim, node) for node in nodes if node is not victim]
    return sorted(nodes, key=lambda node: node.level)


def drop_levels(nodes: list[SharedNode], least_pages: int) -> list[SharedNode]:
    """The nodes without the levels that save fewer than `least_pages` pages each, all their nodes
    together; the one that saves least goes first. What lies below takes its pages."""
    nodes = list(nodes)
    while nodes:
        levels = [list(group) for _, group in groupby(nodes, key=lambda node: node.level)]
        victims = min(levels, key=saved_pages)
        if saved_pages(victims) >= least_pages:
            break
        nodes = [node for node in nodes if node.level != victims[0].level]
        for victim in victims:
            nodes = [_without(victim, node) for node in nodes]
    return nodes


def saved_pages(nodes: Sequence[SharedNode], order: IndexArray | None = None) -> int:
    """Pages that rows would read on their own, less those read by node, once for each run."""
    if order is None:
        return sum((len(node.rows) - 1) * (node.end - node.first) for node in nodes)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    saved = 0
    for node in nodes:
        num_runs = 1 + int((np.diff(np.sort(place[node.rows])) > 1).sum())
        saved += (len(node.rows) - num_runs) * (node.end - node.first)
    return saved


def level_part(
    host: HostIndex, nodes: Sequence[SharedNode], page_size: int, order: IndexArray
) -> Part:
    """The nodes, all of one level, as a part: one request a run of a node's rows in `order` [R].

    Rows between two runs that are in none of the nodes form requests without pages; the part ends
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
    tokens = indptr_of((host.qo_indptr[1:] - host.qo_indptr[:-1])[order])
    bounds_of_tokens = tokens[first_row + bounds]
    num_new = np.diff(bounds_of_tokens)
    which = node_of[bounds[:-1]]
    start = np.array([host.kv_indptr[node.rows[0]] + node.first for node in nodes])
    count = np.array([node.end - node.first for node in nodes])
    count_of = np.where(which >= 0, count[which], 0)
    has_pages = which >= 0
    return Part(
        first=int(tokens[first_row]),
        end=int(tokens[end_row]),
        qo_indptr=indptr_of(num_new),
        kv_indptr=indptr_of(count_of),
        kv_indices=take_ranges(host.kv_indices, start[which[has_pages]], count_of[has_pages]),
        last_page_len=np.where(has_pages, page_size, 0).astype(np.int32),
        kv_lens=(count_of * page_size).astype(np.int32),
        max_q=int(num_new.max()),
        is_causal=False,
    )


def spread_part(part: Part) -> Part:
    """The same from the plan's first token on: one request without pages more, if it is needed."""
    if not part.first:
        return part
    shift = part.first
    return replace(
        part,
        first=0,
        qo_indptr=np.concatenate(([0], part.qo_indptr + shift), dtype=np.int32),
        kv_indptr=np.concatenate(([0], part.kv_indptr), dtype=np.int32),
        last_page_len=np.concatenate(([0], part.last_page_len), dtype=np.int32),
        kv_lens=np.concatenate(([0], part.kv_lens), dtype=np.int32),
        max_q=max(part.max_q, shift),
    )


def _children(node: SharedNode, nodes: Sequence[SharedNode]) -> list[SharedNode]:
    return [one for one in nodes if one.level == node.level + 1 and one.rows[0] in node.rows]


def _loss(node: SharedNode, nodes: Sequence[SharedNode]) -> int:
    """Pages read more often without `node`."""
    num_readers = len(node.rows)
    for child in _children(node, nodes):
        num_readers -= len(child.rows) - 1
    return (num_readers - 1) * (node.end - node.first)


def _without(gone: SharedNode, node: SharedNode) -> SharedNode:
    """`node` when `gone` is no longer above it."""
    if node.level <= gone.level or node.rows[0] not in gone.rows:
        return node
    first = gone.first if node.level == gone.level + 1 else node.first
    return replace(node, first=first, level=node.level - 1)
