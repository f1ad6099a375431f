"""Tiny random checkpoints of many families, written the way the hub writes them."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCAB_SIZE = 288  # 256 bytes and room for special tokens
BOS_ID, EOS_ID = 256, 257

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": None,
}
WINDOWS = {  # one layer sees 21 positions, one all
    "head_dim": 16,
    "sliding_window": 21,
    "layer_types": ["sliding_attention", "full_attention"],
}
MOE = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}

_DELTA_NET: dict[str, Any] = {  # two layers of it and one of attention, whose rotary turns 4 of 16
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
    },
}
_SHARED_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
_GRANITE_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.7,
    "embedding_multiplier": 3.0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", {**_DELTA_NET, **_SHARED_EXPERTS}),
    "qwen3_5": ("Qwen3_5TextConfig", _DELTA_NET),
    "lfm2": (
        "Lfm2Config",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**_DELTA_NET, **_SHARED_EXPERTS}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **MOE,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "granitemoehybrid": ("GraniteMoeHybridConfig", {**_GRANITE_HYBRID, "num_local_experts": 4}),
    "granite_hybrid_dense": (
        "GraniteMoeHybridConfig",
        {**_GRANITE_HYBRID, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": "linear_attention moe full_attention linear_attention mlp".split(),
            "num_hidden_layers": 5,
            "head_dim": 16,
            "mamba_num_heads": 6,
            "mamba_head_dim": 24,
            "ssm_state_size": 16,
            "n_groups": 2,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "n_routed_experts": 4,
            "routed_scaling_factor": 1.5,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            "head_dim": 16,
            "mamba_n_heads": 6,
            "mamba_d_head": 24,
            "mamba_d_ssm": 144,
            "mamba_d_state": 16,
            "mamba_n_groups": 2,
            "mamba_rms_norm": False,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 1.2,
            "key_multiplier": 0.7,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.8],
            "mlp_multipliers": [1.4, 0.7],
            "embedding_multiplier": 2.0,
            "lm_head_multiplier": 0.5,
        },
    ),
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": None, "rotary_pct": 0.5}),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3Config", {}),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.7,
            "embedding_multiplier": 3.0,
        },
    ),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "cohere": ("CohereConfig", {"logit_scale": 0.5, "use_qk_norm": True}),
    "gemma": ("GemmaConfig", {"head_dim": 32, "tie_word_embeddings": True}),
    "glm": ("GlmConfig", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4": ("Glm4Config", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None, "use_bias": True}),
    "starcoder2_window": ("Starcoder2Config", {"sliding_window": 21}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "gpt2": ("GPT2Config", {"num_key_value_heads": None, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", {"sliding_window": None, "num_local_experts": 4}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 32, **MOE}),
    "qwen2_moe": ("Qwen2MoeConfig", {"shared_expert_intermediate_size": 80, **MOE}),
    "nemotron": ("NemotronConfig", {"head_dim": 16}),
    "helium": ("HeliumConfig", {"head_dim": 16}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16}),
    "mistral_window": ("MistralConfig", {"sliding_window": 21}),
    "qwen2_window": (
        "Qwen2Config",
        {"sliding_window": 21, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "phi3_window": ("Phi3Config", {"sliding_window": 13}),
    "gemma2": ("Gemma2Config", {**WINDOWS, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", WINDOWS),
    "gemma4": (  # the last two layers use keys of the first two; layers differ in their head sizes
        "Gemma4TextConfig",
        {
            **WINDOWS,
            "layer_types": WINDOWS["layer_types"] * 2,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "gemma4_moe": (  # and in their key heads, whose keys are their values, too
        "Gemma4TextConfig",
        {
            **WINDOWS,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gpt_oss": ("GptOssConfig", {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo3": ("Olmo3Config", WINDOWS),
    "cohere2": ("Cohere2Config", WINDOWS),
    "exaone4": ("Exaone4Config", WINDOWS),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 16,
            "attention_chunk_size": 16,
            "attn_temperature_tuning": False,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
            "no_rope_layers": [1, 0],
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "q_lora_rank": 24,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 24,
            "v_head_dim": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "head_dim": None,
        },
    ),
}
NATIVE = ("llama", "mistral", "qwen2", "qwen3")
EXPERTS = ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")  # of four experts a token has two
DELTA_NETS = ("qwen3_next", "qwen3_5", "qwen3_5_moe")  # layers with states
STATE_SPACES = ("granitemoehybrid", "granite_hybrid_dense", "nemotron_h", "falcon_h1")
CONVOLUTIONS = ("lfm2", "lfm2_moe")
RECURRENT = (*DELTA_NETS, *STATE_SPACES, *CONVOLUTIONS)
SHAPED = ("gemma4", "gemma4_moe")  # layers differ in their shapes: native on the cpu backend only
NATIVE_PARTS = (  # other native families: each has parts that these do not have
    *("cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3", "glm", "glm4", "granite"),
    *EXPERTS,
    *("olmo2", "olmo3", "phi3", "smollm3", "mistral_window", "qwen2_window", "phi3_window"),
)

_FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": None}
_LONGROPE = {
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0] * 8,
    },
}
GGUF_OVERRIDES: dict[str, dict[str, Any]] = {  # of a family of GGUF files
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "mixtral": {},
    "qwen3_moe": {"head_dim": 32, "norm_topk_prob": True},
    "qwen2_moe": {},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {**_FOUR_LAYERS, "tie_word_embeddings": True},
    "exaone4": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3": {**_FOUR_LAYERS, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
    "glm4": {},
    "gpt_oss": {},
    "granite": {},
    "olmo2": {},
    "olmo3": {},
    "phi3": {},
    "phi3_window": _LONGROPE,
    "smollm3": {**_FOUR_LAYERS, "no_rope_layer_interval": 4},
}


def make_config(family: str, **overrides: Any) -> Any:
    """A tiny transformers config of the family; `overrides` replace its fields."""
    class_name, own = FAMILIES[family]
    fields = {**SIZES, **own, **overrides}
    fields = {k: v for k, v in fields.items() if v is not None or k in _MAY_BE_NONE}
    return getattr(transformers, class_name)(**fields)


_MAY_BE_NONE = ("pad_token_id", "eos_token_id", "sliding_window")


def make_model(config: Any, seed: int = 0) -> Any:
    """The config's causal language model in float32 with seeded weights, eager attention.

    Biases and norms are random, too: as transformers starts them, zeros and ones hide errors.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1 or "norm" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
            for name, buffer in model.named_buffers():
                if name.endswith(("bias", "layer_scalar")):  # of the choice of experts, of layers
                    buffer.add_(0.2 * torch.randn_like(buffer))
    return model.float()


