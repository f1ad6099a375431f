"""The sizes of a Llama-like decoder, and one layer's weights ready to compute, on any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

Weight = TypeVar("Weight")  # a packed projection: `Linear`, `PackedWeight`


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


@dataclass(frozen=True)  # with slots a call of DecoderLayer[...] fails in Python 3.11
class DecoderLayer(Generic[Weight]):
    """Q = Hq * D and KV = Hkv * D features, M of the MLP, H hidden."""

    input_norm: Tensor  # [H]
    qkv: Weight  # H -> Q + 2 KV
    qk_norm: Tensor | None  # [Hq + Hkv, D] q's weight for the first Hq heads, then k's
    o: Weight  # Q -> H
    post_norm: Tensor  # [H]
    gate_up: Weight  # H -> 2 M; of PackedWeight interleaved, see `interleave`
    down: Weight  # M -> H
