"""Which rows of a step begin with the same pages, and how far: the tree that attention can use.

Found from the page ids alone: rows that share a page share all before it. A node is a run of pages
that several rows have in common; whether it is worth attending to together is decided node by node
by a backend's cost model. Nodes are what every backend's shared attention is planned from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from radixserve.attention.base import HostIndex, IndexArray

Pays = Callable[[int, int], bool]  # of (rows, tokens): whether they are better read once


@dataclass(frozen=True, slots=True)
class SharedNode:
    """Pages [first, end) of each of `rows`: the same ones, all of them before any new token.

    A row's nodes follow each other without gaps, from its first page on; levels count from 0.
    """

    rows: IndexArray  # [n >= 2] ascending
    first: int
    end: int
    level: int


def find_shared(host: HostIndex, page_size: int, pays: Pays) -> list[SharedNode]:
    """The nodes that pay, parents before their children.

    A node that does not pay is left to its rows, together with what they share further on: pages
    of a child that does pay then begin where its last paying ancestor ended.
    O(rows + pages shared) and a few numpy operations for each node.
    """
    if len(host.start) < 2:
        return []
    whole = host.start // page_size  # pages before the first new token
    found: list[SharedNode] = []
    waiting = [(np.arange(len(whole)), 0, 0, 0)]  # rows, first page not covered, depth, level
    while waiting:
        rows, first, depth, level = waiting.pop()
        rows = rows[whole[rows] > depth]
        for group in _by_page(host, rows, depth):
            end = _agreed(host, group, depth, int(whole[group].min()))
            if pays(len(group), (end - first) * page_size):
                found.append(SharedNode(group, first, end, level))
                waiting.append((group, end, end, level + 1))
            else:
                waiting.append((group, first, end, level))
    found.sort(key=lambda node: node.level)
    return found


def covered_pages(nodes: list[SharedNode], num_rows: int) -> IndexArray:
    """[num_rows] leading pages of each row that lie in nodes."""
    covered = np.zeros(num_rows, np.int64)
    for node in nodes:
        covered[node.rows] = node.end
    return covered


def _by_page(host: HostIndex, rows: IndexArray, depth: int) -> list[IndexArray]:
    """Groups of two and more of `rows` (ascending) that have the same page at `depth`."""
    if len(rows) < 2:
        return []
    pages = host.kv_indices[host.kv_indptr[rows] + depth]
    order = np.argsort(pages, kind="stable")
    ordered = pages[order]
    is_new = ordered[1:] != ordered[:-1]
    if is_new.all():
        return []
    bounds = [0, *(np.flatnonzero(is_new) + 1).tolist(), len(rows)]
    return [rows[order[first:end]] for first, end in itertools.pairwise(bounds) if end - first > 1]


def _agreed(host: HostIndex, rows: IndexArray, depth: int, limit: int) -> int:
    """Leading pages, at most `limit`, that all rows have in common; those before `depth` are."""
    pages = host.kv_indices
    starts = host.kv_indptr[rows].tolist()
    model = pages[starts[0] + depth : starts[0] + limit]
    known = model.tobytes()
    for start in starts[1:]:
        own = pages[start + depth : start + limit]
        if own.tobytes() != known:
            limit = depth + int((own != model).argmax())
            model = model[: limit - depth]
            known = model.tobytes()
    return limit
