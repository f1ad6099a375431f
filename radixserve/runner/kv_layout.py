"""`KVLayout`: the numbers and bytes that a pool keeps for a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ByteArray = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What the K/V of a token is: [layers, 2, kv_heads, head_dim] numbers.

    Where layers differ in their heads, the keys of all layers are one row, and so are the values.
    num_kv_heads and head_dim are then the largest.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # "float32"
    itemsize: int  # bytes of a number
    scale_bytes: int = 0  # of a head's keys, or of its values, behind its numbers
    shapes: tuple[tuple[int, int], ...] = ()  # (kv_heads, head_dim) of each layer, if they differ

    @property
    def num_rows(self) -> int:
        """Rows of a token's keys, or of its values."""
        return 1 if self.shapes else self.num_layers

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: of a token's keys, or of its values, in one layer or in all."""
        shapes = self.shapes or ((self.num_kv_heads, self.head_dim),)
        return sum(count * (dim * self.itemsize + self.scale_bytes) for count, dim in shapes)

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_rows * self.row_bytes

    def as_list(self) -> list[Any]:
        """Begins with `num_rows`. JSON values."""
        if self.shapes:
            return [1, 2, [list(shape) for shape in self.shapes], self.dtype]
        return [self.num_layers, 2, self.num_kv_heads, self.head_dim, self.dtype]
