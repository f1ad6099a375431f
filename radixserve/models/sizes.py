"""Shapes of published and of tiny models, which can run with random weights.

The fields are those of the config.json that each model was published with. Their end tokens are
left out: no token of a model with random weights means an end, so an answer has the requested
length.
"""

from __future__ import annotations

from typing import Any

from radixserve.errors import InvalidRequest
from radixserve.models.decoder_config import DecoderConfig, read_decoder_config

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_LLAMA_8B = {
    **_LLAMA,
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_LLAMA_70B = {
    **_LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_LLAMA_3_ROPE: dict[str, Any] = {
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
_LLAMA_31_ROPE: dict[str, Any] = {
    "max_position_embeddings": 131_072,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
_QWEN3_MOE = {
    **_QWEN3,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_key_value_heads": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "hidden_act": "silu",
    "attention_bias": True,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "max_position_embeddings": 131_072,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
_TINY: dict[str, Any] = {  # weights so wide that logits differ and greedy answers vary
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "dtype": "float32",
}

SIZES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {**_LLAMA_8B, **_LLAMA_3_ROPE},
    "llama-3.1-8b": {**_LLAMA_8B, **_LLAMA_31_ROPE},
    "llama-3-70b": {**_LLAMA_70B, **_LLAMA_3_ROPE},
    "llama-3.1-70b": {**_LLAMA_70B, **_LLAMA_31_ROPE},
    "qwen3-0.6b": {
        **_QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        **_QWEN3,
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_QWEN3_MOE,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "mixtral-8x7b": {
        **_LLAMA_8B,
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 32_000,
        "max_position_embeddings": 32_768,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "gpt-oss-20b": {
        **_GPT_OSS,
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
    "tiny-llama": {
        **_LLAMA,
        **_TINY,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "tiny-qwen3": {**_QWEN3, **_TINY, "head_dim": 32, "tie_word_embeddings": True},
    "tiny-qwen3-moe": {
        **_QWEN3_MOE,
        **_TINY,
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
}


def size_config(name: str) -> DecoderConfig:
    """The config of a name in SIZES. Raises InvalidRequest that lists them."""
    fields = SIZES.get(name)
    if fields is None:
        raise InvalidRequest(f"there is no config {name!r}; possible are {', '.join(SIZES)}")
    config = read_decoder_config({**fields, "eos_token_id": None})
    assert config is not None, f"{name} has an unusual field"
    return config
