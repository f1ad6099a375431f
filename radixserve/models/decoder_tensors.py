"""The tensors of a native decoder's checkpoint: Llama, Mistral, Qwen2 and Qwen3.

One layout for all families. Projections that read the same input are fused where it is read or
where a decoder packs them: q, k, v into one, gate and up into one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from radixserve.errors import ModelNotSupported
from radixserve.models.base import ModelInfo
from radixserve.models.source import ModelSource, TensorSource
from radixserve.models.weights import architecture_of, check_sliding_window
from radixserve_kernels.decoder_layer import DecoderSizes
from radixserve_kernels.torch_ops import pair_halves, rotations

WeightAndBias = tuple[Tensor, Tensor | None]

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
FIRST_POSITIONS = 2_048  # whose rotations are made at load


@dataclass(frozen=True, slots=True)
class DecoderShape(DecoderSizes):
    """The fields of a config that decide its tensors and its arithmetic."""

    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    is_tied: bool


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's weights and biases; Q = Hq * D and KV = Hkv * D features, M of the MLP, H hidden.

    Rows of q and k are in the order that `apply_rotary` wants.
    """

    input_norm: Tensor  # [H]
    qkv: WeightAndBias  # [Q + 2 KV, H]
    qk_norm: Tensor | None  # [Hq + Hkv, D] q's weight for the first Hq heads, then k's
    o: WeightAndBias  # [H, Q]
    post_norm: Tensor  # [H]
    gate: WeightAndBias  # [M, H]
    up: WeightAndBias  # [M, H]
    down: WeightAndBias  # [H, M]

    @property
    def projections(self) -> tuple[WeightAndBias, ...]:
        return self.qkv, self.o, self.gate, self.up, self.down


@dataclass(frozen=True, slots=True)
class DecoderTensors:
    """A checkpoint's tensors."""

    info: ModelInfo
    shape: DecoderShape
    embedding: Tensor  # [V, H]
    layers: tuple[Any, ...]  # made from each LayerTensors
    norm: Tensor  # [H]
    lm_head: Tensor  # [V, H]
    rotary: RotaryTable


class RotaryTable:
    """The rotation of every position, [n, 1, D/2] complex64; as many as were needed so far."""

    def __init__(self, inv_freq: Tensor, scaling: float) -> None:
        """`inv_freq` [D/2] float32; cosines and sines are multiplied by `scaling`."""
        self._inv_freq, self._scaling = inv_freq, scaling
        self._rows = self._make(FIRST_POSITIONS)

    def up_to(self, end: int) -> Tensor:
        """[n >= end, 1, D/2] of positions 0, 1, 2 ..."""
        if end > len(self._rows):
            self._rows = self._make(max(end, 2 * len(self._rows)))
        return self._rows

    def cos_sin(self, num_positions: int) -> Tensor:
        """[n, D] float32 of positions 0 to n - 1: the cosines of the D/2 pairs, then the sines."""
        rows = self._make(num_positions)[:, 0]
        return torch.cat((rows.real, rows.imag), -1)

    def _make(self, num_positions: int) -> Tensor:
        positions = torch.arange(num_positions, device=self._inv_freq.device)
        return rotations(positions, self._inv_freq, self._scaling)


