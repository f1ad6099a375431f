"""The families that GGUF files and the native decoder share: a row each, which maps a file's fields
and tensors to transformers'.

The conventions are those of llama.cpp's converter and of its readers, which know some constants
that no file holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from radixserve.errors import ModelNotSupported
from radixserve.gguf_file import GgufFile
from radixserve.models.gguf_layouts import (
    as_stored,
    falcon_h1_fields,
    gemma4_fields,
    granite_hybrid_fields,
    group_delta_net_rows,
    lfm2_fields,
    nemotron_h_fields,
    qwen3_5_fields,
    qwen3_next_fields,
    restore_delta_net,
    restore_mamba2,
    restore_short_conv,
    restore_tiled_delta_net,
)
from radixserve_kernels.quantized import AnyWeight

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_OUTPUT_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_NORMS = {**_OUTPUT_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_GLM4_NORMS = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_GRANITE_FIELDS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


class JoinedTensor(NamedTuple):
    """A tensor of transformers that a file has as several: rows of all, then in its order."""

    name: str
    parts: tuple[str, ...]
    order: Callable[[GgufFile, AnyWeight], AnyWeight] = lambda _, weight: weight


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """The transformers name of a general.architecture."""

    model_type: str
    architecture: str
    has_paired_rotation: bool = False  # rows of q and k lie in pairs (2i, 2i + 1), not in halves
    names: Mapping[str, str] = field(default_factory=dict)  # of tensors, unlike those in _LAYER
    experts: tuple[str, str, str, str] | None = (
        *("mlp.experts", "gate_proj", "up_proj", "down_proj"),
    )  # None: a tensor of all, as in the file
    fields: Mapping[str, str] = field(default_factory=dict)  # of the config -> of the file
    constants: Mapping[str, object] = field(default_factory=dict)  # fields of the config
    eps: str = "rms_norm_eps"  # its field
    norm_offset: float = 0.0  # was added to the weights of norms
    period: int | None = None  # each such layer has full attention, others a window; None: all
    window: int | None = None  # where the file tells none
    local_theta: float | None = None  # of unscaled rope in layers with a window, 0: as elsewhere;
    # None: all layers have the same rope
    is_partly_rotated: bool = False  # rope.dimension_count may be less than a head
    odd_scale_layers: int = 0  # a model of so many has attention scaled by H / heads
    ends: Mapping[str, str] = field(default_factory=dict)  # tensors beside the layers, if others
    more_fields: Callable[[GgufFile], dict[str, Any]] = lambda _: {}  # of the config
    restore: Callable[[GgufFile, str, AnyWeight], AnyWeight] = as_stored  # see gguf_layouts.py
    joined: tuple[JoinedTensor, ...] = ()

    def tensor_name(self, name: str) -> str | None:
        """In transformers, of a layer's tensor in the file ("attn_q.weight"); None: unknown."""
        if (whole := self.names.get(name)) is not None:
            return whole
        stem, _, kind = name.rpartition(".")
        module = self.names.get(stem, _LAYER.get(stem))
        return None if module is None else f"{module}.{kind}"


_PHI3_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT_OSS_NAMES = {
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
}
_GEMMA4_NAMES = {
    **_GEMMA_NORMS,
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "inp_gate": "per_layer_input_gate",
    "layer_output_scale.weight": "layer_scalar",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "post_norm": "post_per_layer_input_norm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "proj": "per_layer_projection",
}


def _mamba_names(module: str) -> dict[str, str]:
    return {
        "ssm_a": f"{module}.A_log",
        "ssm_conv1d": f"{module}.conv1d",
        "ssm_d": f"{module}.D",
        "ssm_dt.bias": f"{module}.dt_bias",
        "ssm_in": f"{module}.in_proj",
        "ssm_norm": f"{module}.norm",
        "ssm_out": f"{module}.out_proj",
    }


