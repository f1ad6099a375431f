"""A model in a GGUF file as the native decoder reads one: a config, and tensors by their names in
transformers.

Matrices of 8 bits or less are kept as they are where the reader is asked to; every other tensor is
widened to the model's dtype. Families are those that both the format and the native
decoder know; others are refused by name.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.errors import InvalidRequest, ModelNotSupported
from radixserve.gguf_file import GgufFile
from radixserve.models.decoder_config import DecoderConfig, read_decoder_config
from radixserve.models.gguf_forms import EXACT, exact_form, nearest_int8
from radixserve.models.weights import TensorReader
from radixserve_kernels.quantized import AnyWeight, select_rows

_log = logging.getLogger("radixserve")
EMBEDDING = "token_embd.weight"
FLOATS = ("F32", "F16", "BF16", "F64")
ROPE_FACTORS = "rope_freqs.weight"  # [D / 2] inverse frequencies are divided by these (Llama 3.1)
_UNUSED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight|rope_factors_.*")


@dataclass(frozen=True, slots=True)
class _Family:
    """What a general.architecture is in transformers."""

    model_type: str
    architecture: str
    has_paired_rotation: bool = False  # rows of q and k lie in pairs (2i, 2i + 1), not in halves
    router: str = "mlp.gate"
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # names of each one's


FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM", has_paired_rotation=True),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": _Family("qwen3_moe", "Qwen3MoeForCausalLM"),
}
_MIXTRAL = _Family(  # which a file calls llama, with experts
    "mixtral", "MixtralForCausalLM", True, "block_sparse_moe.gate", ("w1", "w3", "w2")
)


def gguf_config(file: GgufFile) -> DecoderConfig:
    """The config of a GGUF file. ModelNotSupported names what cannot be run."""
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
    eps = numbers.pop("rms_norm_eps")
    config = read_decoder_config(
        {
            **numbers,
            "model_type": family.model_type,
            "architectures": [family.architecture],
            "rms_norm_eps": float(eps),
            "head_dim": head_dim,
            "num_key_value_heads": file.field("attention.head_count_kv", num_heads),
            "rope_parameters": _rope_parameters(file),
            "vocab_size": file.tensors[EMBEDDING].shape[0],
            "tie_word_embeddings": "output.weight" not in file.tensors,
            "attention_bias": family.model_type == "llama" and "blk.0.attn_q.bias" in file.tensors,
            **_expert_fields(file),
            "sliding_window": None,
            "eos_token_id": file.fields.get("tokenizer.ggml.eos_token_id"),
            "dtype": {0: "float32", 1: "float16"}.get(file.tensors[EMBEDDING].type_id, "bfloat16"),
        }
    )
    if config is None:
        raise ModelNotSupported(f"{file.path}: a size in its fields is not a positive integer")
    return config


def _expert_fields(file: GgufFile) -> dict[str, Any]:
    if not file.field("expert_count", 0):
        return {}
    family, count = _family(file), file.field("expert_count")
    first = file.tensors.get("blk.0.ffn_gate_exps.weight")
    if first is None or first.shape[:1] != (count,):
        raise ModelNotSupported(f"{file.path}: not {count} experts in blk.0.ffn_gate_exps.weight")
    fields = {"num_experts_per_tok": file.field("expert_used_count")}
    if family is _MIXTRAL:
        return fields | {"num_local_experts": count}
    size = file.field("expert_feed_forward_length")
    return fields | {"num_experts": count, "moe_intermediate_size": size, "norm_topk_prob": True}


def gguf_eos_ids(file: GgufFile) -> tuple[int, ...]:
    """Tokens that end an answer: end of text, of a turn and of a message; ascending."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = {file.fields.get(f"tokenizer.ggml.{name}") for name in names}
    return tuple(sorted(i for i in ids if isinstance(i, int)))


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


