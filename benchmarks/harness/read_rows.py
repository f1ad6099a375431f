"""How fast rows of K and V can be read in some order of slots, without any arithmetic."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from torch import Tensor

from radixserve.arrays import IntArray
from radixserve_kernels.cpu_compiler import compile_once, find_compiler


class Prefetch(NamedTuple):
    """How rows are prefetched before they are read."""

    ahead: int  # rows; 0: the processor does that alone
    is_far: bool = False  # into the second cache level
    times: int = 1  # also twice, and three times as far ahead, as attention does


PREFETCHES = (
    *(Prefetch(ahead) for ahead in (0, 8, 16)),
    *(Prefetch(ahead, is_far=True) for ahead in (8, 16, 32)),
    *(Prefetch(ahead, is_far=True, times=2) for ahead in (16, 32, 64)),
    *(Prefetch(ahead, is_far=True, times=3) for ahead in (16, 32, 64)),
)
_FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-w")


class RowReader:
    """Compiled code that reads every byte of some rows once."""

    def __init__(self) -> None:
        source = Path(__file__).with_suffix(".cpp")
        self._folder = tempfile.TemporaryDirectory(prefix="read-rows-")
        compiler = [*find_compiler(), *_FLAGS]
        path = compile_once(compiler, [source], Path(self._folder.name), source.stem, source.stem)
        self._read = ctypes.CDLL(str(path)).read_rows
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._read.argtypes = (pointer, pointer, pointer, *[number] * 5)
        self._read.restype = ctypes.c_uint64

    def read(self, k: Tensor, v: Tensor, slots: IntArray, prefetch: Prefetch) -> None:
        """k, v [num_slots, heads, width]; slots [rows, tokens], read row after row."""
        order = np.concatenate((slots.ravel(), np.zeros(prefetch.times * prefetch.ahead, np.int32)))
        row_bytes = k[0].numel() * k.element_size()
        pointers = (k.data_ptr(), v.data_ptr(), order.ctypes.data)
        self._read(*pointers, slots.size, row_bytes, *prefetch)
