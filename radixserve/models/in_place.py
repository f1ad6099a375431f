"""Weights that are replaced in the memory that they have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from radixserve.errors import InvalidRequest

Pair = tuple[Any, Any]  # two tensors or two arrays


def copy_weights(old: object, new: object) -> None:
    """Copy all tensors and arrays of one object into those of another one, which is built alike.
    Raises InvalidRequest, and copies none, where one has another shape or dtype, or where one piece
    of memory would get two values."""
    pairs = list(weight_pairs(old, new))
    sources: dict[int, int] = {}  # address of an old one -> that of its new values
    for mine, other in pairs:
        source = sources.setdefault(_address(mine), _address(other))
        if source != _address(other) and math.prod(mine.shape):
            raise InvalidRequest(
                "the head is the embedding, and the new weights have another one: start the model "
                "anew for them"
            )
        if mine.shape != other.shape or mine.dtype != other.dtype:
            raise InvalidRequest(
                f"a weight is {list(other.shape)} in {other.dtype}, not {list(mine.shape)} in "
                f"{mine.dtype}: start the model anew for it"
            )
    for mine, other in pairs:
        if isinstance(mine, Tensor):
            mine.copy_(other)
        else:
            np.copyto(mine, other)


def _address(values: Any) -> int:
    return int(values.data_ptr() if isinstance(values, Tensor) else values.ctypes.data)


def weight_pairs(old: object, new: object) -> Iterator[Pair]:
    """Yields the tensors and arrays at the same places of two objects of our classes, tuples or
    lists."""
    if isinstance(old, Tensor | np.ndarray):
        assert isinstance(new, type(old))
        yield old, new
    elif isinstance(old, tuple | list):
        assert isinstance(new, tuple | list)
        for mine, other in zip(old, new, strict=True):
            yield from weight_pairs(mine, other)
    elif type(old).__module__.startswith("radixserve"):
        for name in _fields(old):
            yield from weight_pairs(getattr(old, name), getattr(new, name))


def _fields(instance: object) -> list[str]:
    slots = [name for kind in type(instance).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(instance, "__dict__", ()), *slots]
