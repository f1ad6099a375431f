"""Copies between the host and a device that the host does not wait for.

`DeviceQueue` queues them, `H2DBuffer` sends a step's host arrays in one copy, `D2HBuffer` fetches
its results. Everything queued on a device runs in order, on the device's current stream. On the CPU
the same calls do their work at once: so the path of a device runs, and is tested, without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.errors import EngineDead

Arrays = Mapping[str, NDArray[Any]]

_H2D_ALIGNMENT = 64  # bytes; kernels may read whole vectors
_D2H_ALIGNMENT = 16  # bytes
_MIN_D2H_BYTES = 1 << 13
_MAX_LAYOUTS = 512  # remembered sets of array sizes
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Event(Protocol):
    """A place in the queue."""

    def wait(self) -> None:
        """Return when everything queued before the event has run."""
        ...


class DeviceQueue:
    """Work queue of one device; used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        self._index = device.index  # torch looks for that of a device again and again
        if self._is_cuda and self._index is None:
            self._index = torch.cuda.current_device()

    def active(self) -> AbstractContextManager[object]:
        """Make the device the current one, which kernels and streams of a thread go by."""
        return torch.cuda.device(self._index) if self._is_cuda else nullcontext()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the host, pinned for CUDA: copies then run beside the host."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)

    def device_buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of `source`, of a host buffer; leave that alone until a later event."""
        target.copy_(source, non_blocking=True)

    def download(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy into `target`, of a host buffer; read that after a later event only."""
        target.copy_(source, non_blocking=True)

    def record_event(self) -> Event:
        """The place after everything that was queued so far."""
        if not self._is_cuda:
            return _CompletedEvent()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._index))
        return _CudaEvent(event)

    def wait(self) -> None:
        """Return when everything that was queued has run."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)

    def check_alive(self, cause: Exception) -> None:
        """After the error `cause`: raise EngineDead where the device does nothing any more.

        A kernel's fault, such as an illegal access, leaves a CUDA context that answers every later
        call with the same error until the process ends; running out of memory does not.
        """
        try:
            self.wait()
        except Exception as error:
            reason = " ".join(str(error).split())
            raise EngineDead(f"{self.device} can compute nothing any more: {reason}") from cause


class _CompletedEvent:
    """On the CPU everything queued has run."""

    def wait(self) -> None:
        pass


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


@dataclass(frozen=True, slots=True)
class _Layout:
    """Offsets of arrays of given sizes in a buffer."""

    host: tuple[tuple[NDArray[Any], ...], ...]  # for each host buffer
    device: dict[str, Tensor]
    copies: tuple[tuple[Tensor, Tensor], ...]  # for each host buffer: what is copied where to


class H2DBuffer:
    """Two host buffers in turn and one device buffer: the host writes one of them while the copy
    out of the other may still wait in the queue.

    The first arrays of a step lie at the same place on the device whenever their sizes are the
    same, as long as the buffer does not grow: a captured graph relies on it.
    """

    def __init__(self, queue: DeviceQueue, num_bytes: int, *, can_grow: bool = True) -> None:
        self._queue, self._can_grow = queue, can_grow
        self._turn = 0
        self._allocate(num_bytes)

    @property
    def num_bytes(self) -> int:
        """Taken on the device."""
        return len(self._device)

    @property
    def num_layouts(self) -> int:
        """Remembered sets of array sizes."""
        return len(self._layouts)

    def fits(self, arrays: Arrays) -> bool:
        """Whether they can be sent without growing."""
        return sum(_padded(array.nbytes) for array in arrays.values()) <= self.num_bytes

    def send(self, arrays: Arrays) -> dict[str, Tensor]:
        """Queue one copy of all of them; the same on the device, valid until the next `send`.

        The arrays are int32, int64, float32 or float64 and may be changed afterwards.
        """
        key = tuple((name, array.dtype, array.shape) for name, array in arrays.items())
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._make_layout(arrays)
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            self._layouts[key] = layout
        turn = self._turn
        self._turn = 1 - turn
        if (event := self._events[turn]) is not None:
            event.wait()
        for place, array in zip(layout.host[turn], arrays.values(), strict=True):
            place[...] = array
        self._queue.upload(*layout.copies[turn])
        self._events[turn] = self._queue.record_event()
        return layout.device

    def _allocate(self, num_bytes: int) -> None:
        self._host = tuple(self._queue.host_buffer(num_bytes) for _ in range(2))
        self._device = self._queue.device_buffer(num_bytes)
        self._events: list[Event | None] = [None, None]
        self._layouts: dict[tuple[Any, ...], _Layout] = {}

    def _make_layout(self, arrays: Arrays) -> _Layout:
        ends = np.cumsum([_padded(array.nbytes) for array in arrays.values()], dtype=np.int64)
        num_bytes = int(ends[-1]) if len(ends) else 0
        if num_bytes > self.num_bytes:
            assert self._can_grow, f"{num_bytes} bytes do not fit {self.num_bytes}"
            for event in self._events:  # the old buffers are not read any more
                if event is not None:
                    event.wait()
            self._allocate(max(num_bytes, 2 * self.num_bytes))
        places = [
            slice(end - _padded(array.nbytes), end - _padded(array.nbytes) + array.nbytes)
            for end, array in zip(ends.tolist(), arrays.values(), strict=True)
        ]
        host = tuple(
            tuple(
                buffer.numpy()[place].view(array.dtype).reshape(array.shape)
                for place, array in zip(places, arrays.values(), strict=True)
            )
            for buffer in self._host
        )
        device = {
            name: self._device[place].view(_DTYPES[array.dtype]).view(array.shape)
            for place, (name, array) in zip(places, arrays.items(), strict=True)
        }
        copies = tuple((self._device[:num_bytes], buffer[:num_bytes]) for buffer in self._host)
        return _Layout(host, device, copies)


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
        buffer = self._take(sum(_padded(size, _D2H_ALIGNMENT) for size in sizes))
        arrays, first = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            target = buffer[first : first + size].view(tensor.dtype).view(tensor.shape)
            self._queue.download(target, tensor)
            arrays.append(target.numpy())
            first += _padded(size, _D2H_ALIGNMENT)
        return PendingD2H(buffer, tuple(arrays), self._queue.record_event())

    def release(self, pending: PendingD2H) -> None:
        """Reuse the buffer: its arrays have been read."""
        self._free.append(pending.buffer)

    def _take(self, num_bytes: int) -> Tensor:
        for index, buffer in enumerate(self._free):
            if len(buffer) >= num_bytes:
                return self._free.pop(index)
        self._free.clear()  # too small for the steps that come now
        return self._queue.host_buffer(max(_MIN_D2H_BYTES, 2 * num_bytes))


def _padded(num_bytes: int, alignment: int = _H2D_ALIGNMENT) -> int:
    return -(-num_bytes // alignment) * alignment
