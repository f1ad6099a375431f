"""`H2DBuffer`: many small host arrays on their way to a device in one copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.runner.device_queue import DeviceQueue, Event

Arrays = Mapping[str, NDArray[Any]]

_ALIGNMENT = 64  # bytes; kernels may read whole vectors
_MOST_FORMS = 512  # sets of sizes that are remembered
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


@dataclass(frozen=True, slots=True)
class _Form:
    """Where arrays of certain sizes lie."""

    num_bytes: int
    on_host: tuple[tuple[NDArray[Any], ...], ...]  # for each host buffer
    on_device: dict[str, Tensor]


class H2DBuffer:
    """Two host buffers in turn and one device buffer: the host writes one of them while the copy
    out of the other may still wait in the queue.

    The first arrays of a step lie at the same place on the device whenever their sizes are the
    same, as long as the buffer does not grow: what a recorded graph relies on.
    """

    def __init__(self, queue: DeviceQueue, num_bytes: int, *, can_grow: bool = True) -> None:
        self._queue, self._can_grow = queue, can_grow
        self._turn = 0
        self._allocate(num_bytes)

    @property
    def num_bytes(self) -> int:
        """Taken on the device."""
        return len(self._device)

    def fits(self, arrays: Arrays) -> bool:
        """Whether they can be sent without growing."""
        return sum(_room(array) for array in arrays.values()) <= self.num_bytes

    def send(self, arrays: Arrays) -> dict[str, Tensor]:
        """Queue one copy of all of them; their like on the device, good until the next `send`.

        The arrays are int32, int64, float32 or float64 and may be changed afterwards.
        """
        key = tuple((name, array.dtype, array.shape) for name, array in arrays.items())
        form = self._forms.get(key)
        if form is None:
            form = self._make(arrays)
            if len(self._forms) >= _MOST_FORMS:
                self._forms.clear()
            self._forms[key] = form
        turn = self._turn
        self._turn = 1 - turn
        if (event := self._events[turn]) is not None:
            event.wait()
        for place, array in zip(form.on_host[turn], arrays.values(), strict=True):
            place[...] = array
        self._queue.upload(self._device[: form.num_bytes], self._host[turn][: form.num_bytes])
        self._events[turn] = self._queue.record_event()
        return form.on_device

    def _allocate(self, num_bytes: int) -> None:
        self._host = tuple(self._queue.host_buffer(num_bytes) for _ in range(2))
        self._device = self._queue.device_buffer(num_bytes)
        self._events: list[Event | None] = [None, None]
        self._forms: dict[tuple[Any, ...], _Form] = {}

    def _make(self, arrays: Arrays) -> _Form:
        num_bytes = sum(_room(array) for array in arrays.values())
        if num_bytes > self.num_bytes:
            assert self._can_grow, f"{num_bytes} bytes do not fit {self.num_bytes}"
            for event in self._events:  # the buffers that go are not read any more
                if event is not None:
                    event.wait()
            self._allocate(max(num_bytes, 2 * self.num_bytes))
        ends = np.cumsum([_room(array) for array in arrays.values()], dtype=np.int64).tolist()
        parts = [
            (name, slice(end - _room(array), end - _room(array) + array.nbytes), array)
            for end, (name, array) in zip(ends, arrays.items(), strict=True)
        ]
        on_host = tuple(
            tuple(
                buffer.numpy()[at].view(array.dtype).reshape(array.shape) for _, at, array in parts
            )
            for buffer in self._host
        )
        on_device = {
            name: self._device[at].view(_DTYPES[array.dtype]).view(array.shape)
            for name, at, array in parts
        }
        return _Form(num_bytes, on_host, on_device)


def _room(array: NDArray[Any]) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
