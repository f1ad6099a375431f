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
    whole = host.start // page_size  # pages before the first new token
    first = np.where(whole > 0, host.kv_indices[host.kv_indptr[:-1]], -1)
    order = np.argsort(first, kind="stable")
    cuts = np.flatnonzero(np.diff(first[order])) + 1
    runs = []
    for rows in np.split(order, cuts):
        if len(rows) < 2 or first[rows[0]] < 0:
            continue
        limit = int(whole[rows].min())
        if (len(rows) - 1) * limit * page_size < least_saved:
            continue
        starts = host.kv_indptr[rows]
        model = host.kv_indices[starts[0] : starts[0] + limit]
        for start in starts[1:]:
            differs = model != host.kv_indices[start : start + limit]
            at = int(differs.argmax()) if limit else 0
            if limit and differs[at]:
                limit = at
                model = model[:limit]
        if (len(rows) - 1) * limit * page_size >= least_saved:
            runs.append(SharedRun(rows, limit))
    return runs
