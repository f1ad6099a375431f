"""A growing int32 array: amortised O(1) append, views without copying."""

from __future__ import annotations

import numpy as np

from radixserve.arrays import IntArray


class IntBuffer:
    """Views handed out stay valid memory after a growth, but then show the older state."""

    __slots__ = ("_data", "_size")

    def __init__(self, values: IntArray) -> None:
        self._size = len(values)
        self._data: IntArray = np.empty(max(16, self._size), np.int32)
        self._data[: self._size] = values

    def __len__(self) -> int:
        return self._size

    def view(self, start: int = 0, stop: int | None = None) -> IntArray:
        """[start, stop) without a copy; `stop` defaults to the end."""
        return self._data[start : self._size if stop is None else stop]

    def append(self, value: int) -> None:
        size = self._size
        if size == len(self._data):
            grown = np.empty(size * 3 // 2, np.int32)
            grown[:size] = self._data
            self._data = grown
        self._data[size] = value
        self._size = size + 1
