"""Layouts of GGUF files that differ from transformers', and the config fields of their families.

The conventions are those of llama.cpp's converter: decays as -exp(A_log); convolutions [C, kernel];
of Qwen 3.5 the value heads of a delta net in tiles, the first of every key head, then the second.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixserve.gguf_file import GgufFile
from radixserve_kernels.quantized import (
    BLOCK,
    AnyWeight,
    QuantizedTensor,
    dense,
    select_rows,
    to_int8,
)


def as_stored(_file: GgufFile, _name: str, weight: AnyWeight) -> AnyWeight:
    """A tensor that has the layout of transformers."""
    return weight


def restore_short_conv(_file: GgufFile, name: str, weight: AnyWeight) -> AnyWeight:
    """A tensor of LFM2; `name` without the layer: "shortconv.conv.weight"."""
    return dense(weight)[:, None] if name == "shortconv.conv.weight" else weight


def restore_delta_net(_file: GgufFile, name: str, weight: AnyWeight) -> AnyWeight:
    """A tensor of Qwen3-Next, whose value heads lie as in transformers."""
    if name == "ssm_a":
        return dense(weight).neg().log()
    return dense(weight)[:, None] if name == "ssm_conv1d.weight" else weight


def restore_mamba2(_file: GgufFile, name: str, weight: AnyWeight) -> AnyWeight:
    """A tensor of a model with Mamba-2 layers."""
    if name == "ssm_conv1d.weight":
        return dense(weight)[:, None]
    if name not in ("ssm_a", "ssm_d", "ssm_norm.weight"):
        return weight
    flat = dense(weight).flatten()
    return flat.neg().log() if name == "ssm_a" else flat


def restore_tiled_delta_net(file: GgufFile, name: str, weight: AnyWeight) -> AnyWeight:
    """A tensor of Qwen 3.5 with its value heads beside those of the same key head."""
    weight = restore_delta_net(file, name, weight)
    keys, values, k_dim, v_dim = _delta_net_sizes(file)
    stem = name.split(".")[0]
    width = {"ssm_beta": 1, "ssm_alpha": 1, "ssm_a": 1, "ssm_dt": 1}.get(stem, v_dim)
    order = torch.arange(values).view(-1, keys).T.reshape(-1, 1) * width + torch.arange(width)
    rows = order.flatten()
    if stem in ("attn_qkv", "ssm_conv1d"):
        first = 2 * keys * k_dim
        return select_rows(weight, torch.cat((torch.arange(first), first + rows)))
    if stem in ("attn_gate", "ssm_beta", "ssm_alpha", "ssm_a", "ssm_dt"):
        return select_rows(weight, rows)
    return _select_columns(weight, rows, width) if stem == "ssm_out" else weight


def group_delta_net_rows(file: GgufFile, weight: AnyWeight) -> AnyWeight:
    """Rows of q, k, v and z with those of a key head together, as Qwen3-Next's checkpoints."""
    keys, values, k_dim, v_dim = _delta_net_sizes(file)
    sizes = keys * k_dim, keys * k_dim, values * v_dim, values * v_dim
    parts = [rows.view(keys, -1) for rows in torch.arange(sum(sizes)).split(sizes)]
    return select_rows(weight, torch.cat(parts, 1).flatten())


def _delta_net_sizes(file: GgufFile) -> tuple[int, int, int, int]:
    """Key heads, value heads and their sizes."""
    keys, values = file.field("ssm.group_count"), file.field("ssm.time_step_rank")
    return keys, values, file.field("ssm.state_size"), file.field("ssm.inner_size") // values


def _select_columns(weight: AnyWeight, columns: Tensor, width: int) -> AnyWeight:
    """The columns, of which runs of `width` stay together; rounded to 8 bits where these are no
    whole blocks of a quantised weight."""
    if isinstance(weight, Tensor):
        return weight[:, columns]
    if width % BLOCK:
        return to_int8(weight.dequantize()[:, columns])
    blocks = columns[::BLOCK] // BLOCK
    numbers, *others = weight.parts
    return QuantizedTensor.of_parts(
        (numbers[:, columns], *(None if part is None else part[:, blocks] for part in others))
    )


# -- fields of configs ----------------------------------------------------------------------------


def _delta_net_fields(file: GgufFile) -> dict[str, Any]:
    keys, values, k_dim, v_dim = _delta_net_sizes(file)
    period = file.field("full_attention_interval", 4)
    kinds = ("linear_attention", "full_attention")
    return {
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": k_dim,
        "linear_value_head_dim": v_dim,
        "linear_conv_kernel_dim": file.field("ssm.conv_kernel"),
        "layer_types": [kinds[not (i + 1) % period] for i in range(file.num_layers)],
        "num_experts": file.field("expert_count", 0),
        "attn_output_gate": True,
    }


def qwen3_next_fields(file: GgufFile) -> dict[str, Any]:
    """Fields of a Qwen3NextConfig."""
    dense_layers = [
        i for i in range(file.num_layers) if f"blk.{i}.ffn_gate_inp.weight" not in file.tensors
    ]
    fields = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": dense_layers}
    return {**_delta_net_fields(file), **fields}


def qwen3_5_fields(file: GgufFile) -> dict[str, Any]:
    """Fields of a Qwen3_5TextConfig or Qwen3_5MoeTextConfig."""
    return _delta_net_fields(file)


