"""Several decode steps in one call of the compiled decoder: what a step costs around its forward
pass is paid once for all of them.
"""

from __future__ import annotations

import time

import numpy as np

from radixserve.attention.cpu import CpuBackend
from radixserve.models.cpu_decoder import CpuDecoder
from radixserve.runner.forward_batch import check_pages, indptr
from radixserve.runner.sampler import sample
from radixserve.schedule import RowOutput, Schedule, StepOutput
from radixserve_kernels.cpu_decoder import Hurry, StepRows


def decode_steps(
    schedule: Schedule, decoder: CpuDecoder, backend: CpuBackend, page_size: int, hurry: Hurry
) -> StepOutput:
    """Answer a schedule of several steps; its copies have been made.

    Steps behind one that draws an end id or ends in a hurry are left out, and so are one whose best
    logits are not all finite and those behind it: as the first of a schedule it is answered row by
    row. Raises ValueError, and nothing was written, on a row whose pages do not fit it.
    """
    began = time.perf_counter()
    rows = _read_rows(schedule, page_size)
    end_ids = np.array(sorted(schedule.end_ids), np.int64)
    prepared = time.perf_counter()
    done = decoder.decode_steps(rows, schedule.num_steps, end_ids, hurry, backend)
    computed = time.perf_counter()
    outputs = _outputs(done.drawn.T.tolist())
    if not outputs:
        outputs = sample(done.logits, [row.sample for row in schedule.rows if row.sample])
    inside = done.plan_seconds + done.draw_seconds
    seconds = {
        "prepare": prepared - began + done.plan_seconds,
        "forward": computed - prepared - inside,
        "sample": time.perf_counter() - computed + done.draw_seconds,
    }
    return StepOutput(tuple(outputs), seconds)


def _read_rows(schedule: Schedule, page_size: int) -> StepRows:
    rows, last = schedule.rows, schedule.num_steps - 1
    token_ids, start, num_pages = [], [], []
    for row in rows:
        pages, at = row.page_ids, row.start
        if len(pages) != (at + last) // page_size + 1:
            check_pages([row], np.array([at + last + 1]), np.array([len(pages)]), page_size)
        token_ids.append(row.token_ids.item())
        start.append(at)
        num_pages.append(len(pages))
    index = np.array([token_ids, start], np.int64)
    page_ids = np.concatenate([row.page_ids for row in rows], dtype=np.int32)
    return StepRows(index[0], index[1], indptr(np.array(num_pages, np.int64))[:-1], page_ids)


def _outputs(drawn: list[list[int]]) -> list[RowOutput]:
    """Of each row's tokens; none where nobody drew any."""
    return [
        RowOutput(token_ids[0], None, (), further=tuple(token_ids[1:]))
        for token_ids in drawn
        if token_ids
    ]
