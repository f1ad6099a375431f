"""Adapters in the layout of the compiled decoder, see cpu/lora.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve_kernels.cpu_library import cpu_library, is_bf16
from radixserve_kernels.cpu_weights import Arena, PackedWeight, WeightRecord

Weights = TypeVar("Weights")  # an adapter, ready to compute: `PackedLora`
PRODUCTS = ("qkv", "o", "gate_up", "down")  # of a layer that an adapter may add to
_PIECE_BYTES = 32 << 20


class LoraProduct(NamedTuple):
    """What an adapter adds to a product of x: b (a x)."""

    a: Tensor  # [R, K]
    b: Tensor  # [N, R], with the adapter's factor; rows as those of the product's weight


class AdapterRows(NamedTuple, Generic[Weights]):
    """The rows of a step that one adapter computes, ascending."""

    weights: Weights
    tokens: NDArray[np.int64]  # [n] of the step's tokens
    sampled: NDArray[np.int64]  # [m] of the tokens after which logits are computed


class _Product(ctypes.Structure):
    _fields_ = (
        ("a", WeightRecord),
        *((name, ctypes.c_void_p) for name in ("b", "firsts")),
        *((name, ctypes.c_int64) for name in ("vectors", "count")),
    )


class _Layer(ctypes.Structure):
    _fields_ = tuple((name, _Product) for name in PRODUCTS)


class _Group(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "tokens", "sampled")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_sampled")),
    )


class PackedLora:
    """The products of an adapter in each layer, by their names in `PRODUCTS`. Its memory is its
    own: it goes with it."""

    def __init__(self, layers: Sequence[dict[str, LoraProduct]], dtype: torch.dtype) -> None:
        arena, packed = Arena(_PIECE_BYTES), []
        self.records = (_Layer * len(layers))()
        self.num_bytes = 0
        for record, layer in zip(self.records, layers, strict=True):
            for name, product in layer.items():
                a = PackedWeight(product.a.to(dtype), arena=arena, is_compact=True)
                b, firsts, size = _pack_b(product.b.to(dtype), arena)
                packed += [a, b, firsts]
                setattr(record, name, _Product(a.record, b.ctypes.data, firsts.ctypes.data, *size))
                self.num_bytes += a.num_bytes + b.nbytes + firsts.nbytes
        self._borrowed = packed  # by C


def _pack_b(b: Tensor, arena: Arena) -> tuple[NDArray[Any], NDArray[np.int32], tuple[int, int]]:
    """`LoraProduct.b` [N, R] as C's: for each vector of columns the ranks in which it is not zero,
    [vectors, ranks / P, lanes, P] with P numbers of a lane beside each other; the first of these
    ranks; (vectors, ranks)."""
    library = cpu_library(b.dtype)
    lanes, rank = library.radixserve_lanes(), b.shape[1]
    columns = padded_rows(b, [len(b)]).T.reshape(rank, -1, lanes)  # [R, vectors, lanes]
    used = (columns != 0).any(-1).T.numpy()  # [vectors, R]
    starts, ends = used.argmax(1), rank - used[:, ::-1].argmax(1)
    ranks = int(np.where(used.any(1), ends - starts, 1).max())
    ranks = library.radixserve_lora_depth(is_bf16(b.dtype), ranks)
    most = -(-rank // (2 * lanes)) * 2 * lanes - ranks  # a x has whole panels of ranks
    firsts = arena.take(4 * len(used)).view(np.int32)
    firsts[:] = np.minimum(starts, most)
    places = torch.from_numpy(firsts[:, None] + np.arange(ranks))  # [vectors, ranks]
    own = torch.nn.functional.pad(columns, (0, 0, 0, 0, 0, max(0, int(places.max()) + 1 - rank)))
    own = own.transpose(0, 1).gather(1, places[..., None].expand(-1, -1, lanes))
    side = 4 // b.dtype.itemsize
    own = own.view(len(used), -1, side, lanes).transpose(2, 3).reshape(-1)
    packed = arena.take(own.numel() * own.itemsize)
    packed[:] = own.view(torch.uint8).numpy()
    return packed, firsts, (len(used), ranks)


def padded_rows(b: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows of b [N, R] with zeros after each of the parts of so many rows, up to whole panels."""
    panel = 2 * cpu_library(b.dtype).radixserve_lanes()
    parts = [
        torch.nn.functional.pad(part, (0, 0, 0, -len(part) % panel))
        for part in b.split(list(counts))
    ]
    return torch.cat(parts)


def group_records(groups: Sequence[AdapterRows[PackedLora]]) -> Any:
    """The rows of each adapter as C takes them, which borrows their arrays."""
    return (_Group * len(groups))(
        *(
            _Group(
                ctypes.addressof(group.weights.records),
                *(group.tokens.ctypes.data, group.sampled.ctypes.data),
                *(len(group.tokens), len(group.sampled)),
            )
            for group in groups
        )
    )
