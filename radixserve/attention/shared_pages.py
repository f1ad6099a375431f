"""Which rows of a step begin with the same pages, and how far: found from the page ids alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixserve.attention.base import HostIndex, IndexArray


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Rows that have their first `num_pages` pages in common, all of them before any new token."""

    rows: IndexArray
    num_pages: int


def find_shared(host: HostIndex, page_size: int, least_saved: int) -> list[SharedRun]:
    """Runs of pages where reading them once saves at least `least_saved` tokens of K and V.

    One level: rows with the same first page share as much as all of them have in common.
    O(rows + tokens of those that share).
    """
    if len(host.start) < 2:
        return []
    whole = host.start // page_size  # pages before the first new token
    first = np.where(whole > 0, host.kv_indices[host.kv_indptr[:-1]], -1)
    order = np.argsort(first, kind="stable")
    cuts = np.flatnonzero(np.diff(first[order])) + 1
    bounds = np.concatenate(([0], cuts, [len(order)]))
    runs = []
    for at in np.flatnonzero(np.diff(bounds) > 1).tolist():
        rows = order[bounds[at] : bounds[at + 1]]
        limit = int(whole[rows].min())
        if (len(rows) - 1) * limit * page_size < least_saved or first[rows[0]] < 0:
            continue
        limit = _agreed(host, rows, limit)
        if (len(rows) - 1) * limit * page_size >= least_saved:
            runs.append(SharedRun(rows, limit))
    return runs


def _agreed(host: HostIndex, rows: IndexArray, limit: int) -> int:
    """Leading pages, at most `limit`, that all rows have in common."""
    starts = host.kv_indptr[rows]
    width = host.kv_indices.itemsize
    data = host.kv_indices.data.cast("B")
    model = data[starts[0] * width : (starts[0] + limit) * width].tobytes()
    if all(data[at * width : (at + limit) * width] == model for at in starts[1:].tolist()):
        return limit
    pages = host.kv_indices[starts[:, None] + np.arange(limit)]
    return int((pages[1:] != pages[0]).any(0).argmax())
