"""A device as slow as one may be: copies land when somebody waits for them, not before."""

from __future__ import annotations

import torch
from torch import Tensor

from radixserve.runner.transfers import DeviceQueue, Event

POISON = 0xA5  # of every byte that is not there yet


class LateQueue(DeviceQueue):
    """On CPU tensors. What is downloaded holds POISON until a later event is waited for, and a host
    buffer that changes between its upload and such a wait is an error."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(torch.device("cpu") if device is None else device)
        self.num_uploads = self.num_downloads = self.num_waits = 0
        self._uploads: list[tuple[int, Tensor, Tensor]] = []  # when, source, its contents then
        self._downloads: list[tuple[int, Tensor, Tensor]] = []  # when, target, contents to be
        self._now = 0

    def host_buffer(self, num_bytes: int) -> Tensor:
        return super().host_buffer(num_bytes).fill_(POISON)

    def device_buffer(self, num_bytes: int) -> Tensor:
        return super().device_buffer(num_bytes).fill_(POISON)

    def upload(self, target: Tensor, source: Tensor) -> None:
        self.num_uploads += 1
        target.copy_(source)
        self._uploads.append((self._tick(), source, source.clone()))

    def download(self, target: Tensor, source: Tensor) -> None:
        self.num_downloads += 1
        target.view(torch.uint8).fill_(POISON)
        self._downloads.append((self._tick(), target, source.clone()))

    def record_event(self) -> Event:
        return _LateEvent(self, self._tick())

    def wait(self) -> None:
        self.complete_until(self._tick())

    def complete_until(self, time: int) -> None:
        """Everything queued before `time` has run."""
        self.num_waits += 1
        for when, source, contents in self._uploads:
            if when < time:
                assert torch.equal(source, contents), "a host buffer was changed before its copy"
        self._uploads = [one for one in self._uploads if one[0] >= time]
        for when, target, contents in self._downloads:
            if when < time:
                target.copy_(contents)
        self._downloads = [one for one in self._downloads if one[0] >= time]

    def _tick(self) -> int:
        self._now += 1
        return self._now


class _LateEvent:
    def __init__(self, queue: LateQueue, time: int) -> None:
        self._queue, self._time = queue, time

    def wait(self) -> None:
        self._queue.complete_until(self._time)