def read_decoder(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    make_layer: Callable[[LayerTensors], Any],
) -> DecoderTensors:
    """Read a model; layers go through `make_layer` one by one, so that no two copies of all of
    them exist at a time."""
    config = source.config
    check_decoder(config)
    shape = decoder_shape(config)
    inv_freq, scaling = rope_frequencies(config, shape.head_dim)
    if (factors := source.rope_factors()) is not None:
        inv_freq = inv_freq / factors
    reader = source.tensors(dtype, device)
    reader.skip(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    embedding = reader.take("model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size))
    lm_head = _load_head(reader, shape, embedding)
    norm = reader.take("model.norm.weight", (shape.hidden_size,))
    layers = tuple(
        make_layer(_load_layer(reader, f"model.layers.{number}.", shape))
        for number in range(shape.num_layers)
    )
    reader.finish()
    info = ModelInfo(
        architecture=architecture_of(config),
        is_native=True,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_positions=config.max_position_embeddings,
        eos_ids=source.eos_ids(),
        dtype=dtype,
        num_parameters=reader.num_parameters,
    )
    rotary = RotaryTable(inv_freq.to(device), scaling)
    return DecoderTensors(info, shape, embedding, layers, norm, lm_head, rotary)


def describe(source: ModelSource, dtype: torch.dtype) -> ModelInfo:
    """The info of a model of a native family, from its config alone: no weight is read or made.

    It is read onto the device "meta", where tensors have shapes and no memory. Raises
    ModelNotSupported for other families.
    """
    shapes = replace(source, path=None, gguf=None)
    info = read_decoder(shapes, dtype, torch.device("meta"), lambda _: None).info
    return replace(info, eos_ids=source.eos_ids())


def check_decoder(config: Any) -> None:
    """Raise ModelNotSupported naming what of `config` the native decoder does not compute."""
    name = architecture_of(config)
    if name not in ARCHITECTURES:
        raise ModelNotSupported(f"{name} is not one of {', '.join(ARCHITECTURES)}")
    check_sliding_window(config)
    activation = config.hidden_act
    if activation not in ("silu", "swish"):
        raise ModelNotSupported(f"{name} with activation {activation!r}; only silu is computed")
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ModelNotSupported(
            f"{name} with rope scaling {rope_type!r}; possible are {', '.join(ROPE_TYPES)}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelNotSupported(f"{name} with quantized weights")


def decoder_shape(config: Any) -> DecoderShape:
    """Shapes and switches of a checked config of any of ARCHITECTURES."""
    name = architecture_of(config)
    attention_bias = bool(getattr(config, "attention_bias", False))
    num_heads = config.num_attention_heads
    return DecoderShape(
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=config.num_key_value_heads or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        eps=config.rms_norm_eps,
        qkv_bias=attention_bias or name == "Qwen2ForCausalLM",
        o_bias=attention_bias and name != "Qwen2ForCausalLM",
        mlp_bias=bool(getattr(config, "mlp_bias", False)) and name == "LlamaForCausalLM",
        qk_norm=name == "Qwen3ForCausalLM",
        is_tied=bool(config.tie_word_embeddings),
    )


def rope_frequencies(config: Any, head_dim: int) -> tuple[Tensor, float]:
    """(inv_freq [D/2] float32, attention scaling), made by transformers' own rotary module."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    module = LlamaRotaryEmbedding(config)
    inv_freq = module.inv_freq.detach().float()
    if 2 * inv_freq.shape[0] != head_dim:
        raise ModelNotSupported(
            f"rotary embedding of {2 * inv_freq.shape[0]} features in heads of {head_dim}"
        )
    return inv_freq, float(module.attention_scaling)


def _load_head(reader: TensorSource, shape: DecoderShape, embedding: Tensor) -> Tensor:
    """[V, H]; the embedding itself if tied, unless the checkpoint brings another one."""
    if shape.is_tied and "lm_head.weight" not in reader:
        return embedding
    head = reader.take("lm_head.weight", (shape.vocab_size, shape.hidden_size))
    if shape.is_tied and torch.equal(head, embedding):
        reader.num_parameters -= head.numel()
        return embedding
    return head


def _load_layer(reader: TensorSource, prefix: str, shape: DecoderShape) -> LayerTensors:
    hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    q, kv = shape.num_heads * head_dim, shape.num_kv_heads * head_dim

    def take(name: str, size: tuple[int, ...]) -> Tensor:
        tensor = reader.take(prefix + name, size)
        is_rotated = name.startswith(("self_attn.q_", "self_attn.k_"))
        return pair_halves(tensor, head_dim) if is_rotated else tensor

    def both(name: str, num_out: int, num_in: int, *, has_bias: bool) -> WeightAndBias:
        weight = take(f"{name}.weight", (num_out, num_in))
        return weight, take(f"{name}.bias", (num_out,)) if has_bias else None

    parts = [
        both(f"self_attn.{name}_proj", size, hidden, has_bias=shape.qkv_bias)
        for name, size in (("q", q), ("k", kv), ("v", kv))
    ]
    biases = [bias for _, bias in parts if bias is not None]
    qkv = torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None
    qk_norm = None
    if shape.qk_norm:
        q_norm = take("self_attn.q_norm.weight", (head_dim,))
        k_norm = take("self_attn.k_norm.weight", (head_dim,))
        repeats = (q_norm.expand(shape.num_heads, -1), k_norm.expand(shape.num_kv_heads, -1))
        qk_norm = torch.cat(repeats)
    return LayerTensors(
        input_norm=take("input_layernorm.weight", (hidden,)),
        qkv=qkv,
        qk_norm=qk_norm,
        o=both("self_attn.o_proj", hidden, q, has_bias=shape.o_bias),
        post_norm=take("post_attention_layernorm.weight", (hidden,)),
        gate=both("mlp.gate_proj", inner, hidden, has_bias=shape.mlp_bias),
        up=both("mlp.up_proj", inner, hidden, has_bias=shape.mlp_bias),
        down=both("mlp.down_proj", hidden, inner, has_bias=shape.mlp_bias),
    )
