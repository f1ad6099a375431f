"""The families that the native decoder computes: a row each, of parts that decoder_layer.py lists.

Adding a family whose parts are there is adding a row. Its functions take the config, with the
fields of config.json. What a config asks beyond its row is refused in decoder_shape.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from radixserve_kernels.experts import Routing

Read = Callable[[Any], Any]  # of a config


@dataclass(frozen=True, slots=True)
class NormNames:
    """Names of a layer's norms in the checkpoint; None: it has no such norm."""

    pre_attention: str | None = "input_layernorm"
    post_attention: str | None = None  # of what attention adds to the residual
    pre_mlp: str | None = "post_attention_layernorm"
    post_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """A layer's experts, and their names in the checkpoint."""

    routing: Routing
    intermediate_size: int
    shared_size: int = 0  # of the shared expert
    module: str = "mlp"
    router: str = "gate"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    is_interleaved: bool = False  # gate and up in turn in one tensor, all with biases


def _no_experts(_config: Any, _layer: int) -> ExpertParts | None:
    return None


@dataclass(frozen=True, slots=True)
class Family:
    """How a config and a checkpoint of the family become parts."""

    norms: NormNames = NormNames()
    norm_type: str = "rms"  # of NORM_TYPES
    norm_offset: float = 0.0  # is added to the weights of norms
    eps: str = "rms_norm_eps"  # its field
    qk_norm: Callable[[Any], str | None] = lambda _: None  # of QK_NORMS; None: there is none
    qkv_bias: Callable[[Any], bool] = lambda config: bool(config.attention_bias)
    o_bias: Callable[[Any], bool] = lambda config: bool(config.attention_bias)
    mlp_bias: Callable[[Any], bool] = lambda _: False
    fused_projections: tuple[str, ...] = ()  # "qkv", "gate_up": one tensor in the checkpoint
    has_interleaved_rope: bool = False  # rotates features 2i and 2i + 1, not i and i + D/2
    partial_rotary_factor: Read = lambda _: 1.0  # of each head's features, the first ones
    uses_rope: Callable[[Any, int], bool] = lambda _config, _layer: True
    activation: Read = lambda config: config.hidden_act
    attention_scale: Read = lambda _: None  # None: 1 / sqrt(D)
    window: Callable[[Any, int], int | None] = lambda _config, _layer: None  # of a layer
    logits_soft_cap: Read = lambda _: None  # of attention
    has_sinks: bool = False
    has_mxfp4: bool = False  # checkpoints may have experts in it, which are widened
    experts: Callable[[Any, int], ExpertParts | None] = _no_experts  # of a layer
    has_parallel_residual: bool = False
    embedding_scale: Read = lambda _: 1.0
    has_rounded_scale: bool = False  # that one, to the dtype of the weights
    residual_scale: Read = lambda _: 1.0
    logit_scale: Read = lambda _: 1.0
    final_logits_soft_cap: Read = lambda _: None  # of logits


QK_NORMS = (
    "shared",  # each head, by one weight [D]
    "head",  # each head, by its own [D]
    "whole",  # all heads together, by a weight of all features
)

