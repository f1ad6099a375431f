"""The config of a native family, read as transformers reads it, without importing it.

Unusual configs (fields of another type, missing or unknown rope fields, layers that differ) are
left to transformers, so that both readers agree wherever this one applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ROPE_FIELDS = {  # rope type -> (required, optional) fields beside rope_type and rope_theta
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_SCALED_LENGTH = "original_max_position_embeddings"  # of the types llama3 and yarn
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "max_position_embeddings"),
)
_QWEN_EXPERTS = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": ()}
_EXPERT_SIZES = (
    *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
    "shared_expert_intermediate_size",
)
_FAMILIES: dict[str, dict[str, Any]] = {  # defaults of what a config.json may leave out
    "llama": {"num_key_value_heads": None, "eos_token_id": 2},
    "mistral": {"num_key_value_heads": 8, "eos_token_id": 2, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "mixtral": {
        "num_key_value_heads": 8,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        **_QWEN_EXPERTS,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        **_QWEN_EXPERTS,
    },
}
READ_HERE = frozenset(_FAMILIES)  # model types
_THETAS = {"gpt_oss": 150_000.0, "mixtral": 1_000_000.0}  # rope_theta of the families' defaults
_UNUSUAL = (
    *("per_layer_config", "partial_rotary_factor", "text_config", "quantization_config"),
    "auto_map",
)


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """The fields that a native decoder reads, named as in config.json."""

    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    initializer_range: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    layer_types: tuple[str, ...] | None
    rope_parameters: Mapping[str, Any]
    eos_token_id: int | tuple[int, ...] | None
    dtype: str | None
    qkv_bias: bool = False
    num_experts: int | None = None  # of families with experts, here and below
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None
    norm_topk_prob: bool | None = None
    decoder_sparse_step: int | None = None
    mlp_only_layers: tuple[int, ...] | None = None
    swiglu_alpha: float | None = None
    swiglu_limit: float | None = None


def read_decoder_config(raw: Mapping[str, Any]) -> DecoderConfig | None:
    """`raw`: the fields of a config.json. None where transformers has to read it."""
    family = _FAMILIES.get(str(raw.get("model_type")))
    rope = _rope_parameters(raw)
    if family is None or rope is None or any(raw.get(name) for name in _UNUSUAL):
        return None
    if raw["model_type"] == "mistral" and "layer_types" in raw:
        return None  # transformers makes a Ministral of it
    if raw["model_type"] == "qwen2_moe" and raw.get("use_sliding_window"):
        return None
    fields = {**family, **raw}
    if not all(_is_size(fields.get(name)) for name in _SIZES):
        return None
    heads, model_type = fields["num_attention_heads"], fields["model_type"]
    if fields["num_key_value_heads"] is None and model_type != "mistral":
        fields["num_key_value_heads"] = heads
    if fields.get("head_dim") is None and model_type != "qwen3":
        fields["head_dim"] = fields["hidden_size"] // heads
    window, layer_types = _attention_span(fields)
    names = fields.get("architectures") or ()
    dtype = fields["dtype"] if fields.get("dtype") is not None else fields.get("torch_dtype")
    eos = fields.get("eos_token_id")
    config = DecoderConfig(
        model_type=fields["model_type"],
        architectures=tuple(names) if isinstance(names, list | tuple) else names,
        **{name: fields[name] for name in _SIZES},
        num_key_value_heads=fields["num_key_value_heads"],
        head_dim=fields["head_dim"],
        rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
        hidden_act=fields.get("hidden_act", "silu"),
        initializer_range=fields.get("initializer_range", 0.02),
        tie_word_embeddings=fields.get("tie_word_embeddings", False),
        attention_bias=fields.get("attention_bias", False),
        mlp_bias=fields.get("mlp_bias", False),
        sliding_window=window,
        layer_types=layer_types,
        rope_parameters=rope,
        eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        dtype=dtype,
        **_expert_fields(fields),
    )
    return config if _is_usual(config) else None


def _expert_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    if "num_experts_per_tok" not in _FAMILIES[fields["model_type"]]:
        return {}
    names = (
        *(*_EXPERT_SIZES, "norm_topk_prob", "mlp_only_layers"),
        *("swiglu_alpha", "swiglu_limit", "qkv_bias"),
    )
    known = {name: fields[name] for name in names if name in fields}
    if "num_local_experts" in fields:
        known["num_experts"] = fields["num_local_experts"]
    if isinstance(layers := known.get("mlp_only_layers", ""), list | None):
        known["mlp_only_layers"] = tuple(layers or ())
    return known


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """With rope_type and rope_theta, old names replaced; None where a field is not known."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, Mapping) or (raw.get("model_type") == "gpt_oss" and not given):
        return None  # one of its own
    rope = dict(given)
    default = _THETAS.get(str(raw.get("model_type")), 10_000.0)
    rope.setdefault("rope_theta", raw.get("rope_theta", default))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if rope["rope_type"] not in _ROPE_FIELDS:
        return None
    required, optional = _ROPE_FIELDS[rope["rope_type"]]
    if rope["rope_type"] in ("llama3", "yarn"):
        rope.setdefault(_SCALED_LENGTH, raw.get("max_position_embeddings"))
        if raw.get(_SCALED_LENGTH) is not None:
            rope[_SCALED_LENGTH] = raw[_SCALED_LENGTH]
        required = (*required, _SCALED_LENGTH)
    numbers = [rope.get(name) for name in ("rope_theta", *required)]
    others = set(rope) - {"rope_type", "rope_theta", *required, *optional}
    if others or not all(map(_is_positive, numbers)):
        return None
    given_options = [rope[name] for name in optional if rope.get(name) is not None]
    return rope if all(map(_is_number_or_flag, given_options)) else None


