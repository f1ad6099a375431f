"""`WindowTable`: which window page each page of the pool has, as the scheduler has told it."""

from __future__ import annotations

import numpy as np
import torch

from radixserve.arrays import IntArray
from radixserve.attention.base import WindowBatch
from radixserve.runner.input_batch import InputBatch
from radixserve.runner.kv_pool import PoolSize


class WindowTable:
    """A page without a window page has the one after the last, which holds zeros: no query sees
    what is there, but kernels read whole blocks."""

    def __init__(self, size: PoolSize, page_size: int) -> None:
        self._page_size, self._no_page = page_size, size.num_window_pages
        self._table = np.full(size.num_pages, self._no_page, np.int32)

    def update(self, pages: IntArray) -> None:
        """pages [n, 2]: see `WindowUpdates`."""
        self._table[pages[:, 0]] = np.where(pages[:, 1] < 0, self._no_page, pages[:, 1])

    def of_batch(self, inputs: InputBatch) -> WindowBatch:
        """Where the rows' K and V are. Raises nothing: new tokens have window pages."""
        pages, offsets = np.divmod(inputs.slot_mapping, self._page_size)
        slots = self._table[pages].astype(np.int64) * self._page_size + offsets
        return WindowBatch(torch.from_numpy(slots), self._table[inputs.host.kv_indices])
