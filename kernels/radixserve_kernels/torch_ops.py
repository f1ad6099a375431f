"""Plain torch operations of decoders, on any device; the device kernels' references use them.

Knows tensors and nothing of radixserve: no requests, no pages beyond their slots. Written for few
operations: a step of few rows is bound by what each of them costs to start.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: Tensor) -> Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis, in float32, cast back before weight.

    x [..., n]; weight broadcasts against it; eps [] float32.
    """
    norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
    scale = torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).to(x.dtype).mul_(weight)


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


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of the last axis: [T, 2n] -> [T, n] without gaps."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k, v [T, Hkv, D] to distinct slots of k_cache, v_cache [num_slots, Hkv, D]."""
    k_cache.index_copy_(0, slot_mapping, k)
    v_cache.index_copy_(0, slot_mapping, v)


def copy_slots(kv: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy slots of every layer at once; everything is read before anything is written.

    kv [L, 2, num_slots, Hkv, D]; source, destination [n] int64 slots, destinations distinct.
    """
    kv.index_copy_(2, destination, kv.index_select(2, source))


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> Tensor:
    """Attention over the union of two disjoint sets of keys, from that over each.

    out, other [n, H, D]; lse, other_lse [n, H] float32, the log of the sum of exponentiated scores.
    """
    share = torch.sigmoid(lse - other_lse)[..., None]  # of `out` in the sum over both sets
    return torch.lerp(other.float(), out.float(), share).to(out.dtype)


def attention_with_lse(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """query [B, H, N, D]; keys, values [B, H, L, D]; mask, added, broadcasts to [B, H, N, L].

    With `is_causal`, for L = N and no mask, a query sees the keys up to its own place.
    Returns [B, H, N, D] and the log-sum-exp of the scores, [B, H, N] float32.
    """
    if query.device.type == "cpu" and _flash_attention is not None:
        out: tuple[Tensor, Tensor] = _flash_attention(
            query, keys, values, is_causal=is_causal, attn_mask=mask, scale=scale
        )
        return out
    if is_causal:
        mask = query.new_full((query.shape[2], keys.shape[2]), -torch.inf).triu(1)
    scores = (query * scale) @ keys.transpose(2, 3)
    if mask is not None:
        scores += mask
    lse = scores.float().logsumexp(-1)
    weights = (scores.float() - lse[..., None]).exp().to(query.dtype)
    return weights @ values, lse


def _find_flash_attention() -> Any:
    """PyTorch's fused CPU attention that also returns log-sum-exp; None if unavailable."""
    packet = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    return None if packet is None else packet.default


_flash_attention = _find_flash_attention()
