"""Adapters in the layout of the compiled decoder, see cpu/lora.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    _fields_ = (("a", WeightRecord), ("b", WeightRecord))


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
                a, b = (PackedWeight(part.to(dtype), arena=arena) for part in product)
                packed += [a, b]
                setattr(record, name, _Product(a.record, b.record))
                self.num_bytes += a.num_bytes + b.num_bytes
        self._borrowed = packed  # by C


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
