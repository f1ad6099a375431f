"""The memory of a token's K/V, by a model's config.json alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from radixserve.checks import check_choice, shown
from radixserve.config import CHOICES
from radixserve.errors import InvalidRequest

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_ATTENDING = ("full_attention", "sliding_attention", "chunked_attention", "attention", "hybrid")


def kv_bytes_per_token(path: str | os.PathLike[str], kv_dtype: str = "auto") -> int:
    """The bytes of one token's K/V: the sum of 2 x K/V heads x head_dim x size over the layers that
    store some.

    With latent attention (kv_lora_rank): layers x (rank + rope part) x size.

    path      a checkpoint folder or its config.json
    kv_dtype  as in EngineConfig; in "int8", each head has a scale of 2 bytes

    Raises InvalidRequest for a config without these numbers, OSError for a file that cannot be
    read.
    """
    check_choice("--kv-dtype", kv_dtype, CHOICES["kv_dtype"])
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{file}: not a JSON file: {error}") from None
    if not isinstance(config, dict):
        raise InvalidRequest(f"{file}: a model config must be a JSON object, got {shown(config)}")
    text_config = config.get("text_config")
    config |= text_config if isinstance(text_config, dict) else {}
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = dtype.removeprefix("torch.")
    if dtype not in _DTYPE_BYTES:
        raise InvalidRequest(f"{file}: dtype must be one of {', '.join(_DTYPE_BYTES)}, got {dtype}")

    fields = _Fields(file, config)
    size, scale = _DTYPE_BYTES[dtype], 0
    if kv_dtype != "auto":
        size, scale = {"bfloat16": (2, 0), "int8": (1, 2), "fp8_e4m3": (1, 0)}[kv_dtype]
    num_layers = fields.count("num_hidden_layers", "n_layer")
    if config.get("kv_lora_rank"):
        numbers = fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim")
        return num_layers * (size * numbers + scale)
    types = _types_of_layers(config, num_layers)
    shared = config.get("num_kv_shared_layers") or 0
    heads = [
        _heads(fields.of_layer(layer), kind)
        for layer, kind in enumerate(types[: len(types) - shared])
        if kind in _ATTENDING
    ]
    if not heads:
        raise InvalidRequest(f"{file}: no layer has attention")
    return 2 * sum(kv_heads * (size * head_dim + scale) for kv_heads, head_dim in heads)


class _Fields:
    """The fields of a config.json."""

    def __init__(self, file: Path, config: dict[str, Any]) -> None:
        self.config = config
        self._file = file

    def count(self, *names: str) -> int:
        """The first of these fields that is a positive integer. Raises InvalidRequest."""
        for value in map(self.config.get, names):
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        message = f"{self._file}: {' or '.join(names)} is missing or not a positive number"
        raise InvalidRequest(message)

    def of_layer(self, layer: int) -> _Fields:
        """With what `per_layer_config` says of a layer."""
        own = (self.config.get("per_layer_config") or {}).get(str(layer))
        return _Fields(self._file, self.config | own) if own else self


def _types_of_layers(config: dict[str, Any], num_layers: int) -> list[str]:
    """As `layer_types` has them; those of a model that does not say attend."""
    for name in ("layer_types", "layers_block_type"):
        if isinstance(types := config.get(name), list):
            return [str(kind) for kind in types]
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):
        return ["attention" if letter == "*" else "" for letter in pattern]
    for name in ("full_attn_idxs", "attn_layer_indices"):
        if isinstance(attending := config.get(name), list):
            return ["attention" if layer in attending else "" for layer in range(num_layers)]
    if interval := config.get("full_attention_interval"):
        return ["" if layer % interval else "attention" for layer in range(1, num_layers + 1)]
    return ["attention"] * num_layers


def _heads(fields: _Fields, kind: str) -> tuple[int, int]:
    """K/V heads and their features of a layer of this type. Gemma 4 has others in layers that see
    all positions."""
    config, count = fields.config, fields.count
    heads = count("num_attention_heads", "n_head")
    kv_heads = count("num_key_value_heads") if config.get("num_key_value_heads") else heads
    if config.get("head_dim"):
        head_dim = count("head_dim")
    else:
        head_dim = count("hidden_size", "n_embd") // heads
    if kind == "full_attention" and config.get("global_head_dim"):
        head_dim = count("global_head_dim")
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            kv_heads = count("num_global_key_value_heads")
    return kv_heads, head_dim