_GRANITE_HYBRID_NAMES = {
    **_mamba_names("mamba"),
    "ffn_down": "shared_mlp.output_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
}
_NEMOTRON_H_NAMES = {
    **_mamba_names("mixer"),
    "attn_k": "mixer.k_proj",
    "attn_norm": "norm",
    "attn_output": "mixer.o_proj",
    "attn_q": "mixer.q_proj",
    "attn_v": "mixer.v_proj",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_down": "mixer.down_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
}
_NEMOTRON_H = GgufFamily(
    "nemotron_h",
    "NemotronHForCausalLM",
    names=_NEMOTRON_H_NAMES,
    experts=("mixer.experts", "gate_proj", "up_proj", "down_proj"),  # no file of them has a gate
    eps="layer_norm_epsilon",
    ends={"output_norm": "model.norm_f"},
    more_fields=nemotron_h_fields,
    restore=restore_mamba2,
)
_DELTA_NET_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_a": "linear_attn.A_log",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN3_NEXT_NAMES = {
    **_DELTA_NET_NAMES,
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_in": "linear_attn.in_proj_qkvz",  # in older files, instead of attn_qkv and attn_gate
}
_QWEN3_5_NAMES = {
    **_DELTA_NET_NAMES,
    "attn_gate": "linear_attn.in_proj_z",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
_LFM2_NAMES = {
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "ffn_down": "feed_forward.w2",
    "ffn_gate": "feed_forward.w1",
    "ffn_norm": "ffn_norm",
    "ffn_up": "feed_forward.w3",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_LFM2 = GgufFamily(
    "lfm2",
    "Lfm2ForCausalLM",
    names=_LFM2_NAMES,
    eps="norm_eps",
    ends={"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"},
    more_fields=lfm2_fields,
    restore=restore_short_conv,
)
FAMILIES = {
    "llama": GgufFamily("llama", "LlamaForCausalLM", has_paired_rotation=True),
    "qwen2": GgufFamily("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": GgufFamily("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3": GgufFamily("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily("qwen3_moe", "Qwen3MoeForCausalLM", constants={"norm_topk_prob": True}),
    "cohere2": GgufFamily(
        "cohere2",
        "Cohere2ForCausalLM",
        fields={"logit_scale": "logit_scale"},
        eps="layer_norm_eps",
        period=4,
    ),
    "command-r": GgufFamily(
        "cohere", "CohereForCausalLM", fields={"logit_scale": "logit_scale"}, eps="layer_norm_eps"
    ),
    "exaone4": GgufFamily("exaone4", "Exaone4ForCausalLM", names=_OUTPUT_NORMS, period=4),
    "gemma": GgufFamily("gemma", "GemmaForCausalLM", norm_offset=1.0),
    "gemma2": GgufFamily(
        "gemma2",
        "Gemma2ForCausalLM",
        names=_GEMMA_NORMS,
        fields={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        norm_offset=1.0,
        period=2,
        window=4096,
        odd_scale_layers=46,
    ),
    "gemma3": GgufFamily(
        "gemma3_text",
        "Gemma3ForCausalLM",
        names=_GEMMA_NORMS,
        fields={"final_logit_softcapping": "final_logit_softcapping"},
        norm_offset=1.0,
        period=6,
        local_theta=10_000.0,
        odd_scale_layers=62,
    ),
    "gemma4": GgufFamily(
        "gemma4_text",
        "Gemma4ForCausalLM",
        names=_GEMMA4_NAMES,
        experts=None,
        ends={
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
            "per_layer_token_embd": "model.embed_tokens_per_layer",
        },
        fields={"final_logit_softcapping": "final_logit_softcapping"},
        period=6,
        more_fields=gemma4_fields,
    ),
    "falcon-h1": GgufFamily(
        "falcon_h1",
        "FalconH1ForCausalLM",
        names={
            **_mamba_names("mamba"),
            "ffn_down": "feed_forward.down_proj",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_norm": "pre_ff_layernorm.weight",  # the file's name of it has no ending
            "ffn_norm.weight": "pre_ff_layernorm.weight",
            "ffn_up": "feed_forward.up_proj",
        },
        ends={"output_norm": "model.final_layernorm"},
        more_fields=falcon_h1_fields,
        restore=restore_mamba2,
    ),
    "granitehybrid": GgufFamily(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        has_paired_rotation=True,
        names=_GRANITE_HYBRID_NAMES,
        experts=None,
        fields=_GRANITE_FIELDS,
        more_fields=granite_hybrid_fields,
        restore=restore_mamba2,
        joined=(
            JoinedTensor("block_sparse_moe.input_linear", ("ffn_gate_exps", "ffn_up_exps")),
            JoinedTensor("shared_mlp.input_linear", ("ffn_gate_shexp", "ffn_up_shexp")),
            JoinedTensor("shared_mlp.input_linear", ("ffn_gate", "ffn_up")),
        ),
    ),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "glm4": GgufFamily(
        "glm4",
        "Glm4ForCausalLM",
        names={**_GLM4_NORMS, "ffn_up": "mlp.gate_up_proj"},
        is_partly_rotated=True,
    ),
    "gpt-oss": GgufFamily(
        "gpt_oss",
        "GptOssForCausalLM",
        names=_GPT_OSS_NAMES,
        period=2,
    ),
    "granite": GgufFamily(
        "granite", "GraniteForCausalLM", has_paired_rotation=True, fields=_GRANITE_FIELDS
    ),
    "olmo2": GgufFamily("olmo2", "Olmo2ForCausalLM", names=_OUTPUT_NORMS),
    "lfm2": _LFM2,
    "lfm2moe": replace(
        _LFM2,
        model_type="lfm2_moe",
        architecture="Lfm2MoeForCausalLM",
        names={
            **_LFM2_NAMES,
            "ffn_gate_inp": "feed_forward.gate",
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        experts=("feed_forward.experts", "w1", "w3", "w2"),
    ),
    "qwen35": GgufFamily(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        names=_QWEN3_5_NAMES,
        norm_offset=1.0,
        is_partly_rotated=True,
        more_fields=qwen3_5_fields,
        restore=restore_tiled_delta_net,
    ),
    "qwen35moe": GgufFamily(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        names=_QWEN3_5_NAMES,
        norm_offset=1.0,
        is_partly_rotated=True,
        more_fields=qwen3_5_fields,
        restore=restore_tiled_delta_net,
    ),
    "qwen3next": GgufFamily(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        names=_QWEN3_NEXT_NAMES,
        norm_offset=1.0,
        is_partly_rotated=True,
        more_fields=qwen3_next_fields,
        restore=restore_delta_net,
        joined=(
            JoinedTensor(
                "linear_attn.in_proj_qkvz", ("attn_qkv", "attn_gate"), group_delta_net_rows
            ),
        ),
    ),
    "phi3": GgufFamily(
        "phi3",
        "Phi3ForCausalLM",
        names=_PHI3_NAMES,
        fields={"original_max_position_embeddings": "rope.scaling.original_context_length"},
        is_partly_rotated=True,
    ),
    "smollm3": GgufFamily("smollm3", "SmolLM3ForCausalLM", has_paired_rotation=True),
}
_MIXTRAL = GgufFamily(  # which a file calls llama, with experts
    "mixtral",
    "MixtralForCausalLM",
    has_paired_rotation=True,
    names={"ffn_gate_inp": "block_sparse_moe.gate"},
    experts=("block_sparse_moe.experts", "w1", "w3", "w2"),
)
_OLMO3 = GgufFamily(  # which a file calls olmo2, with a window
    "olmo3", "Olmo3ForCausalLM", names=_OUTPUT_NORMS, period=4, local_theta=0.0
)


def family_of(file: GgufFile) -> GgufFamily:
    """The row of a file. Raises ModelNotSupported, with all rows, without one."""
    if file.architecture == "llama" and file.field("expert_count", 0):
        return _MIXTRAL
    if file.architecture == "olmo2" and file.field("attention.sliding_window", 0):
        return _OLMO3
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise ModelNotSupported(
            f"{file.path} holds a model of the architecture {file.architecture!r}; GGUF files of "
            f"{', '.join(FAMILIES)} can be run"
        )
    return family
