"""Stored K and V on any device: in a model's dtype, in bfloat16, or in integers of 8 bits.

A token's head in 8 bits is multiplied with a Hadamard matrix, which spreads a large number over
the head, and stored as D integers of -127 to 127 and behind them their scale, a bfloat16, as two
more int8. It depends on the head's own numbers alone. cpu/stored_kv.h stores the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 2
INT8_FORM = "hadamard"  # of the numbers in 8 bits; K and V that another version stored may differ
LEAST = 1e-30  # a head without a larger number is stored as zeros


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """Numbers of `dtype` that a head of a token takes."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def stored_head_dim(width: int, dtype: torch.dtype) -> int:
    """The features of a head that takes `width` numbers of `dtype`."""
    return width - SCALE_BYTES if dtype == torch.int8 else width


def multiply_hadamard(x: Tensor) -> Tensor:
    """float32 x [..., D], each block of it multiplied with a Hadamard matrix, which is its own
    inverse. A block is as large as the largest power of two that divides D."""
    size = x.shape[-1] & -x.shape[-1]
    distance = 1
    while distance < size:
        low, high = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        distance *= 2
    scale: float = size**-0.5
    return x * scale


def to_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., D] as it is stored, [..., stored_width(D, dtype)]."""
    if dtype != torch.int8:
        return x.to(dtype)
    wide = multiply_hadamard(x.float())
    largest = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(largest >= LEAST, largest / 127, 0.0)
    # Rounded up, so that no number is cut off.
    bits = (scale.view(torch.int32) + 0xFFFF) & ~0xFFFF
    scale = bits.view(torch.float32)
    is_finite = largest.isfinite()
    inverse = torch.where((scale > 0) & is_finite, 1 / scale, 0.0)
    numbers = torch.where(is_finite, wide * inverse, 0.0).round().to(torch.int8)
    scale = torch.where(is_finite, scale, torch.nan).to(torch.bfloat16)
    return torch.cat((numbers, scale.view(torch.int8)), -1)


def from_stored(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What is stored in rows [..., W], in `dtype`: [..., D]."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    numbers, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].contiguous()
    wide = numbers.float() * scale.view(torch.bfloat16).float()
    return multiply_hadamard(wide).to(dtype)
