"""`WindowTable` maps each page of the pool to its window page, from the scheduler's updates.

`DeviceWindows` is the same table on a device: each launch uploads what changed since the last one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.arrays import IntArray
from radixserve.attention.base import IndexArray, WindowBatch
from radixserve.runner.input_batch import InputBatch
from radixserve.runner.kv_pool import KVPool
from radixserve.runner.pool_sizing import PoolSize
from radixserve.schedule import WindowUpdates
from radixserve_kernels import gpu_ops

_LEAST_CHANGES = 16  # are uploaded: few array sizes, so that the buffer's layouts are made once


class WindowTable:
    """A page without a window page maps to the page after the last one, which holds zeros: kernels
    read whole blocks, but no query sees these keys."""

    def __init__(self, size: PoolSize, page_size: int) -> None:
        self._page_size, self.no_page = page_size, size.num_window_pages
        self.pages = np.full(size.num_pages, self.no_page, np.int32)  # of each page

    def update(self, pages: IntArray) -> None:
        """pages [n, 2]: see `WindowUpdates`."""
        self.pages[pages[:, 0]] = np.where(pages[:, 1] < 0, self.no_page, pages[:, 1])

    def slots(self, slot_mapping: IndexArray) -> IndexArray:
        """Slots [T] in window pages for those of new tokens; -1 of padding. Raises nothing: new
        tokens have window pages."""
        pages, offsets = np.divmod(slot_mapping, self._page_size)
        slots = self.pages[pages].astype(np.int64) * self._page_size + offsets
        return np.where(slot_mapping < 0, -1, slots)

    def of_batch(self, inputs: InputBatch) -> WindowBatch:
        """Where the rows' K and V are."""
        slots = torch.from_numpy(self.slots(inputs.slot_mapping))
        return WindowBatch(slots, self.pages, inputs.host)


class DeviceWindows:
    """The window pages of a pool on a device.

    Before each step the device gets the changes since the last launched step, in the order of its
    stream: `update`, `changes`, one copy of them, `apply`.
    """

    def __init__(self, pool: KVPool, device: torch.device) -> None:
        assert pool.windows is not None
        size = PoolSize(pool.num_pages, pool.num_window_pages)
        self._kv, self._host = pool.windows.kv, WindowTable(size, pool.page_size)
        self._table = torch.from_numpy(self._host.pages.copy()).to(device)  # [num_pages] int32
        self._changed: list[IntArray] = []  # pages
        self._copies: list[tuple[int, int, int]] = []

    def update(self, updates: WindowUpdates) -> None:
        """The updates before the next step."""
        if len(updates.pages):
            self._host.update(updates.pages)
            self._changed.append(updates.pages[:, 0])
        self._copies += updates.copies

    def changes(self) -> dict[str, NDArray[Any]]:
        """Pending updates to upload, for `apply`."""
        arrays: dict[str, NDArray[Any]] = {}
        if self._changed:
            pages = self._changed[0]
            if len(self._changed) > 1:  # of a launch that failed, too
                pages = np.unique(np.concatenate(self._changed))
            spare = max(_LEAST_CHANGES, 1 << (len(pages) - 1).bit_length()) - len(pages)
            pages = np.concatenate((pages, np.full(spare, pages[-1])), dtype=np.int64)
            arrays["windowed_pages"], arrays["window_pages"] = pages, self._host.pages[pages]
        if self._copies:
            arrays["window_copies"] = np.array(self._copies, np.int32)
        return arrays

    def apply(self, tensors: dict[str, Tensor]) -> None:
        """Queue the `changes`, which are among `tensors` on the device, and forget them."""
        if self._changed:
            pages = tensors["windowed_pages"]
            self._table.index_copy_(0, pages, tensors["window_pages"])
        for run in independent_runs(self._copies):
            gpu_ops.copy_page_prefixes(self._kv, tensors["window_copies"][run])
        self._changed, self._copies = [], []

    def slots(self, slot_mapping: IndexArray) -> IndexArray:
        """See `WindowTable`."""
        return self._host.slots(slot_mapping)

    def of_batch(self, inputs: InputBatch, slot_mapping: Tensor) -> WindowBatch:
        """Where the rows' K and V are; slot_mapping: their `slots` on the device."""
        return WindowBatch(slot_mapping, self._host.pages, inputs.host, self._table)


def independent_runs(copies: Sequence[tuple[int, int, int]]) -> Iterable[slice]:
    """Runs of copies, in order, such that those of a run can be made at once: no page is written
    twice or both written and read."""
    first, read, written = 0, set[int](), set[int]()
    for index, (source, destination, _) in enumerate(copies):
        if source in written or destination in written or destination in read:
            yield slice(first, index)
            first, read, written = index, set(), set()
        read.add(source)
        written.add(destination)
    if first < len(copies):
        yield slice(first, len(copies))