_OUTPUT_NORMS = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GEMMA_NORMS = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GLM4_NORMS = NormNames(
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


def _never(_: Any) -> bool:
    return False


def _always(_: Any) -> bool:
    return True


def _is_sliding(config: Any, layer: int) -> bool:
    return bool(config.layer_types[layer] == "sliding_attention")


def _window_of_all(config: Any, _layer: int) -> int | None:
    return config.sliding_window or None


def _window_by_type(config: Any, layer: int) -> int | None:
    return config.sliding_window if _is_sliding(config, layer) else None


def _partial(config: Any) -> float:
    return float(config.rope_parameters.get("partial_rotary_factor", 1.0))


def _qwen_experts(config: Any, layer: int) -> ExpertParts | None:
    is_dense = layer in config.mlp_only_layers or (layer + 1) % config.decoder_sparse_step
    if is_dense or not config.num_experts:
        return None
    shared_size = getattr(config, "shared_expert_intermediate_size", None) or 0
    routing = Routing(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        renormalizes=config.norm_topk_prob,
        has_shared=bool(shared_size),
    )
    return ExpertParts(routing, config.moe_intermediate_size, shared_size)


def _mixtral_experts(config: Any, _layer: int) -> ExpertParts:
    routing = Routing(config.num_experts, config.num_experts_per_tok, renormalizes=True)
    module, names = "block_sparse_moe", ("w1", "w3", "w2")
    return ExpertParts(routing, config.intermediate_size, module=module, names=names)


def _gpt_oss_experts(config: Any, _layer: int) -> ExpertParts:
    routing = Routing(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        renormalizes=True,
        swiglu_alpha=getattr(config, "swiglu_alpha", 1.702),
        swiglu_limit=getattr(config, "swiglu_limit", 7.0),
    )
    return ExpertParts(routing, config.intermediate_size, router="router", is_interleaved=True)


_LLAMA = Family(mlp_bias=lambda config: bool(config.mlp_bias))
_OLMO2 = Family(norms=_OUTPUT_NORMS, qk_norm=lambda _: "whole")
_GLM = Family(
    o_bias=_never,
    fused_projections=("gate_up",),
    has_interleaved_rope=True,
    partial_rotary_factor=_partial,
)
_GEMMA = Family(
    norm_offset=1.0,
    embedding_scale=lambda config: config.hidden_size**0.5,
    has_rounded_scale=True,
)
_COHERE = Family(
    norms=NormNames(pre_mlp=None),
    norm_type="layer",
    eps="layer_norm_eps",
    has_interleaved_rope=True,
    has_parallel_residual=True,
    logit_scale=lambda config: config.logit_scale,
)

FAMILIES: dict[str, Family] = {  # by architecture
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": Family(qkv_bias=_never, o_bias=_never, window=_window_of_all),
    "Qwen2ForCausalLM": Family(qkv_bias=_always, o_bias=_never, window=_window_by_type),
    "Qwen3ForCausalLM": Family(qk_norm=lambda _: "shared", window=_window_by_type),
    "CohereForCausalLM": replace(
        _COHERE, qk_norm=lambda config: "head" if config.use_qk_norm else None
    ),
    "Cohere2ForCausalLM": replace(_COHERE, uses_rope=_is_sliding, window=_window_by_type),
    "Exaone4ForCausalLM": Family(
        norms=_OUTPUT_NORMS,
        qk_norm=lambda _: "shared",
        qkv_bias=_never,
        o_bias=_never,
        uses_rope=lambda config, layer: config.sliding_window is None or _is_sliding(config, layer),
        window=_window_by_type,
    ),
    "GemmaForCausalLM": _GEMMA,
    "Gemma2ForCausalLM": replace(
        _GEMMA,
        norms=_GEMMA_NORMS,
        activation=lambda config: config.hidden_activation,
        attention_scale=lambda config: config.query_pre_attn_scalar**-0.5,
        window=_window_by_type,
        logits_soft_cap=lambda config: config.attn_logit_softcapping,
        final_logits_soft_cap=lambda config: config.final_logit_softcapping,
    ),
    "Gemma3ForCausalLM": replace(
        _GEMMA,
        norms=_GEMMA_NORMS,
        qk_norm=lambda _: "shared",
        activation=lambda config: config.hidden_activation,
        attention_scale=lambda config: config.query_pre_attn_scalar**-0.5,
        window=_window_by_type,
        final_logits_soft_cap=lambda config: config.final_logit_softcapping,
    ),
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, norms=_GLM4_NORMS),
    "GptOssForCausalLM": Family(
        window=_window_by_type, has_sinks=True, has_mxfp4=True, experts=_gpt_oss_experts
    ),
    "GraniteForCausalLM": replace(
        _LLAMA,
        attention_scale=lambda config: config.attention_multiplier,
        embedding_scale=lambda config: config.embedding_multiplier,
        residual_scale=lambda config: config.residual_multiplier,
        logit_scale=lambda config: 1 / config.logits_scaling,
    ),
    "MixtralForCausalLM": Family(
        qkv_bias=_never, o_bias=_never, window=_window_of_all, experts=_mixtral_experts
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(_OLMO2, window=_window_by_type),
    "Phi3ForCausalLM": Family(
        qkv_bias=_never,
        o_bias=_never,
        fused_projections=("qkv", "gate_up"),
        partial_rotary_factor=_partial,
        window=_window_of_all,
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias=lambda config: bool(config.qkv_bias),
        o_bias=_never,
        window=_window_by_type,
        experts=_qwen_experts,
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=lambda _: "shared", window=_window_of_all, experts=_qwen_experts
    ),
    "SmolLM3ForCausalLM": replace(
        _LLAMA,
        uses_rope=lambda config, layer: bool(config.no_rope_layers[layer]),
        window=_window_by_type,
    ),
}