def _attention_span(fields: Mapping[str, Any]) -> tuple[Any, tuple[str, ...] | None]:
    """(sliding window, type of each layer) as the family's transformers config has them."""
    window, given = fields.get("sliding_window"), fields.get("layer_types")
    given = tuple(given) if isinstance(given, list | tuple) else given
    kind, count = fields["model_type"], fields["num_hidden_layers"]
    if kind in ("llama", "mistral", "mixtral"):
        return window, given
    if kind == "gpt_oss":
        types = ("sliding_attention", "full_attention")
        return window, tuple(types[i % 2] for i in range(count)) if given is None else given
    if kind == "qwen2_moe":
        return 0, ("full_attention",) * count if given is None else given
    if kind == "qwen3_moe":
        return window if fields.get("use_sliding_window", False) else None, given
    if not fields.get("use_sliding_window", False):
        window = None
    if given is None:
        full = (
            fields["num_hidden_layers"] if window is None else fields.get("max_window_layers", 28)
        )
        given = tuple(
            "full_attention" if layer < full else "sliding_attention"
            for layer in range(fields["num_hidden_layers"])
        )
    return window, given


def _is_usual(config: DecoderConfig) -> bool:
    """Whether every field has the type that transformers demands."""
    heads, eos = config.num_attention_heads, config.eos_token_id
    flags = (config.tie_word_embeddings, config.attention_bias, config.mlp_bias)
    ids = eos if isinstance(eos, tuple) else () if eos is None else (eos,)
    window, kinds = config.sliding_window, config.layer_types
    return (
        all(isinstance(name, str) for name in config.architectures)
        and not isinstance(config.architectures, str)
        and all(map(_is_size, (config.num_key_value_heads, config.head_dim)))
        and config.head_dim % 2 == 0
        and (config.model_type != "llama" or config.hidden_size % heads == 0)
        and all(isinstance(x, float) for x in (config.rms_norm_eps, config.initializer_range))
        and 0 <= config.initializer_range <= 1
        and all(isinstance(flag, bool) for flag in flags)
        and isinstance(config.hidden_act, str)
        and (window is None or _is_size(window) or config.model_type == "qwen2_moe")
        and _has_usual_experts(config)
        and (kinds is None or set(kinds) <= {"full_attention", "sliding_attention"})
        and (kinds is None or len(kinds) == config.num_hidden_layers)
        and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
        and (config.dtype is None or isinstance(config.dtype, str))
    )


def _has_usual_experts(config: DecoderConfig) -> bool:
    sizes = [getattr(config, name) for name in _EXPERT_SIZES]
    numbers = (config.swiglu_alpha, config.swiglu_limit)
    return (
        all(size is None or _is_size(size) for size in sizes)
        and all(number is None or isinstance(number, float) for number in numbers)
        and isinstance(config.norm_topk_prob, bool | None)
        and isinstance(config.qkv_bias, bool)
        and isinstance(config.mlp_only_layers, tuple | None)
        and all(isinstance(layer, int) for layer in config.mlp_only_layers or ())
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_number_or_flag(value: object) -> bool:
    return isinstance(value, int | float)