class GgufWeights(TensorReader):
    """The tensors of a GGUF file by their names in transformers, read one by one.

    `keeps_forms`: matrices in 8 bits or less, or in float16, stay so; else all are widened.
    """

    def __init__(
        self,
        file: GgufFile,
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_forms: bool = False,
    ) -> None:
        self._rounded: set[str] = set()  # types that were logged
        self._file, self._family = file, _family(file)
        self._own = _transformers_names(file, self._family)
        named = {own for own, _ in self._own.values()}
        unnamed = {own for own in file.tensors if own not in named and not _UNUSED.fullmatch(own)}
        every = {*self._own, *unnamed}
        super().__init__(file.path, every, dtype, device, keeps_forms=keeps_forms)

    def _read(self, name: str) -> AnyWeight:
        own, expert = self._own[name]
        tensor = self._stored(own, expert)
        self._file.drop_pages()  # they are not read again
        if not self._family.has_paired_rotation or not re.search(r"attn_[qk]\.", own):
            return tensor
        heads = "attention.head_count" + ("_kv" if "attn_k." in own else "")
        num_heads = self._file.field(heads, self._file.field("attention.head_count"))
        return select_rows(tensor, _halves_of_pairs(tensor.shape[0], num_heads))

    def _stored(self, own: str, expert: int | None) -> AnyWeight:
        kind = self._file.kind(own)
        is_matrix = len(self._file.tensors[own].shape) == (2 if expert is None else 3)
        if self._keeps_forms and is_matrix and kind in EXACT:
            return exact_form(kind, self._file.raw(own, expert))
        if self._keeps_forms and is_matrix and kind == "F16":
            return torch.from_numpy(self._file.raw(own, expert).view(np.float16).copy())
        numbers = self._file.read(own, expert)
        if self._keeps_forms and is_matrix and kind not in FLOATS:
            if kind not in self._rounded:
                self._rounded.add(kind)
                _log.info("%s: %s is rounded to 8 bits a number", self._file.path, kind)
            try:
                return nearest_int8(numbers)
            except ValueError as error:
                raise InvalidRequest(f"{self._file.path}: tensor {own} has {error}") from error
        return torch.from_numpy(np.array(numbers))


def rope_factors(file: GgufFile) -> NDArray[np.float32] | None:
    """[D / 2] what inverse frequencies are divided by; None where the file has no such tensor."""
    return file.read(ROPE_FACTORS) if ROPE_FACTORS in file.tensors else None


def _family(file: GgufFile) -> _Family:
    family = FAMILIES.get(file.architecture)
    if file.architecture == "llama" and file.field("expert_count", 0):
        return _MIXTRAL
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


def _halves_of_pairs(num_rows: int, num_heads: int) -> Tensor:
    """Where the rows of halves (i, D / 2 + i) of each head lie in a file of pairs (2i, 2i + 1)."""
    pairs = torch.arange(num_rows).view(num_heads, -1, 2)
    return pairs.transpose(1, 2).reshape(-1)


def _transformers_names(file: GgufFile, family: _Family) -> dict[str, tuple[str, int | None]]:
    """Name in transformers -> name in the file, for tensors that have one; in the file experts are
    one tensor, of which it is the number."""
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
        "ffn_gate_inp": family.router,
    }
    module = family.router.removesuffix(".gate")
    parts = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    experts = dict(zip(parts, family.experts, strict=True))
    others = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
    }
    found: dict[str, tuple[str, int | None]] = {}
    for own in file.tensors:
        stem, _, kind = own.rpartition(".")  # kind: weight or bias
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if match and match[2] in layer:
            found[f"model.layers.{match[1]}.{layer[match[2]]}.{kind}"] = own, None
        elif match and match[2] in experts and len(file.tensors[own].shape) == 3:
            prefix, name = f"model.layers.{match[1]}.{module}.experts", experts[match[2]]
            for number in range(len(file.raw(own))):
                found[f"{prefix}.{number}.{name}.{kind}"] = own, number
        elif stem in others:
            found[f"{others[stem]}.{kind}"] = own, None
    return found
