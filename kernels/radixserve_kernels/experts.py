"""Mixtures of experts: how tokens choose theirs, and the products of the chosen ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixserve_kernels.decoder_layer import Mlp
from radixserve_kernels.gpu_ops import act_and_mul, clamped_swiglu, grouped_linear, sort_by_expert
from radixserve_kernels.linear import Linear


@dataclass(frozen=True, slots=True)
class Routing:
    """How the tokens of a layer choose among its experts, and what an expert computes."""

    num_experts: int  # without the shared one
    top_k: int  # experts of a token, without the shared one
    renormalizes: bool  # the weights of the chosen experts sum to 1, else those of all experts do
    has_shared: bool = False  # a further expert that every token has, gated by a sigmoid
    swiglu_alpha: float = 1.0
    swiglu_limit: float = 0.0  # of the clamped swiglu; 0: silu(gate) * up


def choose_experts(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """(ids [T, k] int64, weights [T, k] float32) of logits [T, E]: the best experts, best first.

    A shared expert comes last, where there is one: logits have its gate as a last column.
    """
    logits = logits.float()
    best, ids = logits[:, : routing.num_experts].topk(routing.top_k)
    if routing.renormalizes:
        weights = best.softmax(-1)
    else:
        weights = logits[:, : routing.num_experts].softmax(-1).gather(1, ids)
    if not routing.has_shared:
        return ids, weights
    shared = ids.new_full((len(ids), 1), routing.num_experts)
    return torch.cat((ids, shared), 1), torch.cat((weights, logits[:, -1:].sigmoid()), 1)


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """E experts of M features ready to compute, on any device."""

    router: Linear  # H -> E, and the shared expert's gate
    gate_up: Tensor  # [E, 2 M, H], gate first
    gate_up_bias: Tensor | None  # [E, 2 M]
    down: Tensor  # [E, H, M]
    down_bias: Tensor | None  # [E, H]
    shared: Mlp[Linear] | None
    routing: Routing

    def __call__(self, x: Tensor) -> Tensor:
        """What the experts make of x [T, H]: [T, H]."""
        routing = self.routing
        ids, weights = choose_experts(self.router(x), routing)
        order, indptr = sort_by_expert(ids[:, : routing.top_k], routing.num_experts)
        inner = grouped_linear(x, self.gate_up, self.gate_up_bias, order, indptr)
        if routing.swiglu_limit:
            inner = clamped_swiglu(inner, routing.swiglu_alpha, routing.swiglu_limit)
        else:
            inner = act_and_mul(inner)
        out = grouped_linear(inner, self.down, self.down_bias, order, indptr)
        out = out.view(len(x), routing.top_k, x.shape[1])
        if self.shared is not None:
            shared = self.shared.down(act_and_mul(self.shared.gate_up(x)))
            out = torch.cat((out, shared[:, None]), 1)
        return (out.float() * weights[..., None]).sum(1).to(x.dtype)
