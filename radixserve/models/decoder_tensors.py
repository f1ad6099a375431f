"""The tensors of a native decoder's checkpoint, in one layout for all families.

Tensors that a checkpoint has fused are taken apart; projections that read the same input are fused
where a decoder packs them: q, k, v into one, gate and up into one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from radixserve.errors import InvalidRequest
from radixserve.models.base import ModelInfo, distinct_variants, layer_windows
from radixserve.models.decoder_shape import DecoderShape, check_decoder, decoder_shape
from radixserve.models.mlp_tensors import ExpertTensors, MlpTensors, WeightAndBias, read_experts
from radixserve.models.rope import RotaryTable, rope_frequencies
from radixserve.models.source import ModelSource, TensorSource
from radixserve.models.weights import architecture_of
from radixserve_kernels.attention_features import AttentionFeatures
from radixserve_kernels.cpu_weights import return_freed_memory
from radixserve_kernels.quantized import (
    BITS,
    AnyWeight,
    dense,
    form_of,
    is_equal,
    map_parts,
    select_rows,
    to_int8,
)
from radixserve_kernels.torch_ops import pair_halves


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's weights and biases; Q = Hq * D and KV = Hkv * D features, H hidden.

    Norms are [H] float32, None where the family has none. Rows of q and k are in the order that
    `apply_rotary` wants.
    """

    pre_attention_norm: Tensor | None
    post_attention_norm: Tensor | None
    pre_mlp_norm: Tensor | None
    post_mlp_norm: Tensor | None
    qk_norm: Tensor | None  # [Hq + Hkv, D] float32: q's weight for the first Hq heads, then k's
    q: WeightAndBias  # [Q, H]
    k: WeightAndBias  # [KV, H]
    v: WeightAndBias  # [KV, H]
    o: WeightAndBias  # [H, Q]
    mlp: MlpTensors | ExpertTensors
    features: AttentionFeatures
    rotary: int | None  # see DecoderLayer

    @property
    def norms(self) -> dict[str, Tensor | None]:
        """By their names here."""
        names = ("pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")
        return {name: getattr(self, name) for name in (*names, "qk_norm")}

    @property
    def projections(self) -> tuple[WeightAndBias, ...]:
        return self.q, self.k, self.v, self.o, *self.mlp.projections


@dataclass(frozen=True, slots=True)
class DecoderTensors:
    """A checkpoint's tensors."""

    info: ModelInfo
    shape: DecoderShape
    embedding: Any  # [V, H], an AnyWeight or what `make_ends` made of it
    layers: tuple[Any, ...]  # made from each LayerTensors
    norm: Tensor  # [H] float32
    lm_head: Any  # [V, H], as the embedding; the embedding itself if tied
    rotaries: tuple[RotaryTable, ...]  # one for each of shape.ropes


