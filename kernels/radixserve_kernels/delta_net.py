"""Gated delta nets: the sizes and weights of a layer, and the arithmetic in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class DeltaNet:
    """One layer's own weights, float32. C = 2 Hk * K + Hv * V channels of its convolution.

    Its fused product gives each token q, k [Hk * K], v, z [Hv * V], b and a [Hv]. A value head h
    has q and k of the key head h // (Hv / Hk).
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv: Tensor  # [kernel, C]
    decay: Tensor  # [Hv] -exp(A_log)
    dt_bias: Tensor  # [Hv]
    norm: Tensor  # [V]

    @property
    def kernel(self) -> int:
        return len(self.conv)

    @property
    def num_channels(self) -> int:
        return int(self.conv.shape[1])

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of one sequence: the inputs of the convolution, and a matrix of each value head."""
        matrices = self.num_v_heads, self.k_dim, self.v_dim
        return (self.kernel - 1, self.num_channels), matrices


def run_delta_net(
    net: DeltaNet, rows: Tensor, inputs: Tensor, matrices: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What the output product of a layer multiplies, and both states after the last token.

    rows [T, C + Hv * V + 2 Hv]: what its fused product gave; inputs [kernel - 1, C] and matrices
    [Hv, K, V]: the states before. Returns [T, Hv * V] and the states. The reference of
    cpu/recurrent.h and gpu/recurrent.py, token by token.
    """
    keys, values = net.num_k_heads * net.k_dim, net.num_v_heads * net.v_dim
    channels, z, b, a = rows.float().split(
        (net.num_channels, values, net.num_v_heads, net.num_v_heads), -1
    )
    whole = torch.cat((inputs, channels))
    mixed = F.conv1d(whole.T[None], net.conv.T[:, None], groups=net.num_channels)[0].T
    q, k, v = F.silu(mixed).split((keys, keys, values), -1)
    repeats = net.num_v_heads // net.num_k_heads
    q, k = (x.view(-1, net.num_k_heads, net.k_dim).repeat_interleave(repeats, 1) for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, v = q * net.k_dim**-0.5, v.view(-1, net.num_v_heads, net.v_dim)
    decays, rates = torch.exp(net.decay * F.softplus(a + net.dt_bias)), torch.sigmoid(b)
    out = []
    for index in range(len(rows)):
        matrices = matrices * decays[index, :, None, None]
        known = (matrices * k[index, :, :, None]).sum(1)
        delta = (v[index] - known) * rates[index, :, None]
        matrices = matrices + k[index, :, :, None] * delta[:, None]
        out.append((matrices * q[index, :, :, None]).sum(1))
    attended = torch.stack(out) if out else v
    scale = torch.rsqrt(attended.pow(2).mean(-1, keepdim=True) + eps)
    gate = F.silu(z).view(-1, net.num_v_heads, net.v_dim)
    gated = attended * scale * net.norm * gate
    return gated.flatten(1), whole[len(whole) - net.kernel + 1 :], matrices
