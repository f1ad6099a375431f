"""Mamba-2's state spaces: the sizes and weights of a layer, and the arithmetic in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class StateSpace:
    """One layer's own weights, float32. C = 2 G * N + H * P channels of its convolution.

    Its fused product gives each token C, B [G * N], x, z [H * P] and dt [H]. A head h has B and C
    of the group h // (H / G).
    """

    num_groups: int
    num_heads: int
    state_size: int  # N
    head_dim: int  # P
    conv: Tensor  # [kernel, C]
    conv_bias: Tensor | None  # [C]
    decay: Tensor  # [H] -exp(A_log)
    dt_bias: Tensor  # [H]
    skip: Tensor  # [H] D
    norm: Tensor | None  # [H * P]; None: only z gates what the recurrence gives
    norm_size: int  # values that are normed together; 0 without a norm
    gates_first: bool = True  # silu(z) multiplies before the norm
    step_limits: tuple[float, float] = (0.0, float("inf"))  # of softplus(step_scale dt + dt_bias)
    step_scale: float = 1.0
    z_scale: float = 1.0
    out_scale: float = 1.0  # of what the layer adds to the residual

    @property
    def kernel(self) -> int:
        return len(self.conv)

    @property
    def num_channels(self) -> int:
        return int(self.conv.shape[1])

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of one sequence: the inputs of the convolution, and a matrix of each head."""
        return (self.kernel - 1, self.num_channels), (
            self.num_heads,
            self.state_size,
            self.head_dim,
        )


def run_state_space(
    net: StateSpace, rows: Tensor, inputs: Tensor, matrices: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What the output product of a layer multiplies, and both states after the last token.

    rows [T, C + H * P + H]: what its fused product gave; inputs [kernel - 1, C] and matrices
    [H, N, P]: the states before. Returns [T, H * P] and the states. The reference of
    cpu/recurrent.h and gpu/recurrent.py, token by token.
    """
    keys, values = net.num_groups * net.state_size, net.num_heads * net.head_dim
    channels, z, dt = rows.float().split((net.num_channels, values, net.num_heads), -1)
    whole = torch.cat((inputs, channels))
    weights = net.conv.T[:, None]
    mixed = F.conv1d(whole.T[None], weights, net.conv_bias, groups=net.num_channels)[0].T
    c, b, x = F.silu(mixed).split((keys, keys, values), -1)
    repeats = net.num_heads // net.num_groups
    c, b = (
        part.view(-1, net.num_groups, net.state_size).repeat_interleave(repeats, 1)
        for part in (c, b)
    )
    x = x.view(-1, net.num_heads, net.head_dim)
    steps = F.softplus(net.step_scale * dt + net.dt_bias).clamp(*net.step_limits)
    decays = torch.exp(net.decay * steps)
    out = []
    for index in range(len(rows)):
        added = b[index, :, :, None] * (steps[index, :, None] * x[index])[:, None]
        matrices = matrices * decays[index, :, None, None] + added
        out.append((matrices * c[index, :, :, None]).sum(1) + net.skip[:, None] * x[index])
    attended = torch.stack(out).flatten(1) if out else z
    gate = F.silu(net.z_scale * z)
    if net.norm is None:
        attended = attended * gate
    else:
        attended = attended * gate if net.gates_first else attended
        groups = attended.view(len(rows), -1, net.norm_size)
        groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)
        attended = groups.flatten(1) * net.norm
        attended = attended if net.gates_first else attended * gate
    return attended, whole[len(whole) - net.kernel + 1 :], matrices