def lfm2_fields(file: GgufFile) -> dict[str, Any]:
    """Fields of an Lfm2Config or Lfm2MoeConfig."""
    heads = file.field("attention.head_count_kv")
    fields = {
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": file.field("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }
    if not file.field("expert_count", 0):
        return fields
    return {
        **fields,
        "num_experts": file.field("expert_count"),
        "num_dense_layers": file.field("leading_dense_block_count", 0),
        "norm_topk_prob": True,
        "use_expert_bias": True,
    }


def gemma4_fields(file: GgufFile) -> dict[str, Any]:
    """Fields of a Gemma4TextConfig."""
    is_sliding = file.field("attention.sliding_window_pattern")
    shared = file.field("attention.shared_kv_layers", 0)
    kv_heads = file.field("attention.head_count_kv")
    kv_heads = kv_heads if isinstance(kv_heads, list) else [kv_heads] * file.num_layers
    first_full = next((i for i, sliding in enumerate(is_sliding) if not sliding), None)
    own_kv = [f"blk.{i}.attn_k.weight" in file.tensors for i in range(file.num_layers)]
    has_values = [f"blk.{i}.attn_v.weight" in file.tensors for i in range(file.num_layers)]
    lengths = file.field("feed_forward_length")
    lengths = lengths if isinstance(lengths, list) else [lengths]
    theta = float(file.field("rope.freq_base", 1e6))
    turned = file.read("rope_freqs.weight") == 1 if "rope_freqs.weight" in file.tensors else [True]
    embedding = file.tensors.get("per_layer_token_embd.weight")
    fields = {
        "head_dim": file.field("attention.key_length_swa"),
        "global_head_dim": file.field("attention.key_length"),
        "num_key_value_heads": kv_heads[is_sliding.index(True)],
        "num_global_key_value_heads": None if first_full is None else kv_heads[first_full],
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": any(k and not v for k, v in zip(own_kv, has_values, strict=True)),
        "intermediate_size": min(lengths),
        "use_double_wide_mlp": min(lengths) != max(lengths),
        "hidden_size_per_layer_input": file.field("embedding_length_per_layer_input", 0),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": theta,
                "partial_rotary_factor": float(sum(turned) / len(turned)),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": float(file.field("rope.freq_base_swa", 1e4)),
            },
        },
    }
    if embedding is not None:
        fields["vocab_size_per_layer_input"] = embedding.shape[0]
    if count := file.field("expert_count", 0):
        top_k = file.field("expert_used_count")
        fields |= {"enable_moe_block": True, "num_experts": count, "top_k_experts": top_k}
    return fields


def granite_hybrid_fields(file: GgufFile) -> dict[str, Any]:
    """Fields of a GraniteMoeHybridConfig."""
    heads = file.field("attention.head_count_kv")
    names = ("ffn_down_shexp", "ffn_down")
    shared = next(
        file.tensors[own] for name in names if (own := f"blk.0.{name}.weight") in file.tensors
    )
    return {
        **_mamba2_fields(file),
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "mamba_expand": file.field("ssm.inner_size") // file.field("embedding_length"),
        "shared_intermediate_size": shared.shape[1],
        "num_local_experts": file.field("expert_count", 0),
        "num_experts_per_tok": file.field("expert_used_count", 0),
        "position_embedding_type": "rope" if file.field("rope.scaling.finetuned") else "nope",
    }


def falcon_h1_fields(file: GgufFile) -> dict[str, Any]:
    """Fields of a FalconH1Config; a file's weights are multiplied by its factors already."""
    names = ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
    return {
        **_mamba2_fields(file),
        **{f"{name}_multiplier": 1.0 for name in names},
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
        "mamba_d_ssm": file.field("ssm.inner_size"),
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,
    }


def nemotron_h_fields(file: GgufFile) -> dict[str, Any]:
    """Fields of a NemotronHConfig, dense or with experts."""
    mamba = _mamba2_fields(file)
    names = (f"blk.{layer}.ffn_up.weight" for layer in range(file.num_layers))
    lengths = [file.tensors[name].shape[0] for name in names if name in file.tensors]
    fields = {
        "intermediate_size": max(lengths, default=file.largest("feed_forward_length")),
        "layers_block_type": [_nemotron_kind(file, layer) for layer in range(file.num_layers)],
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
    }
    if not (count := file.field("expert_count", 0)):
        return fields
    return {
        **fields,
        "n_routed_experts": count,
        "moe_shared_expert_intermediate_size": file.field("expert_shared_feed_forward_length"),
        "moe_latent_size": file.field("moe_latent_size"),
        "norm_topk_prob": file.field("expert_weights_norm", True),
        "routed_scaling_factor": float(file.field("expert_weights_scale", 1.0)),
        "n_group": file.field("expert_group_count", 1),
        "topk_group": file.field("expert_group_used_count", 1),
    }


def _nemotron_kind(file: GgufFile, layer: int) -> str:
    """By the layer's tensors: lengths in fields do not tell experts from an MLP."""
    kinds = {"attn_q": "full_attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    names = (name for name in kinds if f"blk.{layer}.{name}.weight" in file.tensors)
    return kinds.get(next(names, ""), "linear_attention")


def _mamba2_fields(file: GgufFile) -> dict[str, Any]:
    heads = file.field("ssm.time_step_rank")
    has_bias = any(own.endswith(".ssm_conv1d.bias") for own in file.tensors)
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": file.field("ssm.inner_size") // heads,
        "mamba_n_groups": file.field("ssm.group_count"),
        "mamba_d_state": file.field("ssm.state_size"),
        "mamba_d_conv": file.field("ssm.conv_kernel"),
        "mamba_conv_bias": has_bias,
    }
