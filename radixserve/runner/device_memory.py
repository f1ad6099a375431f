"""How many pages fit on a card beside the weights and the activations of the largest step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixserve.errors import InvalidRequest
from radixserve.models.base import ModelInfo

MOST_TOKENS = 1 << 23  # of a pool whose size nobody gave; a small model on a large card ends here


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What was seen of a device's memory after a trial of the largest step, in bytes."""

    total: int
    free: int  # for anybody
    reserved: int  # held by torch, in use or not
    peak: int  # most that torch's tensors took at a time, weights and trial pool included
    trial: int  # of that the pool of the trial, which is gone by now
    later: int = 0  # what will be taken behind the pool

    @property
    def needed(self) -> int:
        """Taken by everything but the pool: others on the card and libraries, weights, tensors."""
        others = self.total - self.free - self.reserved
        return others + self.peak - self.trial + self.later


def fitting_pages(use: MemoryUse, share: float, page_bytes: int, page_size: int) -> int:
    """Pages in `share` of the card's memory, beside what is needed otherwise.

    Raises InvalidRequest if there is no room for one.
    """
    room = int(use.total * share) - use.needed
    if room < page_bytes:
        raise InvalidRequest(
            f"gpu_memory_utilization={share:g} of {_gib(use.total)} leaves no room for a KV pool: "
            f"weights, activations and others on the card take {_gib(use.needed)}; "
            "allow more, or set a smaller chunked_prefill_size or max_running_requests"
        )
    return min(room // page_bytes, max(1, MOST_TOKENS // page_size))


def most_pages(device: torch.device, info: ModelInfo, page_size: int) -> int:
    """More than ever fit on a CUDA device."""
    total = int(torch.cuda.get_device_properties(device).total_memory)
    return max(1, total // (info.kv_bytes_per_token * page_size))


def forget_peak(device: torch.device) -> None:
    """Measure from here on. Nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def graph_bytes(num_rows: int, vocab_size: int) -> int:
    """About what graphs of up to so many rows take: logits in float32, as they are handed out and
    as they are computed, and as much for everything before them."""
    return 3 * num_rows * vocab_size * 4


def measure(device: torch.device, trial: int, later: int) -> MemoryUse:
    """Of a CUDA device, since `forget_peak`; nothing of another one."""
    if device.type != "cuda":
        return MemoryUse(0, 0, 0, 0, 0)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return MemoryUse(
        total=total,
        free=free,
        reserved=torch.cuda.memory_reserved(device),
        peak=torch.cuda.max_memory_allocated(device),
        trial=trial,
        later=later,
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
