"""Tiny GGUF files, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path

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
) -> Path:
    """Convert a tiny checkpoint of llama, qwen2 or qwen3 into `path`.

    kind: a name of gguf.GGMLQuantizationType, of all matrices. rope_factors: [D / 2], as Llama 3.1
    files have them. num_layers: what the file says of itself.
    """
    config = json.loads((folder / "config.json").read_text())
    name, num_heads = config["model_type"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    writer = gguf.GGUFWriter(path, name)
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
        {n: k for k, n in gguf.MODEL_ARCH_NAMES.items()}[name], config["num_hidden_layers"]
    )
    for theirs, numbers in load_file(folder / "model.safetensors").items():
        own = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        numbers = numbers.astype(np.float32)
        if name == "llama" and ("q_proj" in theirs or "k_proj" in theirs):
            count = num_heads if "q_proj" in theirs else config["num_key_value_heads"]
            numbers = _to_pairs(numbers, count)
        quantised = gguf.GGMLQuantizationType[kind if numbers.ndim > 1 else "F32"]
        writer.add_tensor(own, gguf.quants.quantize(numbers, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


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
