"""Tiny GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

CONTROL, NORMAL = 3, 1  # tokenizer.ggml.token_type


def write_gguf(
    path: Path,
    folder: Path,
    kind: str = "F32",
    *,
    pre: str = "gpt-2",
    rope_factors: NDArray[np.float32] | None = None,
    num_layers: int | None = None,
    kinds: Mapping[str, str] | None = None,
) -> Path:
    """Convert a tiny checkpoint of llama, mixtral, qwen2, qwen3 or qwen3_moe into `path`.

    kind: a name of gguf.GGMLQuantizationType, of all matrices; those that the gguf package cannot
    make are of random bytes. kinds: of matrices whose name in the file contains a key.
    rope_factors: [D / 2], as Llama 3.1 files have them. num_layers: what the file says of itself.
    """
    config = json.loads((folder / "config.json").read_text())
    name, num_heads = config["model_type"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    arch = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}.get(name, name)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(num_layers or config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if (folder / "tokenizer.json").is_file():
        _add_tokenizer(writer, folder, pre, config["vocab_size"])
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    names = gguf.get_tensor_name_map(
        {n: k for k, n in gguf.MODEL_ARCH_NAMES.items()}[arch], config["num_hidden_layers"]
    )
    if (num_experts := config.get("num_local_experts", config.get("num_experts"))) is not None:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    for theirs, numbers in _experts_together(load_file(folder / "model.safetensors")).items():
        own = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        numbers = numbers.astype(np.float32)
        if arch == "llama" and ("q_proj" in theirs or "k_proj" in theirs):
            count = num_heads if "q_proj" in theirs else config["num_key_value_heads"]
            numbers = _to_pairs(numbers, count)
        found = [some for part, some in (kinds or {}).items() if part in own]
        chosen = (found or [kind])[0] if numbers.ndim > 1 else "F32"
        raw = stored(numbers, chosen)
        writer.add_tensor(own, raw, raw_dtype=gguf.GGMLQuantizationType[chosen])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _experts_together(tensors: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Experts' matrices in one tensor [E, N, K], without the number in its name."""
    found: dict[str, NDArray[Any]] = {}
    for name, numbers in tensors.items():
        if ".experts." not in name:
            found[name] = numbers
        elif ".experts.0." in name:
            count = sum(1 for one in tensors if one.startswith(name.split("experts.")[0] + "exp"))
            each = [tensors[name.replace("experts.0.", f"experts.{i}.")] for i in range(count // 3)]
            found[name.replace("experts.0.", "experts.")] = np.stack(each)
    return found


_SCALES = {  # of types that cannot be made: where a block's float16 lie, and what they are
    "Q2_K": {80: 4e-3, 82: 6e-3},
    "Q3_K": {108: 1e-3},
    "Q4_K": {0: 4e-4, 2: 3e-3},
    "Q5_K": {0: 2e-4, 2: 3e-3},
    "Q6_K": {208: 4e-5},
    "IQ4_NL": {0: 1e-3},
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
