"""Profile run: the largest steps before the first real one, to compile kernels and measure memory.

The memory that such a step needs beside weights and pool decides how many pages fit on a card.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from radixserve.errors import InvalidRequest
from radixserve.models.base import ModelInfo
from radixserve.request import SamplingParams
from radixserve.schedule import SampleSpec, ScheduledRequest, ScheduledRows, SchedulerOutput

MAX_TOKENS = 1 << 23  # of a pool whose size was not set; a small model on a large card ends here
_SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A device's memory as seen after the profile run, in bytes."""

    total: int
    free: int  # for any process
    reserved: int  # held by torch, in use or not
    peak: int  # most that torch's tensors took at a time, weights and the run's pool included
    profile_pool: int  # of that the pool of the profile run, which is gone by now
    graphs: int = 0  # to be taken after the pool

    @property
    def needed(self) -> int:
        """Used by everything but the pool: other processes, libraries, weights, tensors."""
        others = self.total - self.free - self.reserved
        return others + self.peak - self.profile_pool + self.graphs


def available_bytes(use: MemoryUse, share: float) -> int:
    """Bytes that `share` of the card's memory leaves for the pool and recurrent states; may be
    negative."""
    return int(use.total * share) - use.needed


def fitting_pages(
    use: MemoryUse, share: float, page_bytes: int, page_size: int, states_bytes: int = 0
) -> int:
    """Pages in `share` of the card's memory, beside other needs and the states of
    recurrent layers.

    Raises InvalidRequest if not one fits.
    """
    available = available_bytes(use, share) - states_bytes
    if available < page_bytes:
        needed = _gib(use.needed + states_bytes)
        others = (
            "weights, activations, recurrent states" if states_bytes else "weights, activations"
        )
        raise InvalidRequest(
            f"gpu_memory_utilization={share:g} of {_gib(use.total)} leaves no room for a KV pool: "
            f"{others} and others on the card take {needed}; "
            "allow more, or set a smaller chunked_prefill_size or max_running_requests"
        )
    return min(available // page_bytes, max(1, MAX_TOKENS // page_size))


def max_pages(device: torch.device, info: ModelInfo, page_size: int) -> int:
    """An upper bound of the pages that fit on a CUDA device, with or without window pages."""
    total = int(torch.cuda.get_device_properties(device).total_memory)
    least = info.kv_bytes_per_token - info.window_bytes_per_token
    return max(1, total // (least * page_size)) if least else 2**31 - 1


def graph_bytes(num_rows: int, vocab_size: int) -> int:
    """About the memory of graphs of up to so many rows: logits in float32, as computed and as
    handed out, and as much for everything before them."""
    return 3 * num_rows * vocab_size * 4


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
    yield replace(first, cow_copies=np.array([[0, spare_page, 1]], np.int32))
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
                req_pool_idx=row,
                state_id=row,
            )
        )
        first += num_pages
    num_decodes = lengths.count(1)
    copies = np.empty((0, 3), np.int32)
    return SchedulerOutput(
        step, ScheduledRows.of(rows), copies, sum(lengths) - num_decodes, num_decodes
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
