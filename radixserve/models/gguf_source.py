"""A model in a GGUF file as the native decoder reads one: a config, and tensors by their names in
transformers.

Every tensor is widened to the model's dtype. Families are those that both the format and the native
decoder know; others are refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.errors import ModelNotSupported
from radixserve.gguf_file import GgufFile
from radixserve.models.weights import TensorReader

EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"  # [D / 2] inverse frequencies are divided by these (Llama 3.1)
_UNUSED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight|rope_factors_.*")


@dataclass(frozen=True, slots=True)
class _Family:
    """What a general.architecture is in transformers."""

    model_type: str
    architecture: str
    has_paired_rotation: bool = False  # rows of q and k lie in pairs (2i, 2i + 1), not in halves


FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", has_paired_rotation=True),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM"),
}


def gguf_config(file: GgufFile) -> Any:
    """The transformers config of a GGUF file. ModelNotSupported names what cannot be run."""
    from transformers import AutoConfig

    family = _family(file)
    names = {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    }
    missing = [key for key in names.values() if not _is_positive(file.field(key))]
    if missing:
        raise ModelNotSupported(f"{file.path}: {', '.join(missing)} missing or no positive number")
    if EMBEDDING not in file.tensors:
        raise ModelNotSupported(f"{file.path}: missing tensor {EMBEDDING}")
    numbers = {ours: file.field(key) for ours, key in names.items()}
    num_heads = numbers["num_attention_heads"]
    head_dim = file.field("attention.key_length", numbers["hidden_size"] // num_heads)
    if file.field("attention.value_length", head_dim) != head_dim:
        raise ModelNotSupported(f"{file.path}: keys and values have different head sizes")
    if file.field("rope.dimension_count", head_dim) != head_dim:
        raise ModelNotSupported(f"{file.path}: rotary embedding of part of a head")
    if file.field("expert_count", 0):
        raise ModelNotSupported(f"{file.path}: {file.architecture} with experts")
    return AutoConfig.for_model(
        family.model_type,
        **numbers,
        architectures=[family.architecture],
        head_dim=head_dim,
        num_key_value_heads=file.field("attention.head_count_kv", num_heads),
        rope_parameters=_rope_parameters(file),
        vocab_size=file.tensors[EMBEDDING].shape[0],
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias=family.model_type == "llama" and "blk.0.attn_q.bias" in file.tensors,
        sliding_window=None,
        bos_token_id=file.fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=file.fields.get("tokenizer.ggml.eos_token_id"),
        dtype="bfloat16" if is_half_or_less(file) else "float32",
    )


def gguf_eos_ids(file: GgufFile) -> tuple[int, ...]:
    """Tokens that end an answer: end of text, of a turn and of a message; ascending."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = {file.fields.get(f"tokenizer.ggml.{name}") for name in names}
    return tuple(sorted(i for i in ids if isinstance(i, int)))


def is_half_or_less(file: GgufFile) -> bool:
    """Whether the matrices are stored in 16 bits or less a number."""
    return file.tensors[EMBEDDING].type_id != 0


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


class GgufWeights(TensorReader):
    """The tensors of a GGUF file by their names in transformers, widened one by one."""

    def __init__(self, file: GgufFile, dtype: torch.dtype, device: torch.device) -> None:
        self._file, self._family = file, _family(file)
        names = _transformers_names(file)
        self._own = {theirs: own for own, theirs in names.items()}
        unnamed = {own for own in file.tensors if own not in names and not _UNUSED.fullmatch(own)}
        super().__init__(file.path, {*self._own, *unnamed}, dtype, device)

    def _read(self, name: str) -> Tensor:
        own = self._own[name]
        numbers = self._file.read(own)
        if self._family.has_paired_rotation and re.search(r"attn_[qk]\.", own):
            heads = "attention.head_count" + ("_kv" if "attn_k." in own else "")
            num_heads = self._file.field(heads, self._file.field("attention.head_count"))
            numbers = _to_halves(numbers, num_heads)
        return torch.from_numpy(np.array(numbers))


def rope_factors(file: GgufFile) -> NDArray[np.float32] | None:
    """[D / 2] what inverse frequencies are divided by; None where the file has no such tensor."""
    return file.read(ROPE_FACTORS) if ROPE_FACTORS in file.tensors else None


def _family(file: GgufFile) -> _Family:
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise ModelNotSupported(
            f"{file.path} holds a model of the architecture {file.architecture!r}; GGUF files of "
            f"{', '.join(FAMILIES)} can be run"
        )
    return family


def _rope_parameters(file: GgufFile) -> dict[str, Any]:
    theta = float(file.field("rope.freq_base", 10_000.0))
    kind = file.field("rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ModelNotSupported(f"{file.path}: rope scaling {kind!r}; possible are linear, yarn")
    found = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": float(file.field("rope.scaling.factor", 1.0)),
    }
    if kind == "yarn":
        length = file.field("rope.scaling.original_context_length")
        found["original_max_position_embeddings"] = length
    return found


def _to_halves(numbers: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of each head from pairs (2i, 2i + 1) to halves (i, D / 2 + i): [heads * D, ...]."""
    pairs = numbers.reshape(num_heads, -1, 2, *numbers.shape[1:])
    return pairs.swapaxes(1, 2).reshape(numbers.shape)


def _transformers_names(file: GgufFile) -> dict[str, str]:
    """Names of the file's tensors -> names in transformers, for those that have one."""
    layer = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    others = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
    }
    found = {}
    for own in file.tensors:
        stem, _, kind = own.rpartition(".")  # kind: weight or bias
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if match and match[2] in layer:
            found[own] = f"model.layers.{match[1]}.{layer[match[2]]}.{kind}"
        elif stem in others:
            found[own] = f"{others[stem]}.{kind}"
    return found
