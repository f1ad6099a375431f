"""`BufferPool`: memory for the K/V of runs between the pool and a store."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.runner.kv_layout import ByteArray

_MAX_FREE = 8  # unused buffers that are kept for the next reads and copies


class BufferPool:
    """Memory buffers for the K/V of runs. Reuse is several times faster than new memory, whose
    pages the system maps on first use. May be called from any thread."""

    def __init__(self, num_bytes: int) -> None:
        """`num_bytes`: of a buffer."""
        self._num_bytes = num_bytes
        self._free: list[ByteArray] = []
        self._lock = threading.Lock()
        self.num_lent = 0

    def take(self) -> ByteArray:
        """Returns a buffer, [num_bytes] uint8 of any content."""
        with self._lock:
            self.num_lent += 1
            if self._free:
                return self._free.pop()
        return np.empty(self._num_bytes, np.uint8)

    def give_back(self, buffer: ByteArray) -> None:
        """Return a buffer that is no longer used."""
        with self._lock:
            self.num_lent -= 1
            if len(self._free) < _MAX_FREE:
                self._free.append(buffer)


class BufferedRun(NamedTuple):
    """K/V [layers, 2, tokens, row bytes] that lies in a buffer of the `BufferPool`."""

    kv: ByteArray
    buffer: ByteArray


def slots_of(pages: IntArray, begin: int, end: int, page_size: int) -> IntArray:
    """Returns [end - begin] int64 slots of positions in a sequence's pages, page * page_size +
    offset."""
    positions = np.arange(begin, end)
    return pages[positions // page_size].astype(np.int64) * page_size + positions % page_size
