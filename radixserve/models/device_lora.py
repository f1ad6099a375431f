"""Adapters in the native decoder: `DeviceLora`, an adapter in the memory of a device, and the rows
of a step by adapter, as `gpu_ops.add_lora` takes them.

A graph reads the arrays of `lora_arrays`, whose sizes depend on the number of rows alone. They name
adapters by address: adapters come and go without new graphs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.attention.base import AdapterRows
from radixserve_kernels.cpu_lora import PRODUCTS, LoraProduct
from radixserve_kernels.gpu.records import LORA_ENTRY, LORA_RANKS, LoraRows, StepLora

MAX_RANK = 3 * 256  # of a product: q, k and v have a rank each
_ALIGNMENT = 128  # bytes


class DeviceLora:
    """The products of an adapter in each layer, in one piece of memory, and their header."""

    def __init__(
        self,
        layers: Sequence[Mapping[str, LoraProduct]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        header = np.zeros((len(layers), len(PRODUCTS), LORA_ENTRY), np.int64)
        places: list[tuple[Tensor, tuple[int, ...]]] = []  # what lies where, from `size` on
        size, step = 0, _ALIGNMENT // dtype.itemsize
        for number, layer in enumerate(layers):
            for column, name in enumerate(PRODUCTS):
                if (product := layer.get(name)) is None:
                    continue
                rank = -(-product.a.shape[0] // LORA_RANKS) * LORA_RANKS
                assert rank <= MAX_RANK, "more than three modules of rank 256"
                header[number, column, 2] = rank
                for which, part in enumerate((_padded(product.a, 0), _padded(product.b, 1))):
                    header[number, column, which] = size * dtype.itemsize
                    places.append((part, (size, part.numel())))
                    size += math.ceil(part.numel() / step) * step
        self._weights = torch.zeros(size, dtype=dtype, device=device)
        for part, (first, count) in places:
            self._weights[first : first + count].view(part.shape).copy_(part)
        is_there = header[..., 2] > 0
        header[is_there, :2] += self._weights.data_ptr()
        self._header = torch.from_numpy(header).to(device)
        self.max_rank = int(header[..., 2].max(initial=0))
        self.num_bytes = self._weights.nbytes + self._header.nbytes

    @property
    def address(self) -> int:
        """Of its header."""
        return self._header.data_ptr()


class LoraArrays(NamedTuple):
    """The rows of a step that adapters compute, on their way to a device."""

    arrays: dict[str, NDArray[Any]]
    max_rank: int


def entry_of(layer: int, product: str) -> int:
    """Where the numbers of a product begin in an adapter's header."""
    return (layer * len(PRODUCTS) + PRODUCTS.index(product)) * LORA_ENTRY


def lora_arrays(
    groups: Sequence[AdapterRows[DeviceLora]], num_rows: int | None = None
) -> LoraArrays:
    """num_rows: of a step that is padded to so many rows of one token, with logits after each; the
    sizes of the arrays depend on it alone."""
    headers = np.array([group.weights.address for group in groups], np.int64)
    indptr, order = _by_adapter([group.tokens for group in groups])
    if num_rows is not None:
        padded: dict[str, NDArray[Any]] = {
            "lora_headers": _filled(headers, num_rows, 0),
            "lora_indptr": _filled(indptr, num_rows + 1, len(order)),
            "lora_order": _filled(order, num_rows, 0),
        }
        return LoraArrays(padded, MAX_RANK)
    arrays: dict[str, NDArray[Any]] = {
        "lora_headers": headers,
        "lora_indptr": indptr,
        "lora_order": order,
    }
    if any(group.sampled is not group.tokens for group in groups):
        indptr, order = _by_adapter([group.sampled for group in groups])
        arrays |= {"lora_sampled_indptr": indptr, "lora_sampled_order": order}
    return LoraArrays(arrays, max((group.weights.max_rank for group in groups), default=0))


def step_lora(tensors: Mapping[str, Tensor], max_rank: int) -> StepLora:
    """Of `LoraArrays` on the device."""
    headers = tensors["lora_headers"]
    tokens = LoraRows(headers, tensors["lora_indptr"], tensors["lora_order"], max_rank)
    if "lora_sampled_indptr" not in tensors:
        return StepLora(tokens, tokens)
    sampled = tensors["lora_sampled_indptr"], tensors["lora_sampled_order"]
    return StepLora(tokens, LoraRows(headers, *sampled, max_rank))


def lora_of(groups: Sequence[AdapterRows[DeviceLora]], device: torch.device) -> StepLora:
    """`step_lora` of rows that are not on the device yet: a copy an array."""
    arrays, max_rank = lora_arrays(groups)
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return step_lora(tensors, max_rank)


def _by_adapter(rows: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """indptr and order of `LoraRows`."""
    indptr = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(np.array([len(places) for places in rows], np.int32), out=indptr[1:])
    return indptr, np.concatenate([np.empty(0, np.int64), *rows])


def _padded(part: Tensor, axis: int) -> Tensor:
    """With zeros up to the next multiple of LORA_RANKS on an axis."""
    missing = -part.shape[axis] % LORA_RANKS
    return torch.nn.functional.pad(part, (0, 0, 0, missing) if axis == 0 else (0, missing))


def _filled(array: NDArray[Any], size: int, value: int) -> NDArray[Any]:
    return np.concatenate([array, np.full(size - len(array), value, array.dtype)])
