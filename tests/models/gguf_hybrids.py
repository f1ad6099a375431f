"""Fields and layouts of GGUF files of hybrid models, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Config = Mapping[str, Any]
Tensors = dict[str, NDArray[Any]]


class Hybrid(NamedTuple):
    fields: Callable[[Config], dict[str, Any]]
    layouts: Callable[[Config, Tensors], Tensors]  # names stay transformers', or become the file's


def _delta_net_fields(config: Config) -> dict[str, Any]:
    values = config["linear_num_value_heads"]
    fields = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * config["linear_value_head_dim"],
        "full_attention_interval": 1 + config["layer_types"].index("full_attention"),
    }
    if "moe_intermediate_size" in config:
        fields["expert_feed_forward_length"] = config["moe_intermediate_size"]
        fields["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    if config["model_type"].startswith("qwen3_5"):
        fields["rope.dimension_sections"] = [1, 1, 0, 0]
    return fields


def _tiled(numbers: NDArray[Any], axis: int, config: Config, width: int) -> NDArray[Any]:
    """Value heads of each key head together -> the first of every key head, then the second."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    rows = np.moveaxis(numbers, axis, 0)
    rest = rows.shape[1:]
    rows = rows.reshape(keys, values // keys, width, *rest).swapaxes(0, 1)
    return np.moveaxis(rows.reshape(-1, *rest), 0, axis)


def _delta_net_layouts(config: Config, tensors: Tensors) -> Tensors:
    made: Tensors = {}
    v_dim = config["linear_value_head_dim"]
    first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    is_tiled = config["model_type"] != "qwen3_next"
    for name, numbers in tensors.items():
        stem = name.split("linear_attn.")[-1]
        if stem == "A_log":
            numbers = -np.exp(numbers)
        if stem == "conv1d.weight":
            numbers = numbers[:, 0]
        if stem == "in_proj_qkvz.weight":
            prefix = name.split(".linear_attn")[0].replace("model.layers", "blk")
            qkv, z = _ungrouped(config, numbers)
            made |= {f"{prefix}.attn_qkv.weight": qkv, f"{prefix}.attn_gate.weight": z}
            continue
        if is_tiled and stem in ("in_proj_qkv.weight", "conv1d.weight"):
            values = _tiled(numbers[first:], 0, config, v_dim)
            numbers = np.concatenate((numbers[:first], values))
        elif is_tiled and stem == "in_proj_z.weight":
            numbers = _tiled(numbers, 0, config, v_dim)
        elif is_tiled and stem in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            numbers = _tiled(numbers, 0, config, 1)
        elif is_tiled and stem == "out_proj.weight":
            numbers = _tiled(numbers, 1, config, v_dim)
        made[name.replace("dt_bias", "dt_proj.bias")] = numbers
    return made


def _ungrouped(config: Config, numbers: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Rows of q, k, v and z of each key head -> those of q, k and v of all, and those of z."""
    keys, k_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
    inner = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    ends = np.cumsum((k_dim, k_dim, inner))
    heads = numbers.reshape(keys, -1, numbers.shape[1])
    q, k, v, z = (part.reshape(-1, numbers.shape[1]) for part in np.split(heads, ends, axis=1))
    return np.concatenate((q, k, v)), z


def _lfm2_fields(config: Config) -> dict[str, Any]:
    heads = config["num_key_value_heads"]
    kinds = config["layer_types"]
    fields = {
        "attention.head_count_kv": [heads if kind != "conv" else 0 for kind in kinds],
        "shortconv.l_cache": config["conv_L_cache"],
        "vocab_size": config["vocab_size"],
    }
    if config["model_type"] == "lfm2_moe":
        return {
            **fields,
            "expert_feed_forward_length": config["moe_intermediate_size"],
            "leading_dense_block_count": config["num_dense_layers"],
            "expert_gating_func": 2,
        }
    size = 2 * config["intermediate_size"] // 3
    unit = config["block_multiple_of"]
    return {**fields, "feed_forward_length": -(-size // unit) * unit}


def _lfm2_layouts(config: Config, tensors: Tensors) -> Tensors:
    del config
    made: Tensors = {}
    for name, numbers in tensors.items():
        if ".experts." in name:
            name = name.removeprefix("model.")
        name = name.replace(".expert_bias", ".expert_bias.bias")
        made[name] = numbers[:, 0] if ".conv.conv." in name else numbers
    return made


_ATTENTION = ("attention", "full_attention")


def _mamba2_fields(config: Config) -> dict[str, Any]:
    """Of Granite, Falcon-H1 and Nemotron-H, whose configs name them in other ways."""
    heads = config.get("mamba_n_heads") or config["mamba_num_heads"]
    size = config.get("mamba_d_head") or config["mamba_head_dim"]
    fields = {
        "ssm.conv_kernel": config.get("mamba_d_conv") or config["conv_kernel"],
        "ssm.state_size": config.get("mamba_d_state") or config["ssm_state_size"],
        "ssm.group_count": config.get("mamba_n_groups") or config["n_groups"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * size,
        "vocab_size": config["vocab_size"],
    }
    kv = config["num_key_value_heads"]
    if config["model_type"] == "granitemoehybrid":
        kinds = config["layer_types"]
        fields["attention.head_count_kv"] = [kv if kind in _ATTENTION else 0 for kind in kinds]
        fields["rope.scaling.finetuned"] = False
        fields["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
    if config["model_type"] == "nemotron_h":
        kinds, size = config["layers_block_type"], config["intermediate_size"]
        fields["attention.head_count_kv"] = [kv if kind in _ATTENTION else 0 for kind in kinds]
        if "moe" in kinds:
            fields |= _nemotron_expert_fields(config)
            size = config["moe_intermediate_size"]
        has_mlp = ("moe",) if "moe" in kinds else ("mlp",)  # as the converter writes it
        fields["feed_forward_length"] = [size if kind in has_mlp else 0 for kind in kinds]
    return fields


def _nemotron_expert_fields(config: Config) -> dict[str, Any]:
    names = {
        "n_routed_experts": "expert_count",
        "n_shared_experts": "expert_shared_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "norm_topk_prob": "expert_weights_norm",
        "routed_scaling_factor": "expert_weights_scale",
        "n_group": "expert_group_count",
        "moe_latent_size": "moe_latent_size",
    }
    return {own: config[name] for name, own in names.items() if config.get(name) is not None}


def _nemotron_layouts(config: Config, tensors: Tensors) -> Tensors:
    """Experts' matrices in one tensor; they have no gate."""
    made: Tensors = {}
    count = config.get("n_routed_experts", 0)
    for name, numbers in _mamba2_layouts(config, tensors).items():
        prefix = "blk." + name.split(".")[2] if ".layers." in name else ""
        if ".experts.0." in name:
            each = [tensors[name.replace("experts.0.", f"experts.{i}.")] for i in range(count)]
            ending = "up" if "up_proj" in name else "down"
            made[f"{prefix}.ffn_{ending}_exps.weight"] = np.stack(each)
        elif name.endswith(".e_score_correction_bias"):
            made[f"{prefix}.exp_probs_b.bias"] = numbers
        elif ".experts." not in name:
            made[name] = numbers
    return made


def _mamba2_layouts(config: Config, tensors: Tensors) -> Tensors:
    groups = config.get("mamba_n_groups") or config["n_groups"]
    made: Tensors = {}
    for name, numbers in tensors.items():
        if name.endswith(".A_log"):
            numbers = -np.exp(numbers)
        if name.endswith((".A_log", ".D")):
            numbers = numbers[:, None]
        if name.endswith("conv1d.weight"):
            numbers = numbers[:, 0]
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            numbers = numbers.reshape(groups, -1)
        made[name.replace("dt_bias", "dt_proj.bias")] = numbers
    return made


def _granite_layouts(config: Config, tensors: Tensors) -> Tensors:
    made: Tensors = {}
    shared = "_shexp" if config["num_local_experts"] else ""
    for name, numbers in _mamba2_layouts(config, tensors).items():
        prefix = "blk." + name.split(".")[2] if ".layers." in name else ""
        ending = "_exps" if "block_sparse_moe" in name else shared
        if name.endswith(".input_linear.weight"):
            gate, up = np.split(numbers, 2, axis=-2)
            made[f"{prefix}.ffn_gate{ending}.weight"] = gate
            made[f"{prefix}.ffn_up{ending}.weight"] = up
        elif name.endswith(".output_linear.weight"):
            made[f"{prefix}.ffn_down{ending}.weight"] = numbers
        else:
            made[name] = numbers
    return made


def _falcon_layouts(config: Config, tensors: Tensors) -> Tensors:
    inner, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    gate, down = config["mlp_multipliers"]
    attention = config["attention_in_multiplier"]
    sizes = (inner, inner, states, states, config["mamba_n_heads"])
    rows = np.repeat(config["ssm_multipliers"], sizes)[:, None]
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config["key_multiplier"] * attention,
        "q_proj": attention,
        "v_proj": attention,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"] * rows,
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    return {
        name: (numbers * factors.get(name.split(".")[-2], 1.0)).astype(np.float32)
        for name, numbers in _mamba2_layouts(config, tensors).items()
    }


def _gemma4_fields(config: Config) -> dict[str, Any]:
    is_sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    heads = config["num_key_value_heads"]
    other = config["per_layer_config"][str(is_sliding.index(False))]  # of layers that see all
    full = other.get("num_key_value_heads", heads)
    fields = {
        "attention.key_length": other["head_dim"],
        "attention.value_length": other["head_dim"],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.head_count_kv": [heads if sliding else full for sliding in is_sliding],
        "attention.sliding_window_pattern": is_sliding,
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "rope.dimension_count": other["head_dim"],
        "rope.dimension_count_swa": config["head_dim"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
    }
    if config["enable_moe_block"]:
        fields["expert_used_count"] = config["top_k_experts"]
        fields["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return fields


_GEMMA4_NAMES = {
    "experts.down_proj": "ffn_down_exps.weight",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "router.scale": "ffn_gate_inp.scale",
}


def _gemma4_layouts(config: Config, tensors: Tensors) -> Tensors:
    made: Tensors = {}
    for name, numbers in tensors.items():
        ending = next((end for end in _GEMMA4_NAMES if name.endswith(f".{end}")), None)
        if ending is not None:
            name = f"blk.{name.split('.')[2]}.{_GEMMA4_NAMES[ending]}"
        made[name] = numbers
    rope = config["rope_parameters"]["full_attention"]
    full = config["layer_types"].index("full_attention")
    half = config["per_layer_config"][str(full)]["head_dim"] // 2
    turned = int(half * rope.get("partial_rotary_factor", 1.0))
    made["rope_freqs.weight"] = np.array([1.0] * turned + [1e30] * (half - turned), np.float32)
    return made


_SIZES: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
_GRANITE: dict[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "shared_intermediate_size": 80,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.7,
    "embedding_multiplier": 3.0,
}
_NEMOTRON: dict[str, Any] = {
    **_SIZES,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
}
_NEMOTRON_EXPERTS: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 96,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {  # class and fields of tiny models
    "falcon_h1": (
        "FalconH1Config",
        {
            **_SIZES,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 1.2,
            "key_multiplier": 0.8,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [1.3, 0.7],
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {**_GRANITE, "intermediate_size": 80, "num_local_experts": 0},
    ),
    "granite_hybrid_moe": (
        "GraniteMoeHybridConfig",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {**_NEMOTRON, "layers_block_type": ["linear_attention", "full_attention", "mlp"]},
    ),
    "nemotron_h_moe": ("NemotronHConfig", {**_NEMOTRON, **_NEMOTRON_EXPERTS}),
    "nemotron_h_latent": (
        "NemotronHConfig",
        {**_NEMOTRON, **_NEMOTRON_EXPERTS, "moe_latent_size": 32},
    ),
}

_DELTA_NET = Hybrid(_delta_net_fields, _delta_net_layouts)
_LFM2 = Hybrid(_lfm2_fields, _lfm2_layouts)
HYBRIDS = {  # by model type
    "falcon_h1": Hybrid(_mamba2_fields, _falcon_layouts),
    "gemma4_text": Hybrid(_gemma4_fields, _gemma4_layouts),
    "granitemoehybrid": Hybrid(_mamba2_fields, _granite_layouts),
    "nemotron_h": Hybrid(_mamba2_fields, _nemotron_layouts),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "qwen3_5_moe_text": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_next": _DELTA_NET,
}
