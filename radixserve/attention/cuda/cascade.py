"""Cascade attention: finds the pages that rows of a step share, and chooses those to read once.

Page ids alone are compared: rows that share a page share all pages before it. A node is a run of
pages that several rows have in common; nodes form a tree, whose levels are launches of their own. A
cost model decides which nodes and levels pay. numpy only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from radixserve.attention.base import AttentionMetadata, IndexArray

MAX_LEVELS = 4
MAX_ENDS = 4_096  # that are remembered

# Bytes of K and V of one layer whose reading takes as long as what a level of shared pages costs in
# a layer, two launches and a merge: 46,080 tokens of 8 heads of 128 in 16 bits, measured on an H200
# (benchmarks/gpu/run.py --parts shared). Of fewer bytes, a second row finds the pages in the card's
# cache.
SHARE_BYTES = 180 << 20

# Tokens whose K and V take as long to read as merging two states of a row: three outputs and some.
MERGE_TOKENS = 8

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

    @property
    def num_pages(self) -> int:
        return self.end - self.first


@dataclass(frozen=True, slots=True)
class CascadeCost:
    """The cost model: when reading pages once for all their rows is worth it.

    Reading a node's pages for each of its rows costs (rows - 1) * tokens more, which must pay for
    merging: rows * merge_tokens. All nodes of a level together must save `least_tokens`: they share
    their launches. With one prefix: (rows - 1) * tokens >= least_tokens.
    """

    least_tokens: int
    merge_tokens: int

    @classmethod
    def of_token(cls, token_bytes: int) -> CascadeCost:
        """For K and V of `token_bytes` a token in a layer."""
        return cls(max(1, SHARE_BYTES // token_bytes), MERGE_TOKENS)

    def pays(self, num_rows: int, num_tokens: int) -> bool:
        """Whether a node does, in a level that pays."""
        return (num_rows - 1) * num_tokens >= max(1, num_rows * self.merge_tokens)

    def may_pay(self, start: IndexArray) -> bool:
        """Whether any level of rows with `start` [R] tokens before the step could."""
        return len(start) > 1 and int(start.sum() - start.max()) >= self.least_tokens


class NodeFinder:
    """Finds the nodes of a step that pay; remembers those of the last call."""

    def __init__(self, page_size: int, cost: CascadeCost | None) -> None:
        """`cost` None: nothing is shared."""
        self._page_size, self._cost = page_size, cost
        self._last: tuple[AttentionMetadata, int, list[SharedNode]] | None = None
        self._judged: tuple[list[SharedNode], bool] = [], False  # by `pays_in_place`
        self._ends: dict[int, int] = {}  # of the last steps, see `find_shared`

    def find(self, host: AttentionMetadata, max_levels: int = MAX_LEVELS) -> list[SharedNode]:
        """At most `max_levels` deep, parents first; looks at page ids only if some may pay."""
        cost = self._cost
        if cost is None or not max_levels:
            return []
        if not cost.may_pay(host.start):
            self._last = None
            return []
        if self._last is not None and self._last[1] == max_levels:
            before, _, nodes = self._last
            if host is before:
                return nodes
            if has_only_grown(before, host):
                self._last = host, max_levels, nodes
                return nodes
        shared = find_shared(host, self._page_size, cost.pays, self._ends)
        nodes = limit_levels(shared, max_levels)
        nodes = drop_levels(nodes, -(-cost.least_tokens // self._page_size))
        self._last = host, max_levels, nodes
        return nodes

    def pays_in_place(self, host: AttentionMetadata) -> bool:
        """Whether one level pays for rows that are not put in another order."""
        nodes = self.find(host, 1)
        if nodes is not self._judged[0]:
            saved = saved_pages(nodes, np.arange(len(host.start))) * self._page_size
            self._judged = nodes, self._cost is not None and saved >= self._cost.least_tokens
        return self._judged[1]


def has_only_grown(before: AttentionMetadata, host: AttentionMetadata) -> bool:
    """Whether the rows are those of the step before with pages of their own appended at most: what
    they share is the same then."""
    slots, first_new = host.row_slots, host.first_new_page
    if slots is None or first_new is None or before.row_slots is None:
        return False
    if not np.array_equal(slots, before.row_slots):
        return False
    had = before.kv_indptr[1:] - before.kv_indptr[:-1]
    return bool((first_new >= had).all() and (host.start >= before.start).all())


def find_shared(
    host: AttentionMetadata, page_size: int, pays: Pays, ends: dict[int, int] | None = None
) -> list[SharedNode]:
    """The nodes that pay, parents before their children.

    A node that does not pay is left to its rows, together with what they share further on: pages
    of a child that does pay then begin where its last paying ancestor ended.
    A few numpy operations for each node, and O(rows * log(pages shared)); O(rows) with the `ends`
    of a step like it, by page id: how far rows that had this page in common had all in common.
    """
    ends = {} if ends is None else ends
    if len(host.start) < 2:
        return []
    whole = host.start // page_size  # pages before the first new token
    nodes: list[SharedNode] = []
    waiting = [(np.arange(len(whole)), 0, 0, 0)]  # rows, first page not covered, depth, level
    while waiting:
        rows, first, depth, level = waiting.pop()
        rows = rows[whole[rows] > depth]
        for group in _by_page(host, rows, depth):
            end = _common_pages(host, group, depth, int(whole[group].min()), ends)
            if pays(len(group), (end - first) * page_size):
                nodes.append(SharedNode(group, first, end, level))
                waiting.append((group, end, end, level + 1))
            else:
                waiting.append((group, first, end, level))
    nodes.sort(key=lambda node: node.level)
    return nodes


def covered_pages(nodes: Sequence[SharedNode], num_rows: int) -> IndexArray:
    """[num_rows] leading pages of each row that lie in nodes."""
    covered = np.zeros(num_rows, np.int64)
    for node in nodes:
        covered[node.rows] = node.end
    return covered


def saved_pages(nodes: Sequence[SharedNode], order: IndexArray | None = None) -> int:
    """Pages that rows would read each for itself, less those read once a node; once for each run
    of neighbours if the rows lie in `order` [R]."""
    place = np.arange(0) if order is None else np.argsort(order)
    saved = 0
    for node in nodes:
        num_reads = 1 if order is None else count_runs(place[node.rows])
        saved += (len(node.rows) - num_reads) * node.num_pages
    return saved


def count_runs(places: IndexArray) -> int:
    """Runs of neighbours among distinct numbers, at least one of them."""
    return 1 + int((np.diff(np.sort(places)) > 1).sum())


def limit_levels(nodes: Sequence[SharedNode], max_levels: int) -> list[SharedNode]:
    """The nodes with at most `max_levels` above each other, parents before children.

    Where there are more, drop the nodes whose removal adds the fewest reads: a node with children
    hands its pages to each of them, a leaf to its rows.
    """
    nodes = list(nodes)
    while nodes and (deepest := max(node.level for node in nodes)) >= max_levels:
        bottom = next(node for node in nodes if node.level == deepest)
        chain = [node for node in nodes if bottom.rows[0] in node.rows]
        victim = min(chain, key=lambda node: _loss(node, nodes))
        nodes = [_without(victim, node) for node in nodes if node is not victim]
    return sorted(nodes, key=lambda node: node.level)


def drop_levels(nodes: Sequence[SharedNode], least_pages: int) -> list[SharedNode]:
    """The nodes without the levels that save fewer than `least_pages` pages each, all their nodes
    together; the one that saves least goes first. The nodes below take its pages."""
    nodes = list(nodes)
    while nodes:
        levels = [list(group) for _, group in itertools.groupby(nodes, lambda node: node.level)]
        victims = min(levels, key=saved_pages)
        if saved_pages(victims) >= least_pages:
            break
        nodes = [node for node in nodes if node.level != victims[0].level]
        for victim in victims:
            nodes = [_without(victim, node) for node in nodes]
    return nodes


def _loss(node: SharedNode, nodes: Sequence[SharedNode]) -> int:
    """Pages read more often without `node`."""
    num_readers = len(node.rows)
    for child in nodes:
        if child.level == node.level + 1 and child.rows[0] in node.rows:
            num_readers -= len(child.rows) - 1
    return (num_readers - 1) * node.num_pages


def _without(dropped: SharedNode, node: SharedNode) -> SharedNode:
    """`node` after `dropped`, which is above it, was removed."""
    if node.level <= dropped.level or node.rows[0] not in dropped.rows:
        return node
    first = dropped.first if node.level == dropped.level + 1 else node.first
    return replace(node, first=first, level=node.level - 1)


def _by_page(host: AttentionMetadata, rows: IndexArray, depth: int) -> list[IndexArray]:
    """Groups of two and more of `rows` (ascending) that have the same page at `depth`."""
    if len(rows) < 2:
        return []
    tables = host.page_tables
    pages = np.array([tables[row].item(depth) for row in rows.tolist()])
    order = np.argsort(pages, kind="stable")
    ordered = pages[order]
    is_new = ordered[1:] != ordered[:-1]
    if is_new.all():
        return []
    bounds = [0, *(np.flatnonzero(is_new) + 1).tolist(), len(rows)]
    return [rows[order[first:end]] for first, end in itertools.pairwise(bounds) if end - first > 1]


def _common_pages(
    host: AttentionMetadata, rows: IndexArray, depth: int, limit: int, ends: dict[int, int]
) -> int:
    """Leading pages, at most `limit`, that all rows have in common; the one at `depth` is.

    Rows that share a page share all before it: the last one is found by bisection, from where it
    was last time on.
    """
    first, *others = (host.page_tables[row] for row in rows.tolist())

    def is_shared(index: int) -> bool:
        page = first.item(index)
        return all(other.item(index) == page for other in others)

    key = first.item(depth)
    low, high, guess = depth + 1, limit, ends.get(key, limit)
    while low < high:
        index = guess if low <= guess < high else (low + high) // 2
        if is_shared(index):
            low = index + 1
        else:
            high = index
        guess = index - 1 if index == guess else -1
    if len(ends) > MAX_ENDS:
        ends.clear()
    ends[key] = low
    return low