def make_checkpoint(
    folder: Path,
    family: str,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    eos_ids: int | Iterable[int] | None = None,
    max_shard_size: str | None = None,
    with_tokenizer: bool = False,
    **overrides: Any,
) -> Path:
    """Write a tiny checkpoint of the family into `folder` and return it.

    eos_ids go to generation_config.json; a small max_shard_size ("40KB") makes several files and an
    index; `overrides` are fields of the transformers config.
    """
    ids = eos_ids if eos_ids is None or isinstance(eos_ids, int) else list(eos_ids)
    asked = (family, seed, dtype, ids, max_shard_size, with_tokenizer, overrides)
    if repr(asked) not in _written:
        _written[repr(asked)] = _write_checkpoint(*asked)
    return Path(shutil.copytree(_written[repr(asked)], folder, dirs_exist_ok=True))


_written: dict[str, Path] = {}  # checkpoints of this process: many tests ask for the same ones


@functools.cache
def _room() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="checkpoints")


def _write_checkpoint(
    family: str,
    seed: int,
    dtype: torch.dtype,
    eos_ids: int | list[int] | None,
    max_shard_size: str | None,
    with_tokenizer: bool,
    overrides: dict[str, Any],
) -> Path:
    folder = Path(_room().name, str(len(_written)))
    model = make_model(make_config(family, **overrides), seed).to(dtype)
    if eos_ids is not None:
        model.generation_config.eos_token_id = eos_ids
    sharding = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.save_pretrained(folder, **sharding)
    if with_tokenizer:
        make_tokenizer(folder)
    return folder


def load_reference(folder: Path) -> Any:
    """transformers' own float32 model of a checkpoint, eager attention."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def edit_json(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    data = json.loads(path.read_text()) if path.exists() else {}
    data.update(fields)
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))


CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(folder: Path) -> Any:
    """Write a tokenizer of one token a byte, with end and role tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return wrapped


def greedy(model: Any, prompt: Iterable[int], num_tokens: int) -> list[int]:
    """The prompt and `num_tokens` more by transformers' generate; end tokens are ignored."""
    whole = list(prompt)
    return whole + greedy_batch(model, [whole], num_tokens)[0]


@torch.inference_mode()
def greedy_batch(model: Any, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """`num_tokens` for each prompt, as `greedy`."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    model.generation_config.eos_token_id = None
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    return found[:, longest:].tolist()


@torch.inference_mode()
def all_logprobs(model: Any, tokens: Iterable[int]) -> torch.Tensor:
    """[n, V] float32: transformers' log-probabilities after each of the tokens."""
    return model(torch.tensor([list(tokens)])).logits[0].float().log_softmax(-1)


@torch.inference_mode()
def all_logprobs_batch(model: Any, texts: Sequence[list[int]]) -> list[torch.Tensor]:
    """`all_logprobs` of each text, by one forward pass; the model's layers must be causal."""
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    tables = model(ids).logits.float().log_softmax(-1)
    return [table[: len(text)] for table, text in zip(tables, texts, strict=True)]
