"""A decoder's sizes and parts, and one layer's weights ready to compute, on any device.

A layer, where R is the residual stream and a norm that is None is left out:

    x = pre_attention_norm(R)
    q, k, v = x of qkv; q and k are normed and rotated
    R += residual_scale * post_attention_norm(o(attention(q, k, v)))
    x = pre_mlp_norm(R), or with `has_parallel_residual` the x of attention
    R += residual_scale * post_mlp_norm(mlp(x))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from radixserve_kernels.attention_features import AttentionFeatures
from radixserve_kernels.cpu_recurrent import PackedRecurrence, PackedShortConv

Weight = TypeVar("Weight")  # a packed projection: `Linear`, `PackedWeight`
Rows = TypeVar("Rows")  # of an embedding
Experts = TypeVar("Experts")  # a mixture of them: `GroupedExperts`, `PackedExperts`

NORM_TYPES = ("rms", "layer")  # as C numbers them
ACTIVATIONS = ("silu", "gelu_tanh", "relu2")  # the same


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The numbers of a decoder that decide its arithmetic."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    eps: float
    attention_scale: float  # of the scores
    norm_type: str = "rms"  # of NORM_TYPES
    activation: str = "silu"  # of ACTIVATIONS, of the MLP's gate
    has_whole_qk_norm: bool = False  # q's and k's heads are normed together, not each on its own
    has_parallel_residual: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0  # logits become cap * tanh(logit / cap); 0: they do not
    has_gated_mlp: bool = True  # else down(activation(up))
    attention_out_scale: float = 1.0  # of what attention adds to the residual
    gate_scale: float = 1.0  # of the MLP's gate before its activation
    mlp_out_scale: float = 1.0  # of what the MLP adds to the residual


@dataclass(frozen=True)  # with slots a call of Mlp[...] fails in Python 3.11
class Mlp(Generic[Weight]):
    """down(activation(gate) * up), M features within; without a gate gate_up is up alone."""

    gate_up: Weight  # H -> 2 M; of PackedWeight interleaved, see `interleave`
    down: Weight  # M -> H


@dataclass(frozen=True)
class ExpertsBeside(Generic[Experts]):
    """Experts beside a layer's MLP, by Gemma 4: both read the residual R, and

    mlp(x) becomes norm(mlp(x), post_mlp_norm) + norm(experts(norm(R, pre_norm)), post_norm)

    before the layer's own post_mlp_norm. The experts are chosen by norm(R, router_norm). Norms are
    [H] float32.
    """

    experts: Experts
    router_norm: Tensor
    pre_norm: Tensor
    post_mlp_norm: Tensor
    post_norm: Tensor


@dataclass(frozen=True)
class LayerInput(Generic[Weight]):
    """What a layer does with its own input of P features, at its end:
    R += norm(up(gelu(gate(R)) * input))."""

    gate: Weight  # H -> P
    up: Weight  # P -> H
    norm: Tensor  # [H] float32


@dataclass(frozen=True)
class LayerInputs(Generic[Weight, Rows]):
    """The inputs of L layers from a token and its embedding e, each [P]:
    scale * (rows[token] * rows_scale + norm(projection(e) * projection_scale))."""

    rows: Rows  # [V, L * P]
    projection: Weight  # H -> L * P
    norm: Tensor  # [P] float32
    rows_scale: float
    projection_scale: float
    scale: float


@dataclass(frozen=True)
class DecoderLayer(Generic[Weight, Experts]):
    """Q = Hq * D and KV = Hkv * D features, H hidden. Norms are [H] float32.

    An MLP alone has a qkv without columns; a layer without an MLP has one without columns.
    """

    pre_attention_norm: Tensor | None
    post_attention_norm: Tensor | None
    pre_mlp_norm: Tensor | None
    post_mlp_norm: Tensor | None
    qk_norm: Tensor | None  # [Hq + Hkv, D] float32: q's weight for the first Hq heads, then k's
    qkv: Weight  # H -> Q + 2 KV
    o: Weight  # Q -> H
    mlp: Mlp[Weight] | Experts  # experts only without a post_mlp_norm
    features: AttentionFeatures
    rotary: int | None  # which of the decoder's rotary tables turns q and k; None: none does
    has_gate: bool = False  # qkv gives Q more, whose sigmoid multiplies what attention gives
    recurrence: PackedRecurrence | None = None  # instead of attention or beside it: qkv gives what
    # it reads, after q, k and v
    short_conv: PackedShortConv | None = None  # instead of attention
    beside: Weight | None = None  # as o, of a recurrence beside attention
    num_kv_heads: int = 0  # of attention, here and below; 0: as the decoder
    head_dim: int = 0
    kv_source: int | None = None  # layer whose K and V it reads; qkv gives q alone
    has_v_norm: bool = False  # v is normed, too: qk_norm is [Hq + 2 Hkv, D]
    experts_beside: ExpertsBeside[Experts] | None = None
    own_input: LayerInput[Weight] | None = None
    scale: float = 1.0  # of the residual after the layer

    @property
    def attends(self) -> bool:
        """Whether it has attention. Of compiled layers only."""
        num_columns = getattr(self.qkv, "num_columns", 1)
        return (
            bool(num_columns)
            and self.short_conv is None
            and (self.recurrence is None or self.beside is not None)
        )
