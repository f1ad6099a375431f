"""`DeviceQueue`: copies to and from a device that nobody waits for, and marks to wait for.

Everything that a runner queues on a device runs in order, on the device's current stream. On the
CPU the same calls do their work at once: so the path of a device runs, and is tested, without one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A place in the queue."""

    def wait(self) -> None:
        """Return when everything queued before the event has run."""
        ...


class DeviceQueue:
    """Of one device; one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"

    def active(self) -> AbstractContextManager[object]:
        """The device is the current one: what kernels and streams of a thread go by."""
        return torch.cuda.device(self.device) if self._is_cuda else nullcontext()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the host, pinned where that makes copies run beside the host."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)

    def device_buffer(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 on the device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy of `source`, of a host buffer; leave that alone until a later event."""
        target.copy_(source, non_blocking=True)

    def download(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy into `target`, of a host buffer; read that behind a later event only."""
        target.copy_(source, non_blocking=True)

    def record_event(self) -> Event:
        """The place behind everything that was queued so far."""
        if not self._is_cuda:
            return _CompletedEvent()
        event = torch.cuda.Event()
        event.record()
        return _CudaEvent(event)

    def wait(self) -> None:
        """Return when everything that was queued has run."""
        if self._is_cuda:
            torch.cuda.synchronize(self.device)


class _CompletedEvent:
    """On the CPU everything queued has run."""

    def wait(self) -> None:
        pass


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
