"""The device kernels' plain torch twins: what each computes, on any device.

Knows tensors and nothing of radixserve: no requests, no pages beyond their slots. Each function
follows the order of operations of transformers' models, so that float32 results agree closely.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, in float32, cast back before weight.

    x [..., n]; weight broadcasts against it.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(residual + x), residual + x); all [T, n]."""
    total = residual + x
    return rms_norm(total, weight, eps), total


def rotary_tables(
    positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Tables for `apply_rotary`, each [T, 1, D]: cosines, and sines with the first half negated.

    positions [T] integers; inv_freq [D/2] float32. Angles are taken in float32 whatever `dtype` is.
    """
    angles = positions.float()[:, None, None] * inv_freq  # [T, 1, D/2]
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def apply_rotary(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate the halves of each head: x [T, H, D] with the tables of `rotary_tables`."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of the last axis: [T, 2n] -> [T, n]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v [T, Hkv, D] to distinct slots of k_cache, v_cache [num_slots, Hkv, D]."""
    k_cache.index_copy_(0, slot_mapping, k)
    v_cache.index_copy_(0, slot_mapping, v)


def copy_slots(kv: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy slots of every layer at once; everything is read before anything is written.

    kv [L, 2, num_slots, Hkv, D]; source, destination [n] int64 slots, destinations distinct.
    """
    kv.index_copy_(2, destination, kv.index_select(2, source))


def merge_attention(
    out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from that over each.

    out, other [n, H, D]; lse, other_lse [n, H] float32, the log of the sum of exponentiated scores.
    """
    total = torch.logaddexp(lse, other_lse)
    ours, theirs = (lse - total).exp()[..., None], (other_lse - total).exp()[..., None]
    return (out.float() * ours + other.float() * theirs).to(out.dtype), total
