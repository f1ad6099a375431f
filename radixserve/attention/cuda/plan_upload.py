"""`PlanUpload`: a plan's int32 arrays on the host and on the device, by one copy.

The host's side is pinned: FlashInfer plans from it.

On the CPU the arrays are copied as well, so that what is handed out does not change behind anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from radixserve.arrays import IntArray

ALIGNED = 4  # int32 values: kernels are specialised on whether an address is a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class Staged:
    """An array on both sides."""

    host: Tensor  # int32 on the CPU, pinned where the device is CUDA; valid until the next `begin`
    device: Tensor  # int32, the same values


class PlanUpload:
    """For one stream. `begin`, any number of `upload`, `end`; then kernels that read them.

    Between `end` and the next `begin` the device may still be copying from pinned memory, this one
    and that of whoever planned in between: `begin` waits until it has. Under overlap that copy lies
    behind the step before last, so that nobody waits in fact.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._pinned = torch.empty(0, dtype=torch.int32)
        self._used = 0
        self._copied: torch.cuda.Event | None = None

    def begin(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._used = 0

    def end(self) -> None:
        if self._is_cuda:
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()

    def upload(self, arrays: Sequence[IntArray], into: Tensor | None = None) -> list[Staged]:
        """The arrays on the device, end to end as `layout` says.

        `into`: int32 memory on the device that holds them; else it is new.
        """
        places, total = layout([len(array) for array in arrays])
        host = self._room(total)
        flat = host.numpy()
        for array, place in zip(arrays, places, strict=True):
            flat[place] = array
        if into is None:
            into = torch.empty(total, dtype=torch.int32, device=self.device)
        device = into[:total]
        device.copy_(host, non_blocking=True)
        return [Staged(host[place], device[place]) for place in places]

    def _room(self, size: int) -> Tensor:
        """[size] of the pinned buffer; a full one is left to those who hold parts of it."""
        if not self._is_cuda:
            return torch.zeros(size, dtype=torch.int32)
        if self._used + size > len(self._pinned):
            length = max(2 * len(self._pinned), self._used + size, 1 << 16)
            self._pinned = torch.empty(length, dtype=torch.int32, pin_memory=True)
            self._used = 0
        self._used += size
        return self._pinned[self._used - size : self._used]


def layout(lengths: Sequence[int]) -> tuple[list[slice], int]:
    """Where arrays of these lengths lie in one buffer, aligned, and the length of all."""
    padded = np.array([-(-length // ALIGNED) * ALIGNED for length in lengths], np.int64)
    ends = np.cumsum(padded)
    starts = (ends - padded).tolist()
    places = [slice(a, a + length) for a, length in zip(starts, lengths, strict=True)]
    return places, int(ends[-1]) if len(ends) else 0
