"""The families of the native decoder: a row each, of parts that decoder_layer.py lists.

A family that needs no new part is added as a row. Its functions take the config, with the fields of
config.json. decoder_shape.py refuses a config that needs more than its row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from radixserve_kernels.experts import Routing

Read = Callable[[Any], Any]  # of a config
MlpNames = tuple[str | None, str, str]  # of gate, up and down in the checkpoint; None: it has no
# gate; one name twice: gate and up are one tensor


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
    names: MlpNames = ("gate_proj", "up_proj", "down_proj")
    fused_names: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")  # of all experts
    shared_names: MlpNames = (
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert.down_proj",
    )
    is_interleaved: bool = False  # gate and up in turn in one tensor, all with biases
    choice_bias: str | None = None  # see `choose_experts`; None: there is none


@dataclass(frozen=True, slots=True)
class DeltaNetParts:
    """A layer with a gated delta net instead of attention."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    kernel: int  # tokens that its convolution reads
    is_grouped: bool  # all rows of a key head together in one tensor of the checkpoint

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `DeltaNet.state_shapes`."""
        channels = 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim
        return (self.kernel - 1, channels), (self.num_v_heads, self.k_dim, self.v_dim)

    def grouped_rows(self) -> tuple[Tensor, ...]:
        """Rows of q, k, v and z in the grouped tensor, each in the order of heads."""
        inner = self.num_v_heads // self.num_k_heads * self.v_dim
        return self._split((self.k_dim, self.k_dim, inner, inner))

    def grouped_gate_rows(self) -> tuple[Tensor, ...]:
        """Rows of b and a in their grouped tensor."""
        return self._split((self.num_v_heads // self.num_k_heads,) * 2)

    def _split(self, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        rows = torch.arange(self.num_k_heads * sum(sizes)).view(self.num_k_heads, -1)
        return tuple(part.flatten() for part in rows.split(sizes, 1))


@dataclass(frozen=True, slots=True)
class ShortConvParts:
    """A layer with a gated short convolution instead of attention."""

    channels: int
    kernel: int  # tokens that it reads

    @property
    def state_shapes(self) -> tuple[tuple[int, ...]]:
        """Shapes for one sequence: the convolution's inputs of earlier tokens."""
        return ((self.kernel - 1, self.channels),)


