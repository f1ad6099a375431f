"""Weights in the layout of the compiled kernels, and the memory that holds them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve_kernels.cpu_library import address, cpu_library, is_bf16

LARGE_PAGE = 2 << 20  # bytes


class Arena:
    """Memory for weights, many from one piece, which is large enough for the system's large pages:
    in small pages a good part of the time of reading a weight is address translation."""

    def __init__(self, piece_bytes: int = 32 << 20) -> None:
        self._piece_bytes = piece_bytes
        self._piece, self._used = np.zeros(0, np.uint8), 0
        self._lock = Lock()

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Zeros, 64-byte aligned; the piece lives as long as anything taken from it."""
        rounded = -(-num_bytes // 64) * 64
        with self._lock:
            if self._used + rounded > len(self._piece):
                self._piece, self._used = fresh_memory(max(self._piece_bytes, rounded)), 0
            taken = self._piece[self._used : self._used + num_bytes]
            self._used += rounded
        return taken


def fresh_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros in pages of their own, in the system's large pages if it has them; at least 64-byte
    aligned. Not from the allocator, which may reuse memory in small pages. Raises MemoryError.
    """
    if sys.platform != "linux":
        fresh = np.zeros(num_bytes + 64, np.uint8)
        start = -fresh.ctypes.data % 64
        return fresh[start : start + num_bytes]
    try:
        mapped = mmap.mmap(-1, num_bytes + LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes cannot be had: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without large pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    fresh = np.frombuffer(mapped, np.uint8)  # which holds `mapped`
    start = -fresh.ctypes.data % LARGE_PAGE
    return fresh[start : start + num_bytes]


_arena = Arena()


class WeightRecord(ctypes.Structure):
    """A packed weight as C takes it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "bias")),
        *((name, ctypes.c_int64) for name in ("columns", "depth")),
    )


class PackedWeight:
    """A weight [N, K] in panels, with a bias [N] or None; see cpu/panels.h."""

    __slots__ = ("_bias", "_depth", "_panels", "_size", "record")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        library, weight = cpu_library(), weight.contiguous()
        self._size, self._depth = weight.shape
        self._bias = None if bias is None else bias.contiguous()
        shape = (is_bf16(weight.dtype), self._size, self._depth)
        memory = _arena.take(library.radixserve_packed_size(*shape) * weight.dtype.itemsize)
        self._panels = torch.from_numpy(memory).view(weight.dtype)
        panels = self._panels.data_ptr()
        library.radixserve_pack(shape[0], weight.data_ptr(), *shape[1:], panels)
        self.record = WeightRecord(panels, address(self._bias), self._size, self._depth)

    def __call__(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`: x [M, K], returns [M, N]."""
        library = cpu_library()
        padded = x.new_zeros((len(x), -(-self._depth // 32) * 32))
        padded[:, : self._depth] = x
        out = x.new_empty((len(x), self._size))
        library.radixserve_set_threads(torch.get_num_threads())
        library.radixserve_linear(
            *(is_bf16(self._panels.dtype), padded.data_ptr(), padded.shape[1], len(x)),
            *(ctypes.byref(self.record), out.data_ptr()),
        )
        return out


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up [M, ...] in alternating groups of a vector's lanes, padded with zeros to
    [2 * (M rounded up), ...]: a panel then holds both halves of the same columns."""
    lanes = cpu_library().radixserve_lanes()
    count = -(-len(gate) // lanes) * lanes
    halves = gate.new_zeros((2, count, *gate.shape[1:]))
    halves[0, : len(gate)], halves[1, : len(up)] = gate, up
    parts = halves.view(2, -1, lanes, *gate.shape[1:]).transpose(0, 1)
    return parts.reshape(-1, *gate.shape[1:])
