"""Profile run: the largest steps before the first real one, to compile kernels and measure memory.

The memory that such a step needs beside weights and pool decides how many pages fit on a card.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from radixserve.request import SamplingParams
from radixserve.runner.pool_sizing import MemoryUse
from radixserve.schedule import SampleSpec, ScheduledRequest, ScheduledRows, SchedulerOutput

_SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
_GREEDY = SamplingParams(temperature=0.0)


def reset_peak(device: torch.device) -> None:
    """Measure from here on. Nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure(device: torch.device, profile_pool: int, graphs: int) -> MemoryUse:
    """Memory use of a CUDA device since `reset_peak`; zeros on CPU."""
    if device.type != "cuda":
        return MemoryUse(0, 0, 0, 0, 0)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(
        total=total,
        free=free,
        reserved=torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_allocated(device),
        profile_pool=profile_pool,
        graphs=graphs,
    )


def num_profile_pages(chunked_prefill_size: int, max_running_requests: int, page_size: int) -> int:
    """Pages that `profile_schedules` write to."""
    return -(-chunked_prefill_size // page_size) + 2 * max_running_requests


def profile_schedules(
    chunked_prefill_size: int, max_running_requests: int, longest: int, page_size: int
) -> Iterator[SchedulerOutput]:
    """The largest step first, chunks and decodes together, every token of a chunk scored; then
    small ones of each kind.

    longest: most tokens of one row. Of `num_profile_pages` pages no two rows use the same, nor of
    max_running_requests recurrent states.
    """
    num_chunks = min(-(-chunked_prefill_size // longest), max_running_requests)
    chunks = [min(longest, chunked_prefill_size - number * longest) for number in range(num_chunks)]
    ones = [1] * (max_running_requests - num_chunks)
    first = _schedule(0, chunks + ones, page_size, _SAMPLED, scores=True)
    spare_page = num_profile_pages(chunked_prefill_size, max_running_requests, page_size) - 1
    yield first._replace(cow_copies=np.array([[0, spare_page, 1]], np.int32))
    for step, (lengths, params) in enumerate(
        (
            ([min(16, *chunks)], _GREEDY),
            ([1], _GREEDY),
            ([1], _SAMPLED),
            ([1] * max_running_requests, _GREEDY),
        ),
        1,
    ):
        yield _schedule(step, lengths, page_size, params)


def _schedule(
    step: int,
    lengths: list[int],
    page_size: int,
    params: SamplingParams,
    *,
    scores: bool = False,
) -> SchedulerOutput:
    rows, first = [], 0
    for row, length in enumerate(lengths):
        num_pages = -(-length // page_size)
        rows.append(
            ScheduledRequest(
                request_id=f"profile {row}",
                token_ids=np.zeros(length, np.int32),
                start=0,
                page_ids=np.arange(first, first + num_pages, dtype=np.int32),
                sample=SampleSpec(params, row, 1, np.zeros(1, np.int32), ()),
                logprob_targets=np.zeros(length - 1, np.int32) if scores and length > 1 else None,
                slot=row,
                state_id=row,
            )
        )
        first += num_pages
    num_decodes = lengths.count(1)
    copies = np.empty((0, 3), np.int32)
    return SchedulerOutput(
        step, ScheduledRows.of(rows), copies, sum(lengths) - num_decodes, num_decodes
    )