def read_decoder(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    make_layer: Callable[[LayerTensors], Any],
    weight_dtype: str | None = None,
    make_ends: Callable[[AnyWeight, AnyWeight], tuple[Any, Any]] = lambda *ends: ends,
) -> DecoderTensors:
    """Read a model; embedding and head go through `make_ends` first, then the layers through
    `make_layer` one by one, so that no two copies of all of them exist at a time.

    weight_dtype: of matrices, "auto" (as they are stored, where that is 8 bits or less), "int8", or
    None for `dtype`.
    """
    config = source.config
    check_decoder(config)
    shape = _rounded_scale(decoder_shape(config), dtype)
    rotaries = _rotary_tables(source, shape, device)
    tensors = source.tensors(dtype, device, keeps_forms=weight_dtype is not None)
    reader = _FormReader(tensors, dtype, to_int8=weight_dtype == "int8")
    tensors.skip(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    embedding = reader.matrix("model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size))
    embedding, lm_head = make_ends(embedding, _load_head(reader, shape, embedding))
    return_freed_memory()  # the largest matrices of most models, as they were read
    norm = tensors.take("model.norm.weight", (shape.hidden_size,)).float()
    norm = norm + shape.family.norm_offset
    layers = tuple(
        make_layer(_LayerReader(reader, shape, number).read()) for number in range(shape.num_layers)
    )
    tensors.finish()
    info = ModelInfo(
        architecture=architecture_of(config),
        is_native=True,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        max_positions=shape.max_positions,
        eos_ids=source.eos_ids(),
        dtype=dtype,
        num_parameters=tensors.num_parameters - reader.num_twice,
        weight_forms=tuple(sorted(reader.forms.items())),
        attention_features=tuple(sorted(shape.feature_names)),
        attention_variants=distinct_variants(shape.features),
        **layer_windows(shape.features),
    )
    return DecoderTensors(info, shape, embedding, layers, norm, lm_head, rotaries)


def describe(source: ModelSource, dtype: torch.dtype) -> ModelInfo:
    """The info of a model of a native family, from its config alone: no weight is read or made.

    It is read onto the device "meta", where tensors have shapes and no memory. Raises
    ModelNotSupported for other families.
    """
    shapes = replace(source, path=None, gguf=None)
    info = read_decoder(shapes, dtype, torch.device("meta"), lambda _: None).info
    return replace(info, eos_ids=source.eos_ids())


def _rounded_scale(shape: DecoderShape, dtype: torch.dtype) -> DecoderShape:
    if not shape.family.has_rounded_scale:
        return shape
    return replace(shape, embedding_scale=float(torch.tensor(shape.embedding_scale, dtype=dtype)))


def _rotary_tables(
    source: ModelSource, shape: DecoderShape, device: torch.device
) -> tuple[RotaryTable, ...]:
    factors, tables = source.rope_factors(), []
    for rope in shape.ropes:
        inv_freq, scaling = rope_frequencies(source.config, shape.rotary_dim, rope)
        if factors is not None:
            inv_freq = inv_freq / factors
        tables.append(RotaryTable(inv_freq.to(device), scaling, shape.head_dim))
    return tuple(tables)


class _FormReader:
    """Takes matrices from a source, and counts them by form."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, *, to_int8: bool) -> None:
        self.take = source.take
        self.forms: Counter[str] = Counter()  # form, if not the dtype -> parameters
        self.num_twice = 0  # parameters of a head that is the embedding
        self._source, self._to_int8 = source, to_int8
        self._dtype = str(dtype).removeprefix("torch.")

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def matrix(self, name: str, shape: tuple[int, ...]) -> AnyWeight:
        """In the form that it is computed with. Raises InvalidRequest where it has none."""
        weight = self._computed(name, self._source.take_weight(name, shape))
        self._count(weight, 1)
        return weight

    def matrices(
        self, name: str, shape: tuple[int, int, int], *, is_transposed: bool = False
    ) -> list[AnyWeight]:
        """See `MatrixReader`."""
        found = dense(self._source.take_weight(name, shape))
        each = [self._computed(name, one.T if is_transposed else one) for one in found]
        for weight in each:
            self._count(weight, 1)
        return each

    def drop(self, weight: AnyWeight) -> None:
        """Uncount a matrix that is the same as another one."""
        self.num_twice += weight.shape.numel()
        self._count(weight, -1)

    def _computed(self, name: str, weight: AnyWeight) -> AnyWeight:
        if not self._to_int8:
            return weight
        try:
            return to_int8(weight)
        except ValueError as error:
            raise InvalidRequest(f"tensor {name} has {error}") from error

    def _count(self, weight: AnyWeight, factor: int) -> None:
        if form_of(weight) in BITS and form_of(weight) != self._dtype:
            self.forms[form_of(weight)] += factor * weight.shape.numel()


def _load_head(reader: _FormReader, shape: DecoderShape, embedding: AnyWeight) -> AnyWeight:
    """[V, H]; the embedding itself if tied, unless the checkpoint brings another one."""
    if shape.is_tied and "lm_head.weight" not in reader:
        return embedding
    head = reader.matrix("lm_head.weight", (shape.vocab_size, shape.hidden_size))
    if shape.is_tied and is_equal(head, embedding):
        reader.drop(head)
        return embedding
    return head


class _LayerReader:
    """Reads one layer."""

    def __init__(self, reader: _FormReader, shape: DecoderShape, number: int) -> None:
        self._reader, self._shape, self._number = reader, shape, number
        self._prefix = f"model.layers.{number}."

    def read(self) -> LayerTensors:
        shape = self._shape
        names, hidden = shape.family.norms, shape.hidden_size
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        fused = "self_attn.qkv_proj" if "qkv" in shape.family.fused_projections else None
        attention = [(f"self_attn.{one}_proj", q if one == "q" else kv) for one in "qkv"]
        q_proj, k_proj, v_proj = self._parts(attention, fused, hidden, has_bias=shape.qkv_bias)
        return LayerTensors(
            pre_attention_norm=self._norm(names.pre_attention),
            post_attention_norm=self._norm(names.post_attention),
            pre_mlp_norm=self._norm(names.pre_mlp),
            post_mlp_norm=self._norm(names.post_mlp),
            qk_norm=self._qk_norm(),
            q=self._turned(q_proj),
            k=self._turned(k_proj),
            v=v_proj,
            o=self._both("self_attn.o_proj", hidden, q, has_bias=shape.o_bias),
            mlp=self._mlp(),
            features=self._features(),
            rotary=shape.rotary[self._number],
        )

    def _features(self) -> AttentionFeatures:
        features = self._shape.features[self._number]
        if not self._shape.family.has_sinks:
            return features
        sinks = self._reader.take(f"{self._prefix}self_attn.sinks", (self._shape.num_heads,))
        return replace(features, sinks=sinks.float())

    def _mlp(self) -> MlpTensors | ExpertTensors:
        shape = self._shape
        if (experts := shape.experts[self._number]) is not None:
            return read_experts(self._reader, self._prefix, experts, shape.hidden_size)
        hidden, inner, has_bias = shape.hidden_size, shape.intermediate_size, shape.mlp_bias
        fused = "mlp.gate_up_proj" if "gate_up" in shape.family.fused_projections else None
        halves = [("mlp.gate_proj", inner), ("mlp.up_proj", inner)]
        gate, up = self._parts(halves, fused, hidden, has_bias=has_bias)
        return MlpTensors(gate, up, self._both("mlp.down_proj", hidden, inner, has_bias=has_bias))

    def _norm(self, name: str | None) -> Tensor | None:
        return None if name is None else self._weights(name, (self._shape.hidden_size,))

    def _weights(self, name: str, size: tuple[int, ...]) -> Tensor:
        """A norm's weights, float32."""
        found = self._reader.take(f"{self._prefix}{name}.weight", size)
        return found.float() + self._shape.family.norm_offset

    def _qk_norm(self) -> Tensor | None:
        shape, kind = self._shape, self._shape.qk_norm
        if kind is None:
            return None
        rows = []
        for name, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads)):
            sizes = {
                "shared": (shape.head_dim,),
                "head": (heads, shape.head_dim),
                "whole": (heads * shape.head_dim,),
            }
            weights = self._weights(f"self_attn.{name}_norm", sizes[kind])
            weights = self._order(weights.reshape(-1)).view(-1, shape.head_dim)
            rows.append(weights.expand(heads, -1))
        return torch.cat(rows)

    def _order(self, rows: Tensor) -> Tensor:
        """Rows of q or k [n * D, ...] such that those of a pair are neighbours."""
        shape = self._shape
        if shape.family.has_interleaved_rope:
            return rows
        if shape.rotary_dim == shape.head_dim:
            return pair_halves(rows, shape.head_dim)
        heads = rows.view(-1, shape.head_dim, *rows.shape[1:])
        turned, rest = heads[:, : shape.rotary_dim], heads[:, shape.rotary_dim :]
        turned = pair_halves(turned.flatten(0, 1), shape.rotary_dim).view(turned.shape)
        return torch.cat((turned, rest), 1).view(rows.shape)

    def _turned(self, both: WeightAndBias) -> WeightAndBias:
        weight, bias = both
        return map_parts(weight, self._order), None if bias is None else self._order(bias)

    def _both(self, name: str, num_out: int, num_in: int, *, has_bias: bool) -> WeightAndBias:
        weight = self._reader.matrix(f"{self._prefix}{name}.weight", (num_out, num_in))
        if not has_bias:
            return weight, None
        return weight, self._reader.take(f"{self._prefix}{name}.bias", (num_out,))

    def _parts(
        self, parts: list[tuple[str, int]], fused: str | None, num_in: int, *, has_bias: bool
    ) -> list[WeightAndBias]:
        """Projections of that many features each; of one tensor where it is `fused`."""
        if fused is None:
            return [self._both(name, size, num_in, has_bias=has_bias) for name, size in parts]
        sizes = [size for _, size in parts]
        weight, bias = self._both(fused, sum(sizes), num_in, has_bias=has_bias)
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        indices = torch.arange(sum(sizes)).split(sizes)
        weights = [select_rows(weight, rows) for rows in indices]
        return list(zip(weights, biases, strict=True))
