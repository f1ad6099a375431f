"""A layer of the decoder on devices: its weights ready to compute, made from `LayerTensors`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixserve.models.decoder_tensors import LayerTensors
from radixserve.models.mlp_tensors import ExpertTensors, MlpTensors, WeightAndBias
from radixserve_kernels.attention_features import AttentionFeatures
from radixserve_kernels.decoder_layer import Mlp
from radixserve_kernels.delta_net import DeltaNet
from radixserve_kernels.experts import GroupedExperts
from radixserve_kernels.linear import Linear
from radixserve_kernels.quantized import concat_rows, dense
from radixserve_kernels.state_space import StateSpace

MakeLinear = Callable[..., Linear]


@dataclass(frozen=True)
class DeviceLayer:
    """See `DecoderLayer`; what a layer does not have is None. Norms are [H] float32."""

    pre_attention_norm: Tensor | None
    post_attention_norm: Tensor | None
    pre_mlp_norm: Tensor | None
    post_mlp_norm: Tensor | None
    qk_norm: Tensor | None  # [Hq + Hkv, D] float32: q's weight for the first Hq heads, then k's
    qkv: Linear | None  # H -> what attention reads, then what a recurrence does; None: an MLP alone
    o: Linear | None
    mlp: Mlp[Linear] | GroupedExperts | None
    features: AttentionFeatures
    rotary: int | None  # which of the decoder's tables turns q and k
    attends: bool
    num_columns: int  # of qkv
    has_gate: bool = False  # the last Q columns of qkv gate what attention gives
    recurrence: DeltaNet | StateSpace | None = None  # instead of attention or beside it
    short_conv: Tensor | None = None  # [kernel, C] of one instead of attention
    beside: Linear | None = None  # as o, of a recurrence beside attention

    @property
    def has_state(self) -> bool:
        return self.recurrence is not None or self.short_conv is not None


def pack_layer(tensors: LayerTensors, linear: MakeLinear = Linear) -> DeviceLayer:
    """`linear` makes a product of a weight and a bias."""
    mlp, net, beside = tensors.mlp, tensors.recurrence, tensors.beside
    parts = (tensors.q, tensors.k, tensors.v, *tensors.more)
    present = [both for both in parts if both[0].shape[0]]
    is_mixer_alone = tensors.short_conv is not None or (net is not None and beside is None)
    return DeviceLayer(
        **tensors.norms,
        qkv=linear(*_stacked(*present)) if present else None,
        o=linear(*_stacked(tensors.o)) if present else None,
        mlp=_pack_mixture(mlp, linear),
        features=tensors.features,
        rotary=tensors.rotary,
        attends=bool(present) and not is_mixer_alone,
        num_columns=sum(weight.shape[0] for weight, _ in present),
        has_gate=bool(tensors.more) and net is None,
        recurrence=net,
        short_conv=tensors.short_conv,
        beside=None if beside is None else linear(*_stacked(beside)),
    )


def _pack_mixture(
    mlp: MlpTensors | ExpertTensors, linear: MakeLinear
) -> Mlp[Linear] | GroupedExperts | None:
    if isinstance(mlp, ExpertTensors):
        return _pack_experts(mlp, linear)
    return _pack_mlp(mlp, linear) if mlp.up[0].shape[0] else None


def _pack_mlp(mlp: MlpTensors, linear: MakeLinear) -> Mlp[Linear]:
    gate = () if mlp.gate is None else (mlp.gate,)
    return Mlp(linear(*_stacked(*gate, mlp.up)), linear(*_stacked(mlp.down)))


def _pack_experts(mlp: ExpertTensors, linear: MakeLinear) -> GroupedExperts:
    """The shared expert, which computes every token, is a separate product."""
    experts = mlp.experts[: mlp.routing.num_experts]
    shared = _pack_mlp(mlp.experts[-1], linear) if mlp.routing.has_shared else None
    gate_up = [
        _stacked(*(() if expert.gate is None else (expert.gate,)), expert.up) for expert in experts
    ]
    down = [_stacked(expert.down) for expert in experts]
    router = linear(*_stacked(mlp.router))
    stacked = *_piled(gate_up), *_piled(down)
    return GroupedExperts(router, *stacked, shared, mlp.routing, mlp.choice_bias)


def _piled(both: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """[E, N, K] and [E, N] of weights and biases."""
    biases = [bias for _, bias in both if bias is not None]
    return torch.stack([weight for weight, _ in both]), torch.stack(biases) if biases else None


def _stacked(*parts: WeightAndBias) -> tuple[Tensor, Tensor | None]:
    """One projection that gives the features of all, concatenated; biases all or none."""
    biases = [bias for _, bias in parts if bias is not None]
    weight = dense(concat_rows([weight for weight, _ in parts]))
    return weight, torch.cat(biases) if biases else None
