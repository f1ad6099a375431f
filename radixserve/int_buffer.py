"""A growing int32 array: amortised O(1) append, views without copying."""

from __future__ import annotations

from collections.abc import Sequence

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
            self._grow(size + 1)
        self._data[size] = value
        self._size = size + 1

    def extend(self, values: Sequence[int]) -> None:
        size, end = self._size, self._size + len(values)
        if end > len(self._data):
            self._grow(end)
        self._data[size:end] = values
        self._size = end

    def _grow(self, least: int) -> None:
        grown = np.empty(max(least, self._size * 3 // 2), np.int32)
        grown[: self._size] = self._data[: self._size]
        self._data = grown
