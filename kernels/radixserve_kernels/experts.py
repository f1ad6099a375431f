"""Mixtures of experts: how tokens choose theirs, and the products of the chosen ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixserve_kernels.decoder_layer import Mlp
from radixserve_kernels.gpu_ops import (
    act_and_mul,
    clamped_swiglu,
    grouped_linear,
    sort_by_expert,
    squared_relu,
)
from radixserve_kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class Routing:
    """How the tokens of a layer choose among its experts, and what an expert computes."""

    num_experts: int  # without the shared one
    top_k: int  # experts of a token, without the shared one
    renormalizes: bool  # weights of the chosen experts sum to 1, else they are the scores
    has_shared: bool = False  # a further expert that every token has
    has_shared_gate: bool = True  # its weight is a sigmoid of the router's last column, else 1
    has_sigmoid: bool = False  # scores are sigmoids of the logits, else their softmax
    sum_eps: float = 0.0  # is added to the sum that `renormalizes` divides by
    scale: float = 1.0  # of the weights, but the shared expert's
    swiglu_alpha: float = 1.0
    swiglu_limit: float = 0.0  # of the clamped swiglu; 0: silu(gate) * up
    is_gated: bool = True  # else experts are down(relu(up)^2)
    has_gelu: bool = False  # in its tanh form, in place of silu

    @property
    def num_logits(self) -> int:
        """Columns of the router."""
        return self.num_experts + (self.has_shared and self.has_shared_gate)


def choose_experts(
    logits: Tensor, routing: Routing, choice_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(ids [T, k] int64, weights [T, k] float32) of logits [T, E]: the best experts, best first.

    choice_bias [E]: is added to the sigmoids where experts are chosen, not to their weights. A
    shared expert comes last, and its gate, if it has one, is the last column of the logits.
    """
    logits = logits.float()
    own = logits[:, : routing.num_experts]
    if routing.has_sigmoid:
        scores = own.sigmoid()
        ids = (scores if choice_bias is None else scores + choice_bias).topk(routing.top_k)[1]
        weights = scores.gather(1, ids)
        if routing.renormalizes:
            weights = weights / (weights.sum(1, keepdim=True) + routing.sum_eps)
    else:
        best, ids = own.topk(routing.top_k)
        weights = best.softmax(-1) if routing.renormalizes else own.softmax(-1).gather(1, ids)
    weights = weights * routing.scale
    if not routing.has_shared:
        return ids, weights
    shared = ids.new_full((len(ids), 1), routing.num_experts)
    gates = logits[:, -1:].sigmoid() if routing.has_shared_gate else weights.new_ones(len(ids), 1)
    return torch.cat((ids, shared), 1), torch.cat((weights, gates), 1)


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """E experts of M features ready to compute, on any device."""

    router: Linear  # H -> E, and the shared expert's gate
    gate_up: Tensor  # [E, 2 M, H], gate first; [E, M, H] without gates
    gate_up_bias: Tensor | None  # [E, 2 M]
    down: Tensor  # [E, H, M]
    down_bias: Tensor | None  # [E, H]
    shared: Mlp[Linear] | None
    routing: Routing
    choice_bias: Tensor | None = None  # [E] float32, see `choose_experts`

    def __call__(self, x: Tensor) -> Tensor:
        """What the experts make of x [T, H]: [T, H]."""
        routing = self.routing
        ids, weights = choose_experts(self.router(x), routing, self.choice_bias)
        order, indptr = sort_by_expert(ids[:, : routing.top_k], routing.num_experts)
        inner = grouped_linear(x, self.gate_up, self.gate_up_bias, order, indptr)
        if routing.swiglu_limit:
            inner = clamped_swiglu(inner, routing.swiglu_alpha, routing.swiglu_limit)
        else:
            inner = self._activated(inner)
        out = grouped_linear(inner, self.down, self.down_bias, order, indptr)
        out = out.view(len(x), routing.top_k, x.shape[1])
        if self.shared is not None:
            shared = self.shared.down(self._activated(self.shared.gate_up(x)))
            out = torch.cat((out, shared[:, None]), 1)
        return (out.float() * weights[..., None]).sum(1).to(x.dtype)

    def _activated(self, inner: Tensor) -> Tensor:
        return act_and_mul(inner) if self.routing.is_gated else squared_relu(inner)
