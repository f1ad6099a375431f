"""Weights in the layout of the compiled kernels, and the memory that holds them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import sys
from collections.abc import Sequence
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve_kernels.cpu_library import address, cpu_library, forms_library, is_bf16
from radixserve_kernels.quantized import (
    COMPACT,
    FLOAT16,
    FORMS,
    AnyWeight,
    QuantizedTensor,
    concat_rows,
    dense,
    form_of,
    to_int8,
)

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
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as C numbers them
_COMPACT_KIND = 3  # bfloat16 in the form `COMPACT`


class WeightRecord(ctypes.Structure):
    """A packed weight as C takes it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "bias", "next")),
        *((name, ctypes.c_int64) for name in ("columns", "depth", "form", "activation_bits")),
    )


class _PlainWeight(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("numbers", "scales", "minimums")),
        *((name, ctypes.c_int64) for name in ("columns", "depth")),
    )


class PackedWeight:
    """A weight [N, K] in panels, with a bias [N] or None; see cpu/panels.h and cpu/quantized.h.
    One in float16 multiplies activations in float32.

    `following`: a weight of the same depth, in another form, whose columns come next.
    """

    record: WeightRecord
    num_bytes: int

    __slots__ = ("_bias", "_next", "_panels", "form", "num_bytes", "record")

    def __init__(
        self,
        weight: AnyWeight,
        bias: Tensor | None = None,
        following: PackedWeight | None = None,
        arena: Arena | None = None,
        *,
        is_compact: bool = False,
    ) -> None:
        """arena: of a dense weight that may go before others; None: the one of all weights.
        is_compact: a dense weight that an adapter multiplies takes no more room than it needs."""
        size, depth = weight.shape
        self.form = form_of(weight)
        self._bias, self._next = None if bias is None else bias.contiguous(), following
        if isinstance(weight, Tensor):
            self._panels, form = _pack_dense(weight, arena or _arena, is_compact)
        else:
            self._panels, form = _pack_form(weight), FORMS[self.form]
        self.num_bytes = self._panels.nbytes + (0 if following is None else following.num_bytes)
        self.record = WeightRecord(
            *(self._panels.ctypes.data, address(self._bias)),
            None if following is None else ctypes.addressof(following.record),
            *(size, depth, form, 8),
        )

    def round_finely(self) -> None:
        """Round activations to 16 bits in place of 8; of no effect where the weight is not in one
        of FORMS. Before the record is copied."""
        self.record.activation_bits = 16
        if self._next is not None:
            self._next.round_finely()

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[AnyWeight, Tensor | None]]) -> PackedWeight:
        """Weights [n, K] and their biases, all or none of them, one below the other."""
        packed: PackedWeight | None = None
        groups = [
            list(group) for _, group in itertools.groupby(parts, lambda part: form_of(part[0]))
        ]
        for group in reversed(groups):
            biases = [bias for _, bias in group if bias is not None]
            weight = concat_rows([weight for weight, _ in group])
            packed = cls(weight, torch.cat(biases) if biases else None, packed)
        assert packed is not None
        return packed

    @property
    def columns_by_form(self) -> list[int]:
        """Columns of each of the weights that make this one."""
        more = [] if self._next is None else self._next.columns_by_form
        return [int(self.record.columns), *more]

    @property
    def num_columns(self) -> int:
        return sum(self.columns_by_form)

    def __call__(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias`: x [M, K], returns [M, N]."""
        library = cpu_library(x.dtype)
        depth = self.record.depth
        padded = x.contiguous()
        if depth % 32:
            padded = x.new_zeros((len(x), -(-depth // 32) * 32))
            padded[:, :depth] = x
        out = x.new_empty((len(x), self.num_columns))
        library.radixserve_set_threads(torch.get_num_threads())
        library.radixserve_linear(
            *(is_bf16(x.dtype), padded.data_ptr(), padded.shape[1], len(x)),
            *(ctypes.byref(self.record), out.data_ptr()),
        )
        return out


def _pack_dense(weight: Tensor, arena: Arena, is_compact: bool) -> tuple[NDArray[np.uint8], int]:
    is_half = weight.dtype == torch.float16
    is_compact = is_compact and weight.dtype == torch.bfloat16
    library = cpu_library(torch.float32 if is_half else weight.dtype)
    weight, kind = weight.contiguous(), _COMPACT_KIND if is_compact else _KINDS[weight.dtype]
    shape = (kind, *weight.shape)
    panels = arena.take(library.radixserve_packed_size(*shape) * weight.dtype.itemsize)
    library.radixserve_pack(shape[0], weight.data_ptr(), *shape[1:], panels.ctypes.data)
    return panels, FLOAT16 if is_half else COMPACT if is_compact else 0


def _pack_form(weight: QuantizedTensor) -> NDArray[np.uint8]:
    library, form = forms_library(), FORMS[weight.form]
    panels = _arena.take(library.radixserve_form_bytes(form, *weight.shape))
    parts = [part if part is None else part.contiguous() for part in weight.parts]
    plain = _PlainWeight(*map(address, parts), *weight.shape)
    library.radixserve_pack_form(form, ctypes.byref(plain), panels.ctypes.data)
    return panels


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up [M, ...] in alternating groups of a vector's lanes, padded with zeros to
    [2 * (M rounded up), ...]: a panel then holds both halves of the same columns."""
    lanes = cpu_library().radixserve_lanes()
    count = -(-len(gate) // lanes) * lanes
    halves = gate.new_zeros((2, count, *gate.shape[1:]))
    halves[0, : len(gate)], halves[1, : len(up)] = gate, up
    parts = halves.view(2, -1, lanes, *gate.shape[1:]).transpose(0, 1)
    return parts.reshape(-1, *gate.shape[1:])


def interleave_weights(gate: AnyWeight, up: AnyWeight) -> AnyWeight:
    """`interleave` of weights [M, K]; of two forms that differ, both in 8 bits."""
    if form_of(gate) != form_of(up):
        gate, up = to_int8(gate), to_int8(up)
    if isinstance(gate, Tensor) or isinstance(up, Tensor):
        return interleave(dense(gate), dense(up))
    pairs = zip(gate.parts, up.parts, strict=True)
    return QuantizedTensor.of_parts(
        None if a is None or b is None else interleave(a, b) for a, b in pairs
    )
