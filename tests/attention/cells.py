"""Which cells (page, offset) every new token of a plan sees: the page-content oracle of backends.

A cell is a page of the pool and an offset in it. A token must see those of its row's positions up
to its own, each exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from radixserve.attention.base import AttentionBackend, AttentionMetadata, ForwardBatch
from radixserve.attention.cuda.plan import CudaAttentionPlan, LaunchPlan, page_ids
from radixserve.schedule import ScheduledRequest
from radixserve_kernels.cpu_attention import BEGINS, CAUSAL, ENDS, Jobs

Cells = list[int]  # page * page_size + offset


def expected_cells(rows: Sequence[ScheduledRequest], page_size: int) -> list[Cells]:
    """Of each token of the step, in order of position."""
    found = []
    for row in rows:
        cells = (row.page_ids[:, None].astype(np.int64) * page_size + np.arange(page_size)).ravel()
        found += [cells[: at + 1].tolist() for at in range(row.start, row.end)]
    return found


def cells_of_jobs(jobs: Jobs) -> list[Cells]:
    """Of each token, in the order of the levels; the jobs' own laws are checked on the way."""
    seen: list[Cells] = [[] for _ in range(jobs.num_tokens)]
    state = ["waiting"] * jobs.num_tokens
    bounds = jobs.level_indptr.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(jobs.num_keys) == len(jobs.flags) == len(jobs.query_indptr) - 1
    for first, end in pairwise(bounds):
        queries = jobs.query_tokens[jobs.query_indptr[first] : jobs.query_indptr[end]].tolist()
        assert len(set(queries)) == len(queries), "jobs of a level share a token"
        for job in range(first, end):
            _read_job(jobs, job, seen, state)
    assert set(state) == {"done"}
    return seen


def _read_job(jobs: Jobs, job: int, seen: list[Cells], state: list[str]) -> None:
    first, end = jobs.query_indptr[job : job + 2].tolist()
    num_keys, flags = int(jobs.num_keys[job]), int(jobs.flags[job])
    places = int(jobs.first_page[job]) + np.arange(num_keys) // jobs.page_size
    pages = jobs.page_ids[places].astype(np.int64)
    cells = (pages * jobs.page_size + np.arange(num_keys) % jobs.page_size).tolist()
    for at, token in enumerate(jobs.query_tokens[first:end].tolist()):
        assert state[token] == ("waiting" if flags & BEGINS else "begun")
        state[token] = "done" if flags & ENDS else "begun"
        visible = num_keys - (end - first) + 1 + at if flags & CAUSAL else num_keys
        assert visible > 0
        seen[token] += cells[:visible]


def check_reads(backend: AttentionBackend, batch: ForwardBatch, expected: Sequence[Cells]) -> None:
    """Every token sees its `expected` cells, each once: for queries of zeros attention is the mean
    of the values that are seen, and the pool's are random numbers. The pool is written to."""
    values = torch.randn(backend.kv.shape[1:], generator=torch.Generator().manual_seed(0))
    backend.kv[0] = values
    backend.plan(batch)
    found = backend.attend(torch.zeros(len(expected), backend.num_heads, backend.head_dim), 0)
    by_cell = values[1].flatten(0, 1)  # [cells, Hkv, D]
    means = torch.stack([by_cell[cells].double().mean(0) for cells in expected])
    heads = means.repeat_interleave(backend.num_heads // backend.num_kv_heads, 1)
    torch.testing.assert_close(found.double(), heads, atol=1e-5, rtol=1e-5)


def cells_of_paged(
    plan: CudaAttentionPlan, host: AttentionMetadata, kernel_page_size: int
) -> list[Cells]:
    """Of each token that the plan's own parts have, in the batch's order: what it shares last.

    Cells are counted in tokens, so that they are the same however pages are read.
    """
    num_tokens = plan.unique[-1].end
    order = range(num_tokens) if plan.order is None else plan.order.tolist()
    assert sorted(order) == list(range(num_tokens))
    assert [part.first for part in plan.unique] == [0, *(part.end for part in plan.unique[:-1])]
    assert all(part.is_causal for part in plan.unique)
    assert not any(part.is_causal for part in plan.shared)
    seen: list[Cells] = [[] for _ in range(num_tokens)]
    for part in (*plan.unique, *plan.shared):
        for place, cells in _read_paged(part, host, kernel_page_size):
            seen[order[place]] += cells
    return seen


def _read_paged(
    part: LaunchPlan, host: AttentionMetadata, kernel_page_size: int
) -> list[tuple[int, Cells]]:
    """Place of each query and what it sees in the part, whose laws are checked on the way."""
    pages = page_ids(part, host)
    for array in (part.qo_indptr, part.kv_indptr, part.last_page_len, part.kv_lens, pages):
        assert array.dtype == np.int32
    assert part.qo_indptr[0] == part.kv_indptr[0] == 0
    assert part.qo_indptr[-1] == part.end - part.first
    assert part.kv_indptr[-1] == part.num_pages == len(pages)
    assert len(part.qo_indptr) == len(part.kv_indptr) == part.num_requests + 1
    assert len(part.last_page_len) == part.num_requests
    assert int(np.diff(part.qo_indptr).max()) == part.max_q
    assert bool((np.diff(part.qo_indptr) >= 0).all())
    found = []
    for number in range(part.num_requests):
        own = pages[part.kv_indptr[number] : part.kv_indptr[number + 1]].astype(np.int64)
        last, length = int(part.last_page_len[number]), int(part.kv_lens[number])
        assert length == (max(len(own) - 1, 0) * kernel_page_size + last)
        assert 0 < last <= kernel_page_size if len(own) else last == 0
        cells = (
            (own[:, None] * kernel_page_size + np.arange(kernel_page_size))
            .ravel()[:length]
            .tolist()
        )
        first, end = part.qo_indptr[number : number + 2].tolist()
        for at in range(first, end):
            visible = length - (end - 1 - at) if part.is_causal else length
            assert visible > 0 or not part.is_causal
            found.append((part.first + at, cells[:visible]))
    return found
