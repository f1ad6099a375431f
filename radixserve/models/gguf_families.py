"""The families that GGUF files and the native decoder both know: a row each, of how a file's fields
and tensors become transformers'.

The conventions are those of llama.cpp's converter and of its readers, which know some constants
that no file holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from radixserve.errors import ModelNotSupported
from radixserve.gguf_file import GgufFile

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


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """What a general.architecture is in transformers."""

    model_type: str
    architecture: str
    has_paired_rotation: bool = False  # rows of q and k lie in pairs (2i, 2i + 1), not in halves
    names: Mapping[str, str] = field(default_factory=dict)  # of tensors, unlike those in _LAYER
    experts: tuple[str, str, str, str] = ("mlp.experts", "gate_proj", "up_proj", "down_proj")
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

    def tensor_name(self, name: str) -> str | None:
        """In transformers, of a layer's tensor in the file; None: it is not known."""
        return self.names.get(name, _LAYER.get(name))


_PHI3_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GPT_OSS_NAMES = {
    "attn_sinks": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "post_attention_norm": "post_attention_layernorm",
}
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
    """The row of a file. ModelNotSupported lists them where there is none."""
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
