"""`IntBuffer`: a growing int32 array with amortised O(1) append and views without copying."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixserve.arrays import IntArray


class IntBuffer:
    """A growing int32 array. Earlier views stay valid after it grows, but may show an older state.

    size  its length; read-only, an attribute since it is read in hot loops
    last  its last value, -1 if it is empty; read-only
    """

    __slots__ = ("_data", "last", "size")

    def __init__(self, values: IntArray) -> None:
        self.size = len(values)
        self.last = int(values[-1]) if len(values) else -1
        self._data: IntArray = np.empty(max(16, self.size), np.int32)
        self._data[: self.size] = values

    def __len__(self) -> int:
        return self.size

    def view(self, start: int = 0, stop: int | None = None) -> IntArray:
        """Returns the values [start, stop) without a copy; `stop` defaults to the end."""
        return self._data[start : self.size if stop is None else stop]

    def append(self, value: int) -> None:
        size = self.size
        if size == len(self._data):
            self._grow(size + 1)
        self._data[size] = self.last = value
        self.size = size + 1

    def extend(self, values: Sequence[int]) -> None:
        size, end = self.size, self.size + len(values)
        if end > len(self._data):
            self._grow(end)
        self._data[size:end] = values
        self.size = end
        if end > size:
            self.last = int(self._data[end - 1])

    def _grow(self, least: int) -> None:
        grown = np.empty(max(least, self.size * 3 // 2), np.int32)
        grown[: self.size] = self._data[: self.size]
        self._data = grown
