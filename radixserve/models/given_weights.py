"""Weights that a caller has in memory, by the names that they have in a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.models.weights import TensorReader
from radixserve_kernels.quantized import AnyWeight


class GivenWeights(TensorReader):
    """See `TensorSource`."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_forms: bool = False,
        copies: bool = True,
        rename: Callable[[str], str | None] = str,
    ) -> None:
        """copies: what is taken may be kept, and the caller change its own. rename: a given name ->
        that to take it by; None: the tensor is not taken."""
        names = {name: rename(name) for name in tensors}
        self._tensors = {own: tensors[name] for name, own in names.items() if own is not None}
        self._copies = copies
        where = Path("given tensors")
        super().__init__(where, self._tensors, dtype, device, keeps_forms=keeps_forms)

    def _read(self, name: str) -> AnyWeight:
        tensor = self._tensors[name].detach()
        return tensor.clone() if self._copies else tensor

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)


def read_given(weights: object) -> dict[str, Tensor]:
    """Returns the tensors of a map or of (name, tensor) pairs. Raises InvalidRequest."""
    what = "a map from names to tensors, or pairs of these"
    pairs: Iterable[object] = ()
    if isinstance(weights, Mapping):
        pairs = weights.items()
    elif isinstance(weights, Iterable) and not isinstance(weights, str | bytes):
        pairs = weights
    tensors: dict[str, Tensor] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise InvalidRequest(f"weights must be {what}, got {shown(pair)} among them")
        name, tensor = pair
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InvalidRequest(f"weights: {name} must be a tensor of floats, got {kind}")
        tensors[name] = tensor
    if not tensors:
        raise InvalidRequest(f"weights must be a path, {what}, got {shown(weights)}")
    return tensors


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """32 hexadecimal digits, equal for equal tensors. O(bytes). By SHA-256, which processors have
    instructions for: it takes less than half of the time of other hashes."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        hasher.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        if tensor.numel():
            data: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            hasher.update(data)
    return hasher.hexdigest()[:32]
