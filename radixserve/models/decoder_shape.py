"""A native decoder's sizes and parts, from a config and its family's row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixserve.errors import ModelNotSupported
from radixserve.models.families import FAMILIES, ExpertParts, Family, Mixer, head_dim_of
from radixserve.models.quantized_checkpoint import MXFP4, config_scheme
from radixserve.models.rope import ROPE_TYPES, original_length
from radixserve.models.weights import architecture_of
from radixserve_kernels.attention_features import PLAIN, AttentionFeatures
from radixserve_kernels.decoder_layer import DecoderSizes

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_UNGATED_ACTIVATIONS = {"relu2": "relu2"}
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape(DecoderSizes):
    """The fields of a config that decide its tensors and its arithmetic."""

    family: Family
    qk_norm: str | None  # of QK_NORMS
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    is_tied: bool
    max_positions: int  # of a sequence; with longrope those up to which it has one set of factors
    rotary_dim: int  # features of a head that are turned
    ropes: tuple[Mapping[str, Any], ...]  # rope parameters of each rotary table
    rotary: tuple[int | None, ...]  # of each layer, which of them; None: it turns nothing
    features: tuple[AttentionFeatures, ...]  # of each layer, without sinks
    experts: tuple[ExpertParts | None, ...]  # of each layer; None: one MLP
    mixers: tuple[Mixer | None, ...]  # of each layer; None: it attends
    has_mlp: tuple[bool, ...]  # or experts, of each layer
    heads: tuple[tuple[int, int], ...]  # of each layer, its K/V heads and their features
    kv_sources: tuple[int | None, ...]  # of each layer, the one whose K and V it reads
    intermediate_sizes: tuple[int, ...]  # of each layer's MLP
    k_for_v: tuple[bool, ...]  # of each layer: v is k, as projected
    experts_beside: ExpertParts | None  # of each layer
    layer_input_size: int
    num_input_rows: int  # of the embedding of the layers' own inputs

    @property
    def has_one_shape(self) -> bool:
        """Whether all layers have the same heads, each its own K and V, and no parts of Gemma 4."""
        is_plain = len(set(self.heads)) == 1 and not any(self.kv_sources)
        return is_plain and not self.family.has_layer_scale

    @property
    def feature_names(self) -> frozenset[str]:
        """Fields of AttentionFeatures that any layer uses for text."""
        names = frozenset[str]().union(*(features.names for features in self.features))
        return names | {"sinks"} if self.family.has_sinks else names


def not_native_reason(config: Any) -> str:
    """The part of `config` that the native decoder does not support; "" if it supports all."""
    family = FAMILIES.get(architecture_of(config))
    if family is None:
        return f"it is not one of {', '.join(FAMILIES)}"
    if config_scheme(config) is MXFP4 and not family.has_mxfp4:
        return "it has quantized weights in MXFP4"
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        return "its attention is not causal"
    activation, activations = family.activation(config), _activations(family)
    if activation not in activations:
        return f"it has activation {activation!r}; possible are {', '.join(activations)}"
    has_experts = any(family.experts(config, i) for i in range(config.num_hidden_layers))
    if has_experts and activations[activation] == "gelu_tanh":
        return f"its experts have activation {activation!r}; possible is silu"
    if reason := family.refuses(config):
        return reason
    if getattr(config, "conv_bias", False):
        return "its convolutions have biases"
    known = _LAYER_TYPES | family.layer_types
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - known):
        return f"it has layers of type {', '.join(others)}"
    for rope in _ropes(config):
        kind = rope.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            return f"it has rope scaling {kind!r}; possible are {', '.join(ROPE_TYPES)}"
        share = rope.get("partial_rotary_factor", 1.0)
        if kind not in ("default", "proportional") and share != family.partial_rotary_factor(
            config
        ):
            return f"it has rope scaling {kind!r} of {share} of each head"
    return ""


def compiled_parts(shape: DecoderShape, *, has_ranks: bool) -> str:
    """What of a model only the compiled kernels of the CPU have, in one process; "" if they have
    nothing alone. has_ranks: several ranks compute each layer."""
    if not shape.has_one_shape:
        return "layers of several shapes"
    return "recurrent layers" if has_ranks and any(shape.mixers) else ""


def _activations(family: Family) -> dict[str, str]:
    """By their names in a config."""
    return _UNGATED_ACTIVATIONS if family.mlp_names[0] is None else _ACTIVATIONS


def check_decoder(config: Any) -> None:
    """Raise ModelNotSupported naming what of `config` the native decoder does not compute."""
    if reason := not_native_reason(config):
        raise ModelNotSupported(
            f"the native decoder cannot run {architecture_of(config)}: {reason}"
        )


def decoder_shape(config: Any) -> DecoderShape:
    """Sizes and parts of a checked config."""
    family = FAMILIES[architecture_of(config)]
    num_heads, num_layers = config.num_attention_heads, config.num_hidden_layers
    heads = _heads(config, family)
    head_dim = max(size for _, size in heads)
    ropes = _ropes(config)
    scale = family.attention_scale(config)
    qk_norm = family.qk_norm(config)
    return DecoderShape(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=max(count for count, _ in heads),
        head_dim=head_dim,
        hidden_size=config.hidden_size,
        intermediate_size=family.intermediate_size(config),
        vocab_size=config.vocab_size,
        eps=getattr(config, family.eps),
        attention_scale=float(head_dim**-0.5 if scale is None else scale),
        norm_type=family.norm_type,
        activation=_activations(family)[family.activation(config)],
        has_whole_qk_norm=qk_norm == "whole",
        has_parallel_residual=family.has_parallel_residual,
        embedding_scale=float(family.embedding_scale(config)),
        residual_scale=float(family.residual_scale(config)),
        logit_scale=float(family.logit_scale(config)),
        logit_soft_cap=float(family.final_logits_soft_cap(config) or 0.0),
        has_gated_mlp=family.mlp_names[0] is not None,
        attention_out_scale=float(family.attention_out_scale(config)),
        gate_scale=float(family.gate_scale(config)),
        mlp_out_scale=float(family.mlp_out_scale(config)),
        family=family,
        qk_norm=qk_norm,
        qkv_bias=family.qkv_bias(config),
        o_bias=family.o_bias(config),
        mlp_bias=family.mlp_bias(config),
        is_tied=bool(config.tie_word_embeddings),
        max_positions=_max_positions(config, ropes),
        rotary_dim=int(head_dim * family.partial_rotary_factor(config)),
        ropes=tuple(ropes),
        rotary=tuple(
            ropes.index(_rope_of(config, layer)) if family.uses_rope(config, layer) else None
            for layer in range(num_layers)
        ),
        features=tuple(_features(config, family, layer) for layer in range(num_layers)),
        experts=tuple(family.experts(config, layer) for layer in range(num_layers)),
        mixers=tuple(family.mixer(config, layer) for layer in range(num_layers)),
        has_mlp=tuple(family.has_mlp(config, layer) for layer in range(num_layers)),
        heads=heads,
        kv_sources=tuple(family.kv_source(config, layer) for layer in range(num_layers)),
        intermediate_sizes=tuple(_intermediate_size(config, family, i) for i in range(num_layers)),
        k_for_v=tuple(family.has_k_for_v(config, layer) for layer in range(num_layers)),
        experts_beside=family.experts_beside(config),
        layer_input_size=family.layer_input_size(config),
        num_input_rows=getattr(config, "vocab_size_per_layer_input", 0),
    )


def _heads(config: Any, family: Family) -> tuple[tuple[int, int], ...]:
    if family.attention_heads is not None:
        each = family.attention_heads
        return tuple(each(config, layer) for layer in range(config.num_hidden_layers))
    count: int = config.num_key_value_heads or config.num_attention_heads
    num_layers: int = config.num_hidden_layers
    return ((count, head_dim_of(config)),) * num_layers


def _intermediate_size(config: Any, family: Family, layer: int) -> int:
    if family.layer_intermediate_size is not None:
        return family.layer_intermediate_size(config, layer)
    return int(family.intermediate_size(config))


def _features(config: Any, family: Family, layer: int) -> AttentionFeatures:
    """A window over all positions of the model counts as no window."""
    window, cap = family.window(config, layer), family.logits_soft_cap(config)
    if window is not None and window >= config.max_position_embeddings:
        window = None
    bidirectional = None
    if types := getattr(config, "bidirectional_layers", ()):
        bidirectional = config.layer_types[layer] in types or None
    if window is None and cap is None and bidirectional is None:
        return PLAIN
    return AttentionFeatures(
        sliding_window=window, logits_soft_cap=cap, bidirectional=bidirectional
    )


def _max_positions(config: Any, ropes: list[Mapping[str, Any]]) -> int:
    """Beyond the original length longrope would turn keys again that are in the cache."""
    lengths: list[int] = [config.max_position_embeddings]
    for rope in ropes:
        if rope.get("rope_type") == "longrope" and (length := original_length(config, rope)):
            lengths.append(length)
    return min(lengths)


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """The distinct rope parameters of the layers that turn queries and keys."""
    ropes: list[Mapping[str, Any]] = []
    family = FAMILIES[architecture_of(config)]
    for layer in range(config.num_hidden_layers):
        if family.uses_rope(config, layer) and (rope := _rope_of(config, layer)) not in ropes:
            ropes.append(rope)
    return ropes


def _rope_of(config: Any, layer: int) -> Mapping[str, Any]:
    """Some families have parameters for each type of layer."""
    rope: Mapping[str, Any] = config.rope_parameters
    if not _LAYER_TYPES.isdisjoint(rope):
        rope = rope[config.layer_types[layer]]
    return rope
