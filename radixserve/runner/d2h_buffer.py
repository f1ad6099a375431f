"""`D2HBuffer`: a step's results on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from radixserve.runner.device_queue import DeviceQueue, Event

_LEAST_BYTES = 1 << 13
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class PendingD2H:
    """Arrays that hold their values once the event has passed."""

    buffer: Tensor
    arrays: tuple[NDArray[Any], ...]
    event: Event


class D2HBuffer:
    """Host buffers, each in use from `fetch` to `release`; one never released is lost."""

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._free: list[Tensor] = []

    def fetch(self, tensors: Sequence[Tensor]) -> PendingD2H:
        """Queue copies of contiguous device tensors to the host."""
        sizes = [tensor.numel() * tensor.itemsize for tensor in tensors]
        rooms = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        buffer = self._take(sum(rooms))
        arrays, first = [], 0
        for tensor, size, room in zip(tensors, sizes, rooms, strict=True):
            target = buffer[first : first + size].view(tensor.dtype).view(tensor.shape)
            self._queue.download(target, tensor)
            arrays.append(target.numpy())
            first += room
        return PendingD2H(buffer, tuple(arrays), self._queue.record_event())

    def release(self, transfer: PendingD2H) -> None:
        """Its arrays have been read and are not looked at any more."""
        self._free.append(transfer.buffer)

    def _take(self, num_bytes: int) -> Tensor:
        for at, buffer in enumerate(self._free):
            if len(buffer) >= num_bytes:
                return self._free.pop(at)
        self._free.clear()  # too small for the steps that come now
        return self._queue.host_buffer(max(_LEAST_BYTES, 2 * num_bytes))
