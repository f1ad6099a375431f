"""Snapshots: a bounded view of a cache, cheap enough to be taken while it serves.

Unlike `dump` a snapshot costs no more for a larger tree: it shows some of the nodes, newest and
hottest first, and the pages as cells of a bitmap.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from radixserve.cache.namespace import Namespace, is_within
from radixserve.cache.page_pool import PagePool
from radixserve.cache.sequence import CacheSequence
from radixserve.cache.tokens import TOKEN_BYTES

OWNERS = {"free": "f", "tree": "t", "leased": "s", "locked": "k", "private": "p", "other": "o"}
FREE, TREE, KEPT, LOCKED, PRIVATE, OTHER = range(len(OWNERS))
HEAD_TOKENS = 48  # of an edge that are shown; of a longer one its end, too
TAIL_TOKENS = 12
MAX_RUNS = 64  # of consecutive pages that are listed of a node or a request
_LETTERS = np.frombuffer("".join(OWNERS.values()).encode(), np.uint8)
_DIGITS = np.frombuffer(b"0123456789abcdefghijklmnopqrstuvwxyz", np.uint8)


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """The extent of a snapshot; every number is an upper bound.

    within      a namespace and those below it, as text (see `Namespace.covers`), None: all. With
                one nothing of others is shown: their pages, and free ones, are "other"
    opened      ids of nodes of which more children are wanted
    path        token ids in `path_namespace` whose nodes are wanted
    """

    within: str | None = None
    opened: frozenset[int] = frozenset()
    path: tuple[int, ...] = ()
    path_namespace: str = ""
    max_nodes: int = 400
    max_cells: int = 4096
    max_requests: int = 200
    max_victims: int = 8

    def shows(self, namespace: str | Namespace) -> bool:
        return is_within(namespace, self.within)


class PageMap:
    """The owner of each page, and the number of shown sequences that use it."""

    def __init__(self, pool: PagePool, view: SnapshotView) -> None:
        self._owner = np.full(pool.num_pages, TREE if view.within is None else OTHER, np.uint8)
        self._users = np.zeros(pool.num_pages, np.int32)
        self._view = view
        if view.within is None:
            self._owner[pool.free_array()] = FREE

    def mark(self, pages: Any, owner: int) -> None:
        """`pages`: an array of page ids."""
        self._owner[np.frombuffer(pages, np.int32)] = owner

    def mark_sequence(self, sequence: CacheSequence) -> None:
        """Its pages: those of the cache are locked, the others private."""
        pages = sequence.pages
        cut = len(pages) - sequence.num_private
        self._owner[pages[:cut]] = LOCKED
        self._owner[pages[cut:]] = PRIVATE
        self._users[pages] += 1

    def report(self) -> dict[str, Any]:
        """Returns {"total", "cell_pages", "owners", "users", ...}. A cell is `cell_pages` adjacent
        pages. "owners" has a letter of OWNERS per cell, the owner of most of its pages; "users" has
        a base-36 digit per cell, the most sequences that use one of its pages, at most 35."""
        total = len(self._owner)
        size = -(-total // self._view.max_cells)
        owner, users = self._owner, self._users
        if size > 1:
            count = -(-total // size)
            padded = np.full(count * size, len(OWNERS), np.uint8)
            padded[:total] = owner
            cells = padded.reshape(count, size)
            owner = np.argmax([(cells == letter).sum(1) for letter in range(len(OWNERS))], 0)
            users = np.maximum.reduceat(users, np.arange(0, total, size))
        report: dict[str, Any] = {
            "total": total,
            "cell_pages": size,
            "letters": {letter: name for name, letter in OWNERS.items()},
            "owners": _LETTERS[owner].tobytes().decode(),
            "users": _DIGITS[np.minimum(users, 35)].tobytes().decode(),
            "shared": int((self._users > 1).sum()),
        }
        if self._view.within is None:
            report |= _free_runs(self._owner)
        return report


def _free_runs(owner: Any) -> dict[str, int]:
    is_free = np.concatenate(([0], owner == FREE, [0])).astype(np.int8)
    edges = np.flatnonzero(np.diff(is_free))
    lengths = edges[1::2] - edges[::2]
    return {"free_runs": len(lengths), "longest_free_run": int(lengths.max(initial=0))}


def page_runs(pages: Any) -> list[list[int]]:
    """Returns the page ids as runs of consecutive ids, [[first, count], ...], at most MAX_RUNS."""
    count = len(pages)
    if not count:
        return []
    ids = np.asarray(pages)
    ends = (ids[1:] - ids[:-1] != 1).nonzero()[0][:MAX_RUNS] + 1
    runs: list[list[int]] = []
    start = 0
    for end in [*ends.tolist(), count][:MAX_RUNS]:
        runs.append([int(ids[start]), end - start])
        start = end
    return runs


def edge_tokens(tokens: bytes | bytearray) -> dict[str, Any]:
    """Returns {"num_tokens", "head", "tail"} of an edge's tokens (int32 bytes): their number, the
    first ids, and for a long edge the last ids."""
    count = len(tokens) // TOKEN_BYTES
    if count <= HEAD_TOKENS + TAIL_TOKENS:
        return {"num_tokens": count, "head": array("i", bytes(tokens)).tolist(), "tail": []}
    head = array("i", bytes(tokens[: HEAD_TOKENS * TOKEN_BYTES]))
    tail = array("i", bytes(tokens[-TAIL_TOKENS * TOKEN_BYTES :]))
    return {"num_tokens": count, "head": head.tolist(), "tail": tail.tolist()}


def unused_slots(sizes: Iterable[tuple[int, int]], page_size: int) -> dict[str, int]:
    """Returns {"slots", "unused_slots"} of pages in token slots. `sizes`: (number of pages, tokens
    in them)."""
    slots = tokens = 0
    for some_pages, some_tokens in sizes:
        slots += some_pages * page_size
        tokens += some_tokens
    return {"slots": slots, "unused_slots": max(0, slots - tokens)}


def private_size(sequence: CacheSequence, page_size: int) -> tuple[int, int]:
    """Returns the number of private pages of a sequence, and of the tokens in them."""
    num_shared = len(sequence.pages) - sequence.num_private
    return sequence.num_private, max(0, sequence.length - num_shared * page_size)
