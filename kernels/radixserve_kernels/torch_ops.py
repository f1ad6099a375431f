"""Plain torch operations of decoders, on any device; the device kernels' references use them.

Knows tensors and nothing of radixserve: no requests, no pages beyond their slots. Written for few
operations: a step of few rows is bound by what each of them costs to start.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from radixserve_kernels.stored_kv import to_stored


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor, *, is_centered: bool = False) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, in float32, cast back at the end.

    x [..., n]; weight broadcasts against it; eps [] float32. is_centered: of x less its mean, as
    LayerNorm does.
    """
    wide = x.float()
    if is_centered:
        wide = wide - wide.mean(-1, keepdim=True)
    norm = torch.linalg.vector_norm(wide, 2, -1, True)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (wide * scale).mul_(weight).to(x.dtype)


def rotations(positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    """What `apply_rotary` multiplies pairs with at each position: [n, 1, D/2] complex64.

    positions [n] integers; inv_freq [D/2] float32.
    """
    angles = positions.float()[:, None, None] * inv_freq
    return torch.complex(angles.cos() * scaling, angles.sin() * scaling)


def apply_rotary(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate the pairs of each head, features 2i and 2i + 1: x [T, H, D], turns [T, 1, D/2].

    In float32 and cast back. Models that pair feature i with i + D/2 get the same scores when the
    rows of their q and k weights are put in the order of `pair_halves`.
    """
    pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], x.shape[-1] // 2, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def pair_halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of each head reordered: 0, D/2, 1, D/2 + 1, ... weight [H * D] or [H * D, n]."""
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def act_and_mul(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """activation(first half) * second half of the last axis: [T, 2n] -> [T, n] without gaps.

    activation: "silu", or "gelu_tanh", gelu in its tanh form. Written with operations whose results
    do not depend on a number's place: silu and gelu round otherwise where no whole vector is left.
    """
    gate, up = gate_up.chunk(2, -1)
    wide = gate.float()
    if activation == "silu":
        active = wide / wide.neg().exp_().add_(1)
    else:
        inner = (wide * wide * wide).mul_(0.044715).add_(wide).mul_(math.sqrt(2 / math.pi))
        active = inner.tanh_().add_(1).mul_(wide).mul_(0.5)
    return active.to(gate.dtype).mul_(up)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    scales_last: bool = False,
) -> None:
    """Write k, v [T, Hkv, D] to distinct slots of k_cache, v_cache [num_slots, Hkv, W], as these
    store them: see `to_stored`."""
    for x, cache in ((k, k_cache), (v, v_cache)):
        stored = to_stored(x, cache.dtype, scales_last=scales_last)
        as_bytes(cache).index_copy_(0, slot_mapping, as_bytes(stored))


def copy_slots(kv: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy slots of every layer at once; everything is read before anything is written.

    kv [L, 2, num_slots, Hkv, W]; source, destination [n] int64 slots, destinations distinct.
    """
    kv = as_bytes(kv)
    kv.index_copy_(2, destination, kv.index_select(2, source))


def as_bytes(x: Tensor) -> Tensor:
    """x as uint8 where its dtype has 8 bits: PyTorch copies few kinds of these by index."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
