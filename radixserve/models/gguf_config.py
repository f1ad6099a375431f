"""The config of a model in a GGUF file, from the file's fields and its family's row."""

from __future__ import annotations

from typing import Any

from radixserve.errors import ModelNotSupported
from radixserve.gguf_file import GgufFile, GgufTensor
from radixserve.models.decoder_config import READ_HERE, read_decoder_config
from radixserve.models.gguf_families import GgufFamily, family_of
from radixserve.models.stated_sizes import check_fields, refusing

EMBEDDING = "token_embd.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"  # [R / 2]


def gguf_config(file: GgufFile) -> Any:
    """The config of a GGUF file: a DecoderConfig, or of other families transformers' own.

    ModelNotSupported names what cannot be run.
    """
    family = family_of(file)
    prefix = f"{file.architecture}."
    own = {
        name.removeprefix(prefix): x for name, x in file.fields.items() if name.startswith(prefix)
    }
    check_fields(file.path, own, {name: tensor.shape for name, tensor in file.tensors.items()})
    with refusing(f"{file.path}: a field of {file.architecture} is missing or wrong"):
        return _read_config(file, family)


def _read_config(file: GgufFile, family: GgufFamily) -> Any:
    is_layer_norm = family.eps.startswith("layer_norm_eps")
    eps = f"attention.layer_norm_{'' if is_layer_norm else 'rms_'}epsilon"
    if family.eps == "layer_norm_epsilon" and file.field(eps) is None:
        eps = "attention.layer_norm_rms_epsilon"  # files of Nemotron-H have either or both
    names = {
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "max_position_embeddings": "context_length",
        family.eps: eps,
    }
    if not file.largest("feed_forward_length"):
        names["intermediate_size"] = "expert_feed_forward_length"
    required = ("block_count", *names.values())
    missing = [key for key in required if not _is_positive(file.largest(key))]
    if missing:
        raise ModelNotSupported(f"{file.path}: {', '.join(missing)} missing or no positive number")
    if EMBEDDING not in file.tensors:
        raise ModelNotSupported(f"{file.path}: missing tensor {EMBEDDING}")
    numbers = {ours: file.largest(key) for ours, key in names.items()}
    numbers["num_hidden_layers"] = file.num_layers
    num_heads = numbers["num_attention_heads"]
    head_dim = file.field("attention.key_length", numbers["hidden_size"] // num_heads)
    if file.field("attention.value_length", head_dim) != head_dim:
        raise ModelNotSupported(f"{file.path}: keys and values have different head sizes")
    rotary_dim = file.field("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not family.is_partly_rotated:
        raise ModelNotSupported(f"{file.path}: rotary embedding of part of a head")
    rope = _rope_parameters(file)
    if family.is_partly_rotated:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    if family.local_theta is not None:
        theta = file.field("rope.freq_base_swa", family.local_theta or rope["rope_theta"])
        local = {"rope_type": "default", "rope_theta": float(theta)}
        rope = {"full_attention": rope, "sliding_attention": local}
    fields = {
        **numbers,
        family.eps: float(numbers[family.eps]),
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "head_dim": head_dim,
        "num_key_value_heads": file.largest("attention.head_count_kv", num_heads),
        "rope_parameters": rope,
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        **_window_fields(file, family),
        **_scale_fields(file, family),
        **_expert_fields(file),
        **family.constants,
        **{ours: value for ours, key in family.fields.items() if (value := file.field(key))},
        **family.more_fields(file),
        "eos_token_id": file.fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": None,
        "dtype": {0: "float32", 1: "float16"}.get(file.tensors[EMBEDDING].type_id, "bfloat16"),
    }
    return _config_of(file, fields)


def _config_of(file: GgufFile, fields: dict[str, Any]) -> Any:
    if fields["model_type"] not in READ_HERE:
        from transformers import AutoConfig

        try:
            return AutoConfig.for_model(**fields)
        except Exception as error:
            raise ModelNotSupported(f"{file.path}: its fields make no config: {error}") from error
    config = read_decoder_config(fields)
    if config is None:
        raise ModelNotSupported(f"{file.path}: a size in its fields is not a positive integer")
    return config


def _window_fields(file: GgufFile, family: GgufFamily) -> dict[str, Any]:
    window = file.field("attention.sliding_window", family.window) or None
    if family.period is None:
        return {"sliding_window": window}
    count, pattern = file.field("block_count"), file.field("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = pattern or family.period
        pattern = [bool((layer + 1) % period) for layer in range(count)]
    kinds = ("full_attention", "sliding_attention")
    types = [kinds[bool(is_sliding) and window is not None] for is_sliding in pattern[:count]]
    return {"sliding_window": window, "layer_types": types}


def _scale_fields(file: GgufFile, family: GgufFamily) -> dict[str, Any]:
    """The scale of attention, in families whose files do not store it."""
    if not family.odd_scale_layers:
        return {}
    per_head = file.field("embedding_length") // file.field("attention.head_count")
    is_odd = file.field("block_count") == family.odd_scale_layers
    size = per_head if is_odd else file.field("attention.key_length", per_head)
    return {"query_pre_attn_scalar": size}


def _expert_fields(file: GgufFile) -> dict[str, Any]:
    if not file.field("expert_count", 0):
        return {}
    count = file.field("expert_count")
    first, shared = (_first(file, name) for name in ("ffn_down_exps", "ffn_gate_shexp"))
    if first is None or len(first.shape) != 3 or first.shape[0] != count:
        raise ModelNotSupported(f"{file.path}: not {count} experts in ffn_down_exps.weight")
    return {
        "num_experts_per_tok": file.field("expert_used_count"),
        "num_local_experts": count,
        "moe_intermediate_size": first.shape[2],
        "shared_expert_intermediate_size": None if shared is None else shared.shape[0],
    }


def _first(file: GgufFile, name: str) -> GgufTensor | None:
    """The tensor of the first layer that has it."""
    names = (f"blk.{layer}.{name}.weight" for layer in range(file.num_layers))
    return next((file.tensors[own] for own in names if own in file.tensors), None)


def gguf_eos_ids(file: GgufFile) -> tuple[int, ...]:
    """Tokens that end an answer: end of text, of a turn and of a message; ascending."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = {file.fields.get(f"tokenizer.ggml.{name}") for name in names}
    return tuple(sorted(i for i in ids if isinstance(i, int)))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def _rope_parameters(file: GgufFile) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": float(file.field("rope.freq_base", 10_000.0))}
    if SHORT_FACTORS in file.tensors:
        names = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
        factors = {ours: file.read(name).tolist() for ours, name in names.items()}
        return {**rope, "rope_type": "longrope", **factors}
    kind = file.field("rope.scaling.type", "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ModelNotSupported(f"{file.path}: rope scaling {kind!r}; possible are linear, yarn")
    rope |= {"rope_type": kind, "factor": float(file.field("rope.scaling.factor", 1.0))}
    if kind == "yarn":
        names = {
            "original_max_position_embeddings": "original_context_length",
            "attention_factor": "yarn_attn_factor",
            "beta_fast": "yarn_beta_fast",
            "beta_slow": "yarn_beta_slow",
        }
        given = {ours: file.field(f"rope.scaling.{name}") for ours, name in names.items()}
        rope |= {ours: value for ours, value in given.items() if value is not None}
        if file.architecture == "gpt-oss":
            rope["truncate"] = False  # as its models were trained; no file tells
    return rope
