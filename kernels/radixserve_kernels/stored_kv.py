"""Stored K and V on any device: in a model's dtype, in bfloat16, or in integers of 8 bits.

A token's head in 8 bits is D integers of -127 to 127 and behind them their scale, a bfloat16, as
two more int8. It depends on the head's own numbers alone. cpu/stored_kv.h stores the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 2
LEAST = 1e-30  # a head without a larger number is stored as zeros


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """Numbers of `dtype` that a head of a token takes."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def stored_head_dim(width: int, dtype: torch.dtype) -> int:
    """The features of a head that takes `width` numbers of `dtype`."""
    return width - SCALE_BYTES if dtype == torch.int8 else width


def to_stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [..., D] as it is stored, [..., stored_width(D, dtype)]."""
    if dtype != torch.int8:
        return x.to(dtype)
    wide = x.float()
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
    return (numbers.float() * scale.view(torch.bfloat16).float()).to(dtype)
