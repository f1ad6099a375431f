"""MXFP4: weights in 4 bits, a power of two for each 32 of them (OCP Microscaling formats, 1.0)."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"  # endings of a weight's two tensors
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # then the same, negative
_BIAS = 127  # of exponents


def widen_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [E, K, N], exactly, of blocks [E, N, K / 32, 16] and scales [E, N, K / 32], uint8.

    Of a byte the low four bits come first. A scale of 255 is NaN.
    """
    values = torch.tensor([*_VALUES, *(-one for one in _VALUES)], dtype=torch.bfloat16)
    pairs = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [E, N, K / 32, 32]
    factors = torch.ldexp(torch.ones(scales.shape), scales.int() - _BIAS).bfloat16()
    factors[scales == 255] = torch.nan
    return (values[pairs.int()] * factors[..., None]).flatten(-2).transpose(1, 2)


def is_mxfp4(blocks: Tensor, scales: Tensor) -> bool:
    """Whether both have the dtype and the shape of a weight."""
    return (
        blocks.dtype == scales.dtype == torch.uint8
        and blocks.shape[-1:] == (16,)
        and blocks.shape[:-1] == scales.shape
        and scales.ndim == 3
    )
