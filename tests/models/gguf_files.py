"""Tiny GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.models.gguf_hybrids import HYBRIDS

CONTROL, NORMAL = 3, 1  # tokenizer.ggml.token_type


def write_gguf(
    path: Path,
    folder: Path,
    kind: str = "F32",
    *,
    pre: str = "gpt-2",
    rope_factors: NDArray[np.float32] | None = None,
    num_layers: int | None = None,
    num_draft_layers: int = 0,
    has_gate_up: bool = False,
    kinds: Mapping[str, str] | None = None,
) -> Path:
    """Convert a tiny checkpoint of one of the format's families into `path`.

    kind: a name of gguf.GGMLQuantizationType, of all matrices; those that the gguf package cannot
    make are of random bytes. kinds: of matrices whose name in the file contains a key.
    rope_factors: [D / 2], as Llama 3.1 files have them. num_layers: what the file says of itself.
    num_draft_layers: that many more at the end, which draft tokens. has_gate_up: experts have both
    in one tensor.
    """
    config = json.loads((folder / "config.json").read_text())
    name, num_heads = config["model_type"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    arch = _ARCHITECTURES.get(name, name)
    if name == "nemotron_h" and "moe" in config["layers_block_type"]:
        arch = "nemotron_h_moe"
    ropes = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": 1e4}
    rope = ropes.get("full_attention", ropes)
    writer = gguf.GGUFWriter(path, arch)
    block_types = config.get("layers_block_type", ())
    count = num_layers or config.get("num_hidden_layers", len(block_types))
    writer.add_block_count(count + num_draft_layers)
    if num_draft_layers:
        writer.add_nextn_predict_layers(num_draft_layers)
    for layer in range(count, count + num_draft_layers):
        for own in ("attn_norm", "nextn.eh_proj"):
            writer.add_tensor(f"blk.{layer}.{own}.weight", np.ones((4, 32), np.float32))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for factors in ("short", "long"):
        if numbers := rope.get(f"{factors}_factor"):
            writer.add_tensor(f"rope_factors_{factors}.weight", np.array(numbers, np.float32))
    hybrid = HYBRIDS.get(name)
    own_fields = {} if hybrid is None else hybrid.fields(config)
    for field, own in _FIELDS.items():
        if arch == "nemotron_h" and own == "expert_used_count":
            continue  # a dense one has no experts, whatever the config says
        if (value := config.get(field)) is not None and own not in own_fields:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{arch}.{own}", value)
    for own, value in own_fields.items():
        if isinstance(value, list):
            writer.add_array(f"{arch}.{own}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"{arch}.{own}", value)
        else:
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{arch}.{own}", value)
    if name in ("exaone4", "olmo3"):
        is_sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(is_sliding)
    if (folder / "tokenizer.json").is_file():
        _add_tokenizer(writer, folder, pre, config["vocab_size"])
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    names = gguf.get_tensor_name_map({n: k for k, n in gguf.MODEL_ARCH_NAMES.items()}[arch], count)
    tensors = load_file(folder / "model.safetensors")
    if hybrid is not None:
        tensors = hybrid.layouts(config, tensors)
    tensors = _as_in_files(tensors)
    for name_of_gate in [name for name in tensors if has_gate_up and "experts.gate_proj" in name]:
        both = [tensors.pop(name_of_gate.replace("gate", kind)) for kind in ("gate", "up")]
        own = f"blk.{name_of_gate.split('.')[2]}.ffn_gate_up_exps.weight"
        tensors[own] = np.concatenate(both, axis=1)
    for theirs, numbers in tensors.items():
        own = names.get_name(theirs, try_suffixes=(".weight", ".bias")) or theirs
        numbers = numbers.astype(np.float32)
        if name in _PAIRED and ("q_proj" in theirs or "k_proj" in theirs):
            count = num_heads if "q_proj" in theirs else config["num_key_value_heads"]
            numbers = _to_pairs(numbers, count)
        has_offset = name.startswith(("gemma", "qwen3_next", "qwen3_5")) and name != "gemma4_text"
        if has_offset and own.endswith("norm.weight") and "ssm_norm" not in own:
            numbers = numbers + 1
        found = [some for part, some in (kinds or {}).items() if part in own]
        is_matrix = numbers.ndim > 1 and own.endswith("weight") and "norm" not in own
        is_matrix = is_matrix and "conv" not in own.split(".")[-2]
        chosen = (found or [kind])[0] if is_matrix else "F32"
        raw = stored(numbers, chosen)
        writer.add_tensor(own, raw, raw_dtype=gguf.GGMLQuantizationType[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_ARCHITECTURES = {
    "cohere": "command-r",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "falcon_h1": "falcon-h1",
    "gemma4_text": "gemma4",
    "granitemoehybrid": "granitehybrid",
    "lfm2_moe": "lfm2moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
_PAIRED = ("granite", "granitemoehybrid", "llama", "mixtral", "smollm3")
_FIELDS = {  # of config.json -> of the file
    "max_position_embeddings": "context_length",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logit_scale",
    "logits_scaling": "logit_scale",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
}


def _as_in_files(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Experts' matrices in one tensor [E, N, K], without the number in its name; gate and up apart;
    no axis of one row."""
    found: dict[str, NDArray[Any]] = {}
    for name, numbers in tensors.items():
        if ".experts.0." in name:
            count = sum(1 for one in tensors if one.startswith(name.split("experts.")[0] + "exp"))
            each = [tensors[name.replace("experts.0.", f"experts.{i}.")] for i in range(count // 3)]
            found[name.replace("experts.0.", "experts.")] = np.stack(each)
        elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[f"{name}.weight"] = numbers.swapaxes(1, 2)
        elif ".experts." not in name or name.endswith("_bias"):
            name = f"{name}.weight" if name.endswith("sinks") else re.sub("_bias$", ".bias", name)
            found[name] = numbers[0] if "shared_expert_gate" in name else numbers
    for name in [name for name in found if ".experts.gate_up_proj." in name]:
        both = found.pop(name)
        found[name.replace("gate_up", "gate")] = np.ascontiguousarray(both[:, ::2])
        found[name.replace("gate_up", "up")] = np.ascontiguousarray(both[:, 1::2])
    return found


_SCALES = {  # of types that cannot be made: where a block's float16 lie, and what they are
    "Q2_K": {80: 4e-3, 82: 6e-3},
    "Q3_K": {108: 1e-3},
    "Q4_K": {0: 4e-4, 2: 3e-3},
    "Q5_K": {0: 2e-4, 2: 3e-3},
    "Q6_K": {208: 4e-5},
    "IQ4_NL": {0: 1e-3},
    "IQ4_XS": {0: 3e-5},
}


def stored(numbers: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """A matrix [N, K] as a file of that kind holds it; of types in _SCALES anything of its size."""
    quantised = gguf.GGMLQuantizationType[kind]
    if numbers.ndim == 3:
        return np.stack([stored(one, kind) for one in numbers])
    if kind not in _SCALES:
        return gguf.quants.quantize(numbers, quantised)
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantised]
    rng = np.random.default_rng(numbers.size)
    shape = (len(numbers), numbers.shape[1] // block, block_bytes)
    raw = rng.integers(0, 256, shape, np.uint8)
    for at, scale in _SCALES[kind].items():
        values = (scale * rng.uniform(0.5, 1.5, shape[:2])).astype(np.float16)
        raw[..., at : at + 2] = values[..., None].view(np.uint8)
    return raw.reshape(len(numbers), -1)


def _to_pairs(numbers: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    halves = numbers.reshape(num_heads, 2, -1, *numbers.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(numbers.shape))


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, pre: str, vocab_size: int) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = {token_id: token for token, token_id in tokenizer["model"]["vocab"].items()}
    special = {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    tokens = [{**ids, **special}.get(i, f"<|unused {i}|>") for i in range(vocab_size)]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = folder / "chat_template.jinja"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL if i in ids else CONTROL for i in range(vocab_size)])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(tokens.index(settings["eos_token"]))
    writer.add_bos_token_id(tokens.index(settings["bos_token"]))
    if template.is_file():
        writer.add_chat_template(template.read_text())
