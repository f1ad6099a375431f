"""How much memory a token's K/V takes, from a model's config.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from radixserve.checks import shown
from radixserve.errors import InvalidRequest

DEFAULT_KV_BYTES = 131_072  # Llama-3-8B in bfloat16: 2 x 32 layers x 8 heads x 128 x 2 bytes
GIB = 1 << 30
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def kv_bytes_per_token(path: str | os.PathLike[str]) -> int:
    """Bytes of one token's keys and values in all layers: 2 x layers x K/V heads x head_dim x size.

    `path`: a checkpoint folder or its config.json. With latent attention (kv_lora_rank): layers x
    (rank + rope part) x size. Raises InvalidRequest for a config that does not say, OSError for one
    that cannot be read.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequest(f"{file}: not a JSON file: {error}") from None
    if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
        config = {**config, **config["text_config"]}
    if not isinstance(config, dict):
        raise InvalidRequest(f"{file}: a model config must be a JSON object, got {shown(config)}")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix(
        "torch."
    )
    if dtype not in _DTYPE_BYTES:
        raise InvalidRequest(f"{file}: dtype must be one of {', '.join(_DTYPE_BYTES)}, got {dtype}")
    layers = _count(file, config, "num_hidden_layers", "n_layer")
    if config.get("kv_lora_rank"):
        width = _count(file, config, "kv_lora_rank") + _count(file, config, "qk_rope_head_dim")
        return layers * width * _DTYPE_BYTES[dtype]
    heads = _count(file, config, "num_attention_heads", "n_head")
    kv_heads = (
        _count(file, config, "num_key_value_heads") if config.get("num_key_value_heads") else heads
    )
    if config.get("head_dim"):
        head_dim = _count(file, config, "head_dim")
    else:
        head_dim = _count(file, config, "hidden_size", "n_embd") // heads
    return 2 * layers * kv_heads * head_dim * _DTYPE_BYTES[dtype]


def _count(file: Path, config: dict[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise InvalidRequest(f"{file}: {' or '.join(names)} is missing or no positive number")
