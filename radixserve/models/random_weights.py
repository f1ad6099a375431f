"""Weights that are drawn instead of read: a whole model of any size without a file.

Every element is a pure function of the seed, its tensor's name and its index, in integer arithmetic
only: the same on every device, in every process and, but for the rounding to the dtype, in every
dtype.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

CHUNK = {"cpu": 1 << 16}  # elements drawn at a time: what stays in the processor's cache
DEVICE_CHUNK = 1 << 24  # on other devices, 128 MiB of numbers

# Deviation of the sum of four numbers of 16 bits, nearly normal, which ends at 3.5 deviations.
_DEVIATION = math.sqrt(4 * (2**32 - 1) / 12)
_GOLDEN, _FIRST, _SECOND = (  # of splitmix64 (Steele, Lea and Flood 2014), as signed numbers
    number - 2**64 for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class RandomWeights:
    """See `TensorSource`: has every requested tensor.

    Weights are nearly normal with mean 0 and the deviation `std`; those of norms lie around 1. On
    the device "meta" there are shapes only, which are counted.
    """

    def __init__(self, seed: int, std: float, dtype: torch.dtype, device: torch.device) -> None:
        self.num_parameters = 0
        self._seed, self._std = seed, std
        self._dtype, self._device = dtype, device

    def __contains__(self, name: str) -> bool:
        del name
        return False  # nothing beyond what a config asks for

    def skip(self, pattern: str) -> None:
        pass

    def finish(self) -> None:
        pass

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor of that name, made on the device."""
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.num_parameters += out.numel()
        if out.is_meta:
            return out
        key, mean = _key(self._seed, name), float("norm" in name)
        flat = out.view(-1)
        step = CHUNK.get(self._device.type, DEVICE_CHUNK)
        for begin in range(0, len(flat), step):
            part = flat[begin : begin + step]
            drawn = _normal(key, begin, begin + len(part), self._device)
            part.copy_(drawn.mul_(self._std).add_(mean))
        return out

    take_weight = take


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _normal(key: int, begin: int, end: int, device: torch.device) -> Tensor:
    """Elements [begin, end) of the key's stream: float32, mean 0, deviation 1."""
    bits = torch.arange(begin, end, dtype=torch.int64, device=device)
    bits.mul_(_GOLDEN).add_(key)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        bits.bitwise_xor_(_shifted(bits, shift)).mul_(factor)
    bits.bitwise_xor_(_shifted(bits, 31))
    lanes = bits.view(torch.int16).view(-1, 4)  # signed: the mean of their sum is -2
    return lanes.sum(1, dtype=torch.int32).float().add_(2.0).div_(_DEVIATION)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Shifted to the right, zeros coming in: torch's own shift repeats the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)