@dataclass(frozen=True, slots=True)
class StateSpaceParts:
    """A layer with a state space of Mamba-2 instead of attention, or beside it."""

    num_groups: int
    num_heads: int
    state_size: int
    head_dim: int
    kernel: int  # tokens that its convolution reads
    has_bias: bool  # of both products
    has_conv_bias: bool
    step_limits: tuple[float, float]
    module: str = "mamba"
    has_norm: bool = True
    norm_size: int = 0  # values that are normed together; 0: those of a group
    gates_first: bool = True
    is_beside: bool = False
    in_scales: tuple[float, ...] = (1.0,) * 5  # of z, x, B, C and dt
    out_scale: float = 1.0

    @property
    def keys(self) -> int:
        return self.num_groups * self.state_size

    @property
    def values(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See `StateSpace.state_shapes`."""
        matrices = self.num_heads, self.state_size, self.head_dim
        return (self.kernel - 1, self.channels), matrices


@dataclass(frozen=True, slots=True)
class NoMixer:
    """A layer that is an MLP alone."""

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ()


Mixer = DeltaNetParts | ShortConvParts | StateSpaceParts | NoMixer


def attends(mixer: Mixer | None) -> bool:
    """Whether a layer with such a mixer has attention."""
    return mixer is None or (isinstance(mixer, StateSpaceParts) and mixer.is_beside)


def _attention_only(_config: Any, _layer: int) -> Mixer | None:
    return None


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
    has_fused_qkv: bool = False  # in the checkpoint
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
    has_output_gate: bool = False  # q_proj also outputs the attention's gate
    mixer: Callable[[Any, int], Mixer | None] = _attention_only  # of a layer, in place of attention
    layer_types: frozenset[str] = frozenset()  # its layers without attention, in the config
    mlp_names: MlpNames = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    has_mlp: Callable[[Any, int], bool] = lambda _config, _layer: True  # or experts, of a layer
    intermediate_size: Read = lambda config: getattr(config, "intermediate_size", 0)
    attention_module: str = "self_attn"
    o_name: str = "o_proj"
    qk_norm_name: str = "norm"  # after "q_" and "k_"
    final_norm: str = "norm"
    stored_prefixes: tuple[tuple[str, str], ...] = ()  # of tensors in the checkpoint, and what they
    # are here
    refuses: Callable[[Any], str] = lambda _: ""  # what of a config is not computed, else ""
    embedding_scale: Read = lambda _: 1.0
    has_rounded_scale: bool = False  # that one, to the dtype of the weights
    residual_scale: Read = lambda _: 1.0
    logit_scale: Read = lambda _: 1.0
    final_logits_soft_cap: Read = lambda _: None  # of logits
    attention_out_scale: Read = lambda _: 1.0  # of what attention adds to the residual
    gate_scale: Read = lambda _: 1.0  # of the MLP's gate
    mlp_out_scale: Read = lambda _: 1.0  # of what the MLP adds to the residual
    attention_heads: Callable[[Any, int], tuple[int, int]] | None = None  # of a layer, its K/V
    # heads and their features; None: as the config says for all
    kv_source: Callable[[Any, int], int | None] = lambda _config, _layer: None  # of a layer, the
    # earlier one whose K and V it reads
    layer_intermediate_size: Callable[[Any, int], int] | None = (
        None  # of its MLP, where they differ
    )
    has_v_norm: bool = False  # without weights, where K and V are stored
    has_k_for_v: Callable[[Any, int], bool] = lambda _config, _layer: False  # v is k, as projected
    experts_beside: Callable[[Any], ExpertParts | None] = lambda _: None  # the MLP of each layer
    layer_input_size: Read = lambda _: 0  # of each layer's own input of a token; 0: none has one
    has_layer_scale: bool = False  # of the residual after a layer


QK_NORMS = (
    "shared",  # each head, by one weight [D]
    "head",  # each head, by its own [D]
    "whole",  # all heads together, by a weight of all features
)

_GRANITE_MLP = (
    "shared_mlp.input_linear",
    "shared_mlp.input_linear",
    "shared_mlp.output_linear",
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


def head_dim_of(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None)
    return int(head_dim or config.hidden_size // config.num_attention_heads)


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


def _qwen_delta_net(config: Any, layer: int) -> DeltaNetParts | None:
    if config.layer_types[layer] != "linear_attention":
        return None
    return DeltaNetParts(
        num_k_heads=config.linear_num_key_heads,
        num_v_heads=config.linear_num_value_heads,
        k_dim=config.linear_key_head_dim,
        v_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
        is_grouped=config.model_type == "qwen3_next",
    )


def _qwen_3_5_experts(config: Any, _layer: int) -> ExpertParts:
    routing = Routing(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        renormalizes=True,
        has_shared=True,
    )
    return ExpertParts(
        routing, config.moe_intermediate_size, config.shared_expert_intermediate_size
    )


def _lfm2_conv(config: Any, layer: int) -> ShortConvParts | None:
    if config.layer_types[layer] != "conv":
        return None
    return ShortConvParts(config.hidden_size, config.conv_L_cache)


def _lfm2_experts(config: Any, layer: int) -> ExpertParts | None:
    if layer < config.num_dense_layers:
        return None
    routing = Routing(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        renormalizes=config.norm_topk_prob,
        has_sigmoid=True,
        sum_eps=1e-6,
        scale=config.routed_scaling_factor,
    )
    return ExpertParts(
        routing,
        config.moe_intermediate_size,
        module="feed_forward",
        names=("w1", "w3", "w2"),
        choice_bias="expert_bias" if config.use_expert_bias else None,
    )


def _mamba_parts(config: Any, head_dim: int, **others: Any) -> StateSpaceParts:
    """From the fields that Granite 4 and Falcon-H1 share."""
    return StateSpaceParts(
        num_groups=config.mamba_n_groups,
        num_heads=config.mamba_n_heads,
        state_size=config.mamba_d_state,
        head_dim=head_dim,
        kernel=config.mamba_d_conv,
        has_bias=config.mamba_proj_bias,
        has_conv_bias=config.mamba_conv_bias,
        step_limits=tuple(config.time_step_limit),
        **others,
    )


def _granite_state_space(config: Any, layer: int) -> StateSpaceParts | None:
    if config.layer_types[layer] != "linear_attention":
        return None
    return _mamba_parts(config, config.mamba_d_head)


def _granite_experts(config: Any, _layer: int) -> ExpertParts | None:
    if not config.num_local_experts:
        return None
    routing = Routing(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        renormalizes=True,
        has_shared=True,
        has_shared_gate=False,
    )
    return ExpertParts(
        routing,
        config.intermediate_size,
        config.shared_intermediate_size,
        module="block_sparse_moe",
        router="router.layer",
        fused_names=("input_linear.weight", "output_linear.weight"),
        shared_names=_GRANITE_MLP,
    )


def _nemotron_mixer(config: Any, layer: int) -> Mixer | None:
    kind = config.layers_block_type[layer]
    if kind in ("mlp", "moe"):
        return NoMixer()
    if kind != "linear_attention":
        return None
    return StateSpaceParts(
        num_groups=config.n_groups,
        num_heads=config.mamba_num_heads,
        state_size=config.ssm_state_size,
        head_dim=config.mamba_head_dim,
        kernel=config.conv_kernel,
        has_bias=config.use_bias,
        has_conv_bias=config.use_conv_bias,
        step_limits=(config.time_step_min, math.inf),  # as in transformers
        module="mixer",
    )


def _nemotron_experts(config: Any, layer: int) -> ExpertParts | None:
    if config.layers_block_type[layer] != "moe":
        return None
    routing = Routing(
        num_experts=config.n_routed_experts,
        top_k=config.num_experts_per_tok,
        renormalizes=config.norm_topk_prob,
        has_shared=True,
        has_shared_gate=False,
        has_sigmoid=True,
        sum_eps=1e-20,
        scale=config.routed_scaling_factor,
        is_gated=False,
    )
    return ExpertParts(
        routing,
        config.moe_intermediate_size,
        config.moe_shared_expert_intermediate_size,
        module="mixer",
        names=(None, "up_proj", "down_proj"),
        shared_names=(None, "mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
        choice_bias="gate.e_score_correction_bias",
    )


def _nemotron_refuses(config: Any) -> str:
    if config.mamba_hidden_act != "silu":
        return f"its state spaces have activation {config.mamba_hidden_act!r}"
    if "moe" not in config.layers_block_type:
        return ""
    if config.n_group != 1:
        return "its experts are chosen in groups"
    return "" if config.moe_latent_size is None else "its experts read a latent space"


def _falcon_state_space(config: Any, _layer: int) -> StateSpaceParts:
    size = config.mamba_d_ssm
    if size is None:
        size = int(config.mamba_expand * config.hidden_size)
    return _mamba_parts(
        config,
        size // config.mamba_n_heads,
        has_norm=config.mamba_rms_norm,
        gates_first=not config.mamba_norm_before_gate,
        is_beside=True,
        in_scales=tuple(config.ssm_in_multiplier * scale for scale in config.ssm_multipliers),
        out_scale=config.ssm_out_multiplier,
    )


def _falcon_refuses(config: Any) -> str:
    """Multipliers of inputs are applied to outputs, which biases would be part of."""
    names = "attention_bias", "mamba_proj_bias", "projectors_bias", "mlp_bias"
    biases = [name for name in names if getattr(config, name, False)]
    return f"it has {', '.join(biases)}" if biases else ""


def _gemma4_heads(config: Any, layer: int) -> tuple[int, int]:
    own = config.per_layer_config[layer]
    return own.num_key_value_heads, own.head_dim


def _gemma4_kv_source(config: Any, layer: int) -> int | None:
    """The last layer of the same type before those that share."""
    first = config.num_hidden_layers - config.num_kv_shared_layers
    if layer < first:
        return None
    types = config.layer_types
    return max(before for before in range(first) if types[before] == types[layer])


def _gemma4_intermediate_size(config: Any, layer: int) -> int:
    is_wide = config.use_double_wide_mlp and _gemma4_kv_source(config, layer) is not None
    return int(config.intermediate_size) * (2 if is_wide else 1)


def _gemma4_experts(config: Any) -> ExpertParts | None:
    if not config.enable_moe_block:
        return None
    routing = Routing(config.num_experts, config.top_k_experts, renormalizes=True, has_gelu=True)
    return ExpertParts(routing, config.moe_intermediate_size)


def _gemma4_refuses(config: Any) -> str:
    first = config.num_hidden_layers - config.num_kv_shared_layers
    if set(config.layer_types[first:]) - set(config.layer_types[:first]):
        return "layers share K and V of a type that no other layer has"
    return ""


def _lfm2_intermediate_size(config: Any) -> int:
    size = int(config.intermediate_size)
    if not config.block_auto_adjust_ff_dim:
        return size
    size = 2 * size // 3
    if config.block_ffn_dim_multiplier is None:
        return size
    unit = int(config.block_multiple_of)
    return -(-int(config.block_ffn_dim_multiplier * size) // unit) * unit


_LLAMA = Family(mlp_bias=lambda config: bool(config.mlp_bias))
_GRANITE = replace(
    _LLAMA,
    attention_scale=lambda config: config.attention_multiplier,
    embedding_scale=lambda config: config.embedding_multiplier,
    residual_scale=lambda config: config.residual_multiplier,
    logit_scale=lambda config: 1 / config.logits_scaling,
)
_OLMO2 = Family(norms=_OUTPUT_NORMS, qk_norm=lambda _: "whole")
_GLM = Family(
    o_bias=_never,
    mlp_names=("mlp.gate_up_proj", "mlp.gate_up_proj", "mlp.down_proj"),
    has_interleaved_rope=True,
    partial_rotary_factor=_partial,
)
_QWEN_3_5 = Family(
    norm_offset=1.0,
    qk_norm=lambda _: "shared",
    partial_rotary_factor=_partial,
    has_output_gate=True,
    mixer=_qwen_delta_net,
    layer_types=frozenset({"linear_attention"}),
)
_GEMMA = Family(
    norm_offset=1.0,
    embedding_scale=lambda config: config.hidden_size**0.5,
    has_rounded_scale=True,
)
_GEMMA4 = replace(
    _GEMMA,
    norm_offset=0.0,
    norms=_GEMMA_NORMS,
    qk_norm=lambda _: "shared",
    activation=lambda config: config.hidden_activation,
    attention_scale=lambda _: 1.0,
    window=_window_by_type,
    final_logits_soft_cap=lambda config: config.final_logit_softcapping,
    attention_heads=_gemma4_heads,
    kv_source=_gemma4_kv_source,
    intermediate_size=lambda config: max(
        _gemma4_intermediate_size(config, layer) for layer in range(config.num_hidden_layers)
    ),
    layer_intermediate_size=_gemma4_intermediate_size,
    has_v_norm=True,
    has_k_for_v=lambda config, layer: config.attention_k_eq_v and not _is_sliding(config, layer),
    experts_beside=_gemma4_experts,
    layer_input_size=lambda config: config.hidden_size_per_layer_input or 0,
    has_layer_scale=True,
    refuses=_gemma4_refuses,
)
_LFM2 = Family(
    norms=NormNames("operator_norm", None, "ffn_norm"),
    eps="norm_eps",
    qk_norm=lambda _: "shared",
    qkv_bias=_never,
    o_bias=_never,
    activation=lambda _: "silu",
    mixer=_lfm2_conv,
    layer_types=frozenset({"conv"}),
    mlp_names=("feed_forward.w1", "feed_forward.w3", "feed_forward.w2"),
    o_name="out_proj",
    qk_norm_name="layernorm",
    final_norm="embedding_norm",
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
    "Gemma4ForCausalLM": _GEMMA4,
    "GlmForCausalLM": _GLM,
    "Glm4ForCausalLM": replace(_GLM, norms=_GLM4_NORMS),
    "GptOssForCausalLM": Family(
        window=_window_by_type, has_sinks=True, has_mxfp4=True, experts=_gpt_oss_experts
    ),
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeHybridForCausalLM": replace(
        _GRANITE,
        mlp_bias=_never,
        uses_rope=lambda config, _layer: config.position_embedding_type == "rope",
        mixer=_granite_state_space,
        layer_types=frozenset({"linear_attention"}),
        experts=_granite_experts,
        mlp_names=_GRANITE_MLP,
        intermediate_size=lambda config: config.shared_intermediate_size,
    ),
    "NemotronHForCausalLM": Family(
        norms=NormNames("norm", None, None),
        eps="layer_norm_epsilon",
        mlp_bias=lambda config: bool(config.mlp_bias),
        uses_rope=lambda _config, _layer: False,
        activation=lambda config: config.mlp_hidden_act,
        mixer=_nemotron_mixer,
        layer_types=frozenset({"linear_attention", "mlp", "moe"}),
        experts=_nemotron_experts,
        mlp_names=(None, "mixer.up_proj", "mixer.down_proj"),
        has_mlp=lambda config, layer: config.layers_block_type[layer] in ("mlp", "moe"),
        attention_module="mixer",
        final_norm="norm_f",
        stored_prefixes=(("backbone.embeddings.", "model.embed_tokens."), ("backbone.", "model.")),
        refuses=_nemotron_refuses,
    ),
    "FalconH1ForCausalLM": Family(
        norms=NormNames("input_layernorm", None, "pre_ff_layernorm"),
        attention_scale=lambda config: (
            head_dim_of(config) ** -0.5 * config.attention_in_multiplier**2 * config.key_multiplier
        ),
        mixer=_falcon_state_space,
        layer_types=frozenset({"hybrid"}),
        mlp_names=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
        final_norm="final_layernorm",
        refuses=_falcon_refuses,
        embedding_scale=lambda config: config.embedding_multiplier,
        logit_scale=lambda config: config.lm_head_multiplier,
        attention_out_scale=lambda config: (
            config.attention_in_multiplier * config.attention_out_multiplier
        ),
        gate_scale=lambda config: config.mlp_multipliers[0],
        mlp_out_scale=lambda config: config.mlp_multipliers[1],
    ),
    "MixtralForCausalLM": Family(
        qkv_bias=_never, o_bias=_never, window=_window_of_all, experts=_mixtral_experts
    ),
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": replace(_OLMO2, window=_window_by_type),
    "Phi3ForCausalLM": Family(
        qkv_bias=_never,
        o_bias=_never,
        has_fused_qkv=True,
        mlp_names=("mlp.gate_up_proj", "mlp.gate_up_proj", "mlp.down_proj"),
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
    "Qwen3NextForCausalLM": replace(_QWEN_3_5, experts=_qwen_experts),
    "Qwen3_5ForCausalLM": _QWEN_3_5,
    "Qwen3_5MoeForCausalLM": replace(_QWEN_3_5, experts=_qwen_3_5_experts),
    "Lfm2ForCausalLM": replace(_LFM2, intermediate_size=_lfm2_intermediate_size),
    "Lfm2MoeForCausalLM": replace(_LFM2, experts=_lfm2_experts),
    "SmolLM3ForCausalLM": replace(
        _LLAMA,
        uses_rope=lambda config, layer: bool(config.no_rope_layers[layer]),
        window=_window_by_type,
    ),
}
