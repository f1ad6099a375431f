"""Stored K and V on any device: in a model's dtype, in bfloat16, or in 8 bits.

float8_e4m3fn: each number is rounded to the nearest one that this dtype has, at most 448.

int8: a token's head is multiplied with a Hadamard matrix, which spreads a large number over the
head, and stored as D integers of -127 to 127 and their scale, a bfloat16, as two more int8. It
depends on the head's own numbers alone. On the CPU a head's scale lies behind its integers;
cpu/stored_kv.h stores the same bits. Devices load integers in blocks of 16 bytes and want them
aligned: there the scales of all heads lie behind the integers of all heads (`scales_last`).
"""

from __future__ import annotations

import torch
from torch import Tensor

KV_DTYPES = {  # by their names in EngineConfig.kv_dtype, those that a model's dtype may differ from
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}
FP8_CAPABILITY = (8, 9)  # least of a CUDA device that converts numbers of 8 bits
FP8_MAX = 448.0
SCALE_BYTES = 2
INT8_FORM = "hadamard"  # of the numbers in 8 bits; K and V that another version stored may differ
LEAST = 1e-30  # a head without a larger number is stored as zeros


def dtype_name(dtype: torch.dtype) -> str:
    """As EngineConfig has it: "bfloat16", "fp8_e4m3"."""
    names = {stored: name for name, stored in KV_DTYPES.items()}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """Numbers of `dtype` that a head of a token takes."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def stored_head_dim(width: int, dtype: torch.dtype) -> int:
    """The features of a head that takes `width` numbers of `dtype`."""
    return width - SCALE_BYTES if dtype == torch.int8 else width


def hadamard_size(head_dim: int) -> int:
    """Numbers of a block that is multiplied with a Hadamard matrix: the largest power of two that
    divides the head's."""
    return head_dim & -head_dim


def multiply_hadamard(x: Tensor) -> Tensor:
    """float32 x [..., D], each block of `hadamard_size(D)` multiplied with a Hadamard matrix, which
    is its own inverse."""
    size = hadamard_size(x.shape[-1])
    distance = 1
    while distance < size:
        low, high = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        distance *= 2
    scale: float = size**-0.5
    return x * scale


def to_stored(x: Tensor, dtype: torch.dtype, *, scales_last: bool = False) -> Tensor:
    """x [..., Hkv, D] as it is stored, [..., Hkv, stored_width(D, dtype)]."""
    if dtype == torch.float8_e4m3fn:
        wide = x.float()
        near = wide.clamp(-FP8_MAX, FP8_MAX)
        return torch.where(wide.isfinite(), near, torch.nan).to(dtype)
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
    scale = torch.where(is_finite, scale, torch.nan).to(torch.bfloat16).view(torch.int8)
    if not scales_last:
        return torch.cat((numbers, scale), -1)
    rows = torch.cat((numbers.flatten(-2), scale.flatten(-2)), -1)
    return rows.reshape(*x.shape[:-1], stored_width(x.shape[-1], dtype))


def from_stored(rows: Tensor, dtype: torch.dtype, *, scales_last: bool = False) -> Tensor:
    """What is stored in rows [..., Hkv, W], in `dtype`: [..., Hkv, D]."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    numbers, scale = split_int8(rows, scales_last=scales_last)
    return multiply_hadamard(numbers.float() * scale[..., None].float()).to(dtype)


def split_int8(rows: Tensor, *, scales_last: bool) -> tuple[Tensor, Tensor]:
    """The integers [..., Hkv, D] and the scales [..., Hkv] in rows [..., Hkv, W]: views of them
    where D is even and there are no gaps between heads."""
    num_heads, head_dim = rows.shape[-2], rows.shape[-1] - SCALE_BYTES
    if scales_last:
        flat = rows.flatten(-2)
        numbers, tail = flat[..., : num_heads * head_dim], flat[..., num_heads * head_dim :]
        return numbers.unflatten(-1, (num_heads, head_dim)), tail.view(torch.bfloat16)
    tail = rows[..., head_dim:]
    if head_dim % 2:
        tail = tail.contiguous()
    return rows[..., :head_dim], tail.view(torch.bfloat16)[..., 0]
