"""One native decoder for Llama, Mistral, Qwen2 and Qwen3, on the K and V of an attention backend.

Weights and shapes only: which tokens belong together is the batch's and the backend's business.
Projections that read the same input are fused at load: q, k, v into one, gate and up into one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch
from radixserve.errors import ModelNotSupported
from radixserve.models.base import LanguageModel, ModelInfo
from radixserve.models.source import ModelSource, TensorSource
from radixserve.models.weights import architecture_of, check_sliding_window
from radixserve_kernels.decoder_layer import DecoderLayer, DecoderSizes
from radixserve_kernels.linear import Linear
from radixserve_kernels.torch_ops import (
    apply_rotary,
    pair_halves,
    rms_norm,
    rotations,
    silu_and_mul,
)

WeightAndBias = tuple[Tensor, Tensor | None]

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
FIRST_POSITIONS = 2_048  # whose rotations are made at load


@dataclass(frozen=True, slots=True)
class DecoderShape(DecoderSizes):
    """What of a checkpoint's config decides its tensors and its arithmetic."""

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


@dataclass(frozen=True, slots=True)
class DecoderTensors:
    """A checkpoint as it was read."""

    info: ModelInfo
    shape: DecoderShape
    embedding: Tensor  # [V, H]
    layers: tuple[Any, ...]  # what was made of each LayerTensors
    norm: Tensor  # [H]
    lm_head: Tensor  # [V, H]
    rotary: RotaryTable


LayerWeights = DecoderLayer[Linear]


class RotaryTable:
    """The rotation of every position, [n, 1, D/2] complex64; as many as were needed so far."""

    def __init__(self, inv_freq: Tensor, scaling: float) -> None:
        """`inv_freq` [D/2] float32; cosines and sines are multiplied by `scaling`."""
        self._inv_freq, self._scaling = inv_freq, scaling
        self._rows = self._make(FIRST_POSITIONS)

    def at(self, positions: Tensor, end: int) -> Tensor:
        """[T, 1, D/2] of `positions` [T], all below `end`."""
        return self.up_to(end).index_select(0, positions)

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


class Decoder(LanguageModel):
    """See `LanguageModel`. Made by `load_decoder`."""

    def __init__(
        self,
        info: ModelInfo,
        shape: DecoderShape,
        embedding: Tensor,  # [V, H]
        layers: tuple[LayerWeights, ...],
        norm: Tensor,  # [H]
        lm_head: Linear,  # H -> V
        rotary: RotaryTable,
    ) -> None:
        self.info = info
        self._shape = shape
        self._embedding, self._layers, self._norm = embedding, layers, norm
        self._lm_head, self._rotary = lm_head, rotary
        self._eps = torch.tensor(shape.eps, dtype=torch.float32, device=embedding.device)

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        x = F.embedding(batch.input_ids, self._embedding)  # [T, H]
        turns = self._rotary.at(batch.positions, int(batch.host.seq_lens.max()))
        for number, layer in enumerate(self._layers):
            attended = self._attend(layer, x, turns, backend, number)  # [T, Hq * D]
            if number == len(self._layers) - 1:  # from here on every token is on its own
                attended, x = sampled_rows(attended, batch), sampled_rows(x, batch)
            x = layer.o(attended, x)
            normed = rms_norm(x, layer.post_norm, self._eps)
            x = layer.down(silu_and_mul(layer.gate_up(normed)), x)
        return self._lm_head(rms_norm(x, self._norm, self._eps)).float()  # [S, V]

    def _attend(
        self,
        layer: LayerWeights,
        x: Tensor,  # [T, H]
        turns: Tensor,
        backend: AttentionBackend,
        number: int,
    ) -> Tensor:
        shape = self._shape
        num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
        qkv = layer.qkv(rms_norm(x, layer.input_norm, self._eps))
        heads = qkv.view(-1, num_heads + 2 * num_kv_heads, shape.head_dim)
        qk, v = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if layer.qk_norm is not None:
            qk = rms_norm(qk, layer.qk_norm, self._eps)
        qk = apply_rotary(qk, turns)
        out = backend.run(qk[:, :num_heads], qk[:, num_heads:], v, number)  # [T, Hq, D]
        return out.flatten(1)


def sampled_rows(x: Tensor, batch: ForwardBatch) -> Tensor:
    """The rows of x [T, n] after which a token is drawn: [S, n]."""
    rows = batch.logits_indices
    return x if len(rows) == len(x) else x.index_select(0, rows)


def load_decoder(source: ModelSource, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Read a model of one of ARCHITECTURES; see `check_decoder` for what is refused."""
    read = read_decoder(source, dtype, device, _layer_weights)
    head = Linear(read.lm_head)
    return Decoder(read.info, read.shape, read.embedding, read.layers, read.norm, head, read.rotary)


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


def _layer_weights(tensors: LayerTensors) -> LayerWeights:
    return LayerWeights(
        input_norm=tensors.input_norm,
        qkv=Linear(*tensors.qkv),
        qk_norm=tensors.qk_norm,
        o=Linear(*tensors.o),
        post_norm=tensors.post_norm,
        gate_up=Linear(*stacked(tensors.gate, tensors.up)),
        down=Linear(*tensors.down),
    )


def stacked(first: WeightAndBias, second: WeightAndBias) -> WeightAndBias:
    """One projection that gives the features of both, one after the other; bias both or neither."""
    bias = None
    if first[1] is not None and second[1] is not None:
        bias = torch.cat((first[1], second[1]))
    return torch.cat((first[0], second[0])), bias


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
