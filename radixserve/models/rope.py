"""Rotary embeddings: inverse frequencies and tables of rotations.

Frequencies are in float32 and in the order of transformers' operations, so that both are equal to
the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from radixserve_kernels.torch_ops import rotations

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
FIRST_POSITIONS = 2_048  # whose rotations are made at load


class RotaryTable:
    """The rotation of every position, [n, 1, D/2] complex64; as many as were needed so far."""

    def __init__(self, inv_freq: Tensor, scaling: float, head_dim: int | None = None) -> None:
        """`inv_freq` [R/2] float32 of the first R features of a head; the others are not rotated.

        Cosines and sines of these R are multiplied by `scaling`. head_dim: D, R if None.
        """
        self._inv_freq, self._scaling = inv_freq, scaling
        self._num_unrotated = 0 if head_dim is None else head_dim // 2 - len(inv_freq)
        self._rows: Tensor | None = (
            None  # made when they are needed: none for a model's shapes alone
        )

    def up_to(self, end: int) -> Tensor:
        """[n >= end, 1, D/2] of positions 0, 1, 2 ..."""
        rows = self._rows
        if rows is None or end > len(rows):
            size = FIRST_POSITIONS if rows is None else 2 * len(rows)
            self._rows = rows = self._make(max(end, size))
        return rows

    def cos_sin(self, num_positions: int) -> Tensor:
        """[n, D] float32 of positions 0 to n - 1: the cosines of the D/2 pairs, then the sines."""
        rows = self._make(num_positions)[:, 0]
        return torch.cat((rows.real, rows.imag), -1)

    def _make(self, num_positions: int) -> Tensor:
        positions = torch.arange(num_positions, device=self._inv_freq.device)
        rotated = rotations(positions, self._inv_freq, self._scaling)
        unrotated = rotated.new_ones((num_positions, 1, self._num_unrotated))
        return torch.cat((rotated, unrotated), -1) if self._num_unrotated else rotated


def rope_frequencies(
    config: Any, rotary_dim: int, parameters: Mapping[str, Any] | None = None
) -> tuple[Tensor, float]:
    """(inv_freq [R/2] float32, the factor of cosines and sines) of R = rotary_dim features.

    `config`: a checked one; `parameters`: those of some layers, its rope_parameters if None.
    """
    rope = dict(config.rope_parameters if parameters is None else parameters)
    if (length := original_length(config, rope)) is not None:
        rope["original_max_position_embeddings"] = length
    kind = rope.get("rope_type", "default")
    if kind == "proportional":
        return _proportional(rope, rotary_dim), 1.0
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    powers = rope["rope_theta"] ** exponents
    if kind == "yarn":
        return _yarn(powers, rope, rotary_dim, config.max_position_embeddings)
    if kind == "longrope":
        return _longrope(powers, rope, config.max_position_embeddings)
    inv_freq = 1.0 / powers
    if kind == "linear":
        inv_freq = inv_freq / rope["factor"]
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, rope)
    return inv_freq, 1.0


def _proportional(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """Gemma 4: the first pairs of a head turn as far as their place among all of it says, the
    others not at all."""
    num_turned = int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
    exponents = torch.arange(0, 2 * num_turned, 2, dtype=torch.float32) / head_dim
    turned = 1.0 / rope["rope_theta"] ** exponents
    inv_freq = torch.cat((turned, torch.zeros(head_dim // 2 - num_turned)))
    factor: float = rope.get("factor", 1.0)
    return inv_freq / factor


def original_length(config: Any, rope: Mapping[str, Any]) -> int | None:
    """Positions before scaling: a field of the config goes before that of its rope parameters."""
    length: int | None = getattr(config, "original_max_position_embeddings", None)
    return rope.get("original_max_position_embeddings") if length is None else length


def _longrope(powers: Tensor, rope: Mapping[str, Any], max_positions: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024) of sequences up to the original length, by the short factors."""
    length, factor = rope["original_max_position_embeddings"], rope.get("factor")
    factor = max_positions / length if factor is None else factor
    scaling = rope.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    inv_freq = 1.0 / (torch.tensor(rope["short_factor"], dtype=torch.float32) * powers)
    return inv_freq, float(scaling)


def _llama3(inv_freq: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones stay, between the two
    both are mixed."""
    length, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    is_long, is_short = wavelength > length / low, wavelength < length / high
    share = (length / wavelength - low) / (high - low)
    mixed = (1 - share) * inv_freq / factor + share * inv_freq
    return torch.where(is_long, inv_freq / factor, torch.where(is_short, inv_freq, mixed))


def _yarn(
    powers: Tensor, rope: Mapping[str, Any], head_dim: int, max_positions: int
) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): features that turn often stay, those that turn less than once are
    stretched by the factor, with a ramp between the two."""
    length = rope["original_max_position_embeddings"]
    factor = max_positions / length if rope["factor"] is None else rope["factor"]
    scaling = rope.get("attention_factor")
    if scaling is None:
        mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        scaling = _mscale(factor, 1)
        if mscale and mscale_all:
            scaling = _mscale(factor, mscale) / _mscale(factor, mscale_all)

    def feature(num_turns: float) -> float:
        """Index of the feature that turns so often over the original length."""
        turns = math.log(length / (num_turns * 2 * math.pi))
        return (head_dim * turns) / (2 * math.log(rope["rope_theta"]))

    first, last = feature(rope.get("beta_fast") or 32), feature(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else (last + 0.001) - first
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width, 0, 1)
    kept = 1 - ramp
    inv_freq = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return inv_freq, float(scaling)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
