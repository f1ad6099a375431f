"""The tensors of a native decoder's checkpoint, in one layout for all families.

A checkpoint's fused tensors are split; projections that read the same input are fused where a
decoder packs them: q, k, v into one, gate and up into one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from radixserve.errors import InvalidRequest
from radixserve.models.base import (
    KVShape,
    ModelInfo,
    StateShape,
    distinct_variants,
    layer_windows,
)
from radixserve.models.decoder_shape import DecoderShape, check_decoder, decoder_shape
from radixserve.models.families import (
    DeltaNetParts,
    Mixer,
    NoMixer,
    ShortConvParts,
    StateSpaceParts,
    attends,
)
from radixserve.models.mlp_tensors import (
    ExpertTensors,
    MlpTensors,
    WeightAndBias,
    computed,
    read_experts,
    read_mlp,
)
from radixserve.models.rope import RotaryTable, rope_frequencies
from radixserve.models.source import ModelSource, TensorSource
from radixserve.models.weights import architecture_of
from radixserve_kernels.attention_features import PLAIN, AttentionFeatures
from radixserve_kernels.decoder_layer import ExpertsBeside, LayerInput, LayerInputs
from radixserve_kernels.delta_net import DeltaNet
from radixserve_kernels.freed_memory import return_freed_memory
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
from radixserve_kernels.state_space import StateSpace
from radixserve_kernels.torch_ops import pair_halves


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's weights and biases; Q = Hq * D and KV = Hkv * D features, H hidden.

    Norms are [H] float32, None where the family has none. Rows of q and k are in the order that
    `apply_rotary` wants. An MLP alone has weights without rows for attention, and the other way
    round.
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
    more: tuple[WeightAndBias, ...] = ()  # of the fused product, after v: attention's gate [Q, H],
    # or z [Q, H], b and a [Hv, H] of a delta net, z and dt of a state space; all of the latter's
    # where it is beside attention
    recurrence: DeltaNet | StateSpace | None = None  # instead of attention or beside it
    beside: WeightAndBias | None = None  # as o, of a recurrence beside attention
    short_conv: Tensor | None = None  # [kernel, C] of one instead of attention; q, k, v: b, c, x
    num_kv_heads: int = 0  # see DecoderLayer, here and below
    head_dim: int = 0
    kv_source: int | None = None
    has_v_norm: bool = False
    experts_beside: ExpertsBeside[ExpertTensors] | None = None
    own_input: LayerInput[WeightAndBias] | None = None
    scale: float = 1.0

    @property
    def norms(self) -> dict[str, Tensor | None]:
        """By their names here."""
        names = ("pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")
        return {name: getattr(self, name) for name in (*names, "qk_norm")}

    @property
    def projections(self) -> tuple[WeightAndBias, ...]:
        beside = () if self.beside is None else (self.beside,)
        own = self.own_input
        more: tuple[WeightAndBias, ...] = () if own is None else (own.gate, own.up)
        if self.experts_beside is not None:
            more += self.experts_beside.experts.projections
        attention = self.q, self.k, self.v, *self.more, self.o, *beside
        return *attention, *self.mlp.projections, *more


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
    layer_inputs: LayerInputs[Any, Any] | None = None


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
    tensors.skip(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|mtp\..*")
    if sharing := "|".join(str(i) for i, s in enumerate(shape.kv_sources) if s is not None):
        tensors.skip(rf"model\.layers\.({sharing})\.self_attn\.([kv]_proj|k_norm)\.weight")
    embedding = reader.matrix("model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size))
    embedding, lm_head = make_ends(embedding, _load_head(reader, shape, embedding))
    return_freed_memory()  # the largest matrices of most models, as they were read
    norm = tensors.take(f"model.{shape.family.final_norm}.weight", (shape.hidden_size,)).float()
    norm = computed(norm, lambda norm: norm + shape.family.norm_offset)
    layers = tuple(
        make_layer(_LayerReader(reader, shape, number).read()) for number in range(shape.num_layers)
    )
    layer_inputs = _read_layer_inputs(reader, shape)
    tensors.finish()
    stores = [
        attends(parts) and source is None
        for parts, source in zip(shape.mixers, shape.kv_sources, strict=True)
    ]
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
        sampling=source.sampling(),
        dtype=dtype,
        num_parameters=tensors.num_parameters - reader.num_twice,
        weight_forms=tuple(sorted(reader.forms.items())),
        attention_features=tuple(sorted(shape.feature_names)),
        attention_variants=distinct_variants(shape.features),
        num_kv_layers=sum(stores) if not all(stores) else None,
        kv_shapes=_kv_shapes(shape, stores),
        states=_state_shapes(shape),
        uncut_rows=getattr(source.config, "uncut_rows", 0),
        **layer_windows(
            features for features, has_kv in zip(shape.features, stores, strict=True) if has_kv
        ),
    )
    return DecoderTensors(info, shape, embedding, layers, norm, lm_head, rotaries, layer_inputs)


def _read_layer_inputs(reader: _FormReader, shape: DecoderShape) -> LayerInputs[Any, Any] | None:
    size = shape.layer_input_size
    if not size:
        return None
    num_columns = shape.num_layers * size
    name = "model.per_layer_model_projection.weight"
    return LayerInputs(
        rows=reader.matrix(
            "model.embed_tokens_per_layer.weight", (shape.num_input_rows, num_columns)
        ),
        projection=(reader.matrix(name, (num_columns, shape.hidden_size)), None),
        norm=reader.take("model.per_layer_projection_norm.weight", (size,)).float(),
        rows_scale=reader.rounded(size**0.5),
        projection_scale=shape.hidden_size**-0.5,
        scale=2.0**-0.5,
    )


def _kv_shapes(shape: DecoderShape, stores: Sequence[bool]) -> tuple[KVShape, ...]:
    """`ModelInfo.kv_shapes`. stores: whether each layer stores K and V."""
    if len(set(shape.heads)) == 1:
        return ()
    return tuple(
        KVShape(*heads) for heads, has_kv in zip(shape.heads, stores, strict=True) if has_kv
    )


def _state_shapes(shape: DecoderShape) -> tuple[StateShape, ...]:
    return tuple(
        StateShape(layer, kind, 0, size, torch.float32)
        for layer, parts in enumerate(shape.mixers)
        if parts is not None
        for kind, size in zip(("conv", "recurrent"), parts.state_shapes, strict=False)
    )


def check_tensors(source: ModelSource, dtype: torch.dtype) -> None:
    """Compare the names and shapes that a model of a native family asks for with the headers of its
    files. Nothing is read or made. Raises ModelNotSupported naming everything that is wrong."""
    if source.path is not None:
        read_decoder(source, dtype, torch.device("meta"), lambda _: None)


def describe(source: ModelSource, dtype: torch.dtype) -> ModelInfo:
    """The info of a model of a native family, from its config alone: no weight is read or made.

    It is read onto the device "meta", where tensors have shapes and no memory. Raises
    ModelNotSupported for other families.
    """
    shapes = replace(source, path=None, gguf=None)
    info = read_decoder(shapes, dtype, torch.device("meta"), lambda _: None).info
    return replace(info, eos_ids=source.eos_ids(), sampling=source.sampling())


def _decay(logarithm: Tensor) -> Tensor:
    return computed(logarithm, lambda logarithm: -logarithm.exp())


def _rounded_scale(shape: DecoderShape, dtype: torch.dtype) -> DecoderShape:
    if not shape.family.has_rounded_scale:
        return shape
    return replace(shape, embedding_scale=float(torch.tensor(shape.embedding_scale, dtype=dtype)))


def _rotary_tables(
    source: ModelSource, shape: DecoderShape, device: torch.device
) -> tuple[RotaryTable, ...]:
    """One for each of shape.ropes."""
    factors, tables = source.rope_factors(), []
    for number, rope in enumerate(shape.ropes):
        _, head_dim = shape.heads[shape.rotary.index(number)]
        rotary_dim = shape.rotary_dim if head_dim == shape.head_dim else head_dim
        inv_freq, scaling = rope_frequencies(source.config, rotary_dim, rope)
        if factors is not None and rope.get("rope_type") != "proportional":
            inv_freq = inv_freq / factors
        tables.append(RotaryTable(inv_freq.to(device), scaling, head_dim))
    return tuple(tables)


class _FormReader:
    """Takes matrices from a source, and counts them by form."""

    def __init__(self, source: TensorSource, dtype: torch.dtype, *, to_int8: bool) -> None:
        self.take = source.take
        self.forms: Counter[str] = Counter()  # form, if not the dtype -> parameters
        self.num_twice = 0  # parameters of a head that is the embedding
        self._source, self._to_int8 = source, to_int8
        self._torch_dtype = dtype
        self._dtype = str(dtype).removeprefix("torch.")

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def rounded(self, number: float) -> float:
        """To the dtype of the weights."""
        return float(torch.tensor(number, dtype=self._torch_dtype))

    def matrix(self, name: str, shape: tuple[int, ...]) -> AnyWeight:
        """In the form that it is computed with. Raises InvalidRequest where it has none."""
        weight = self._computed(name, self._source.take_weight(name, shape))
        self._count(weight, 1)
        return weight

    def matrices(
        self, name: str, shape: tuple[int, int, int], *, is_transposed: bool = False
    ) -> list[AnyWeight]:
        """See `MatrixReader`."""
        stacked = dense(self._source.take_weight(name, shape))
        each = [self._computed(name, matrix.T if is_transposed else matrix) for matrix in stacked]
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
    is_read = not (isinstance(head, Tensor) and head.is_meta)
    if shape.is_tied and is_read and is_equal(head, embedding):
        reader.drop(head)
        return embedding
    return head


_NOTHING: WeightAndBias = (torch.empty(0, 0), None)


def paired_rows(shape: DecoderShape, number: int, rows: Tensor) -> Tensor:
    """Rows of q or k [n * D, ...] of a layer such that those of a pair are neighbours."""
    if shape.family.has_interleaved_rope:
        return rows
    if shape.rotary_dim == shape.head_dim:
        return pair_halves(rows, shape.heads[number][1])
    heads = rows.view(-1, shape.head_dim, *rows.shape[1:])
    turned, rest = heads[:, : shape.rotary_dim], heads[:, shape.rotary_dim :]
    turned = pair_halves(turned.flatten(0, 1), shape.rotary_dim).view(turned.shape)
    return torch.cat((turned, rest), 1).view(rows.shape)


def _rows_of(both: WeightAndBias, rows: Tensor) -> WeightAndBias:
    weight, bias = both
    return select_rows(weight, rows), None if bias is None else dense(select_rows(bias, rows))


class _LayerReader:
    """Reads one layer."""

    def __init__(self, reader: _FormReader, shape: DecoderShape, number: int) -> None:
        self._reader, self._shape, self._number = reader, shape, number
        self._prefix = f"model.layers.{number}."

    def read(self) -> LayerTensors:
        names, parts = self._shape.family.norms, self._shape.mixers[self._number]
        return LayerTensors(
            pre_attention_norm=self._norm(names.pre_attention),
            post_attention_norm=self._norm(names.post_attention),
            pre_mlp_norm=self._norm(names.pre_mlp),
            post_mlp_norm=self._norm(names.post_mlp),
            mlp=self._mlp(),
            experts_beside=self._experts_beside(),
            own_input=self._own_input(),
            scale=self._scale(),
            **self._mixer(parts),
        )

    def _scale(self) -> float:
        if not self._shape.family.has_layer_scale:
            return 1.0
        scale = self._reader.take(f"{self._prefix}layer_scalar", (1,))
        return 1.0 if scale.is_meta else float(scale)

    def _own_input(self) -> LayerInput[WeightAndBias] | None:
        size, hidden = self._shape.layer_input_size, self._shape.hidden_size
        if not size:
            return None
        return LayerInput(
            gate=self._both("per_layer_input_gate", size, hidden, has_bias=False),
            up=self._both("per_layer_projection", hidden, size, has_bias=False),
            norm=self._weights("post_per_layer_input_norm", (hidden,)),
        )

    def _experts_beside(self) -> ExpertsBeside[ExpertTensors] | None:
        parts, hidden = self._shape.experts_beside, self._shape.hidden_size
        if parts is None:
            return None
        count, inner = parts.routing.num_experts, parts.intermediate_size
        take, prefix = self._reader.take, self._prefix
        sizes = (count, 2 * inner, hidden), (count, hidden, inner)
        gate_up = self._reader.matrices(f"{prefix}experts.gate_up_proj", sizes[0])
        down = self._reader.matrices(f"{prefix}experts.down_proj", sizes[1])
        experts = tuple(
            MlpTensors(
                gate=(map_parts(both, lambda part: part[:inner]), None),
                up=(map_parts(both, lambda part: part[inner:]), None),
                down=(down_proj, None),
            )
            for both, down_proj in zip(gate_up, down, strict=True)
        )
        return ExpertsBeside(
            ExpertTensors(
                parts.routing,
                (take(f"{prefix}router.proj.weight", (count, hidden)), None),
                experts,
                expert_scale=take(f"{prefix}router.per_expert_scale", (count,)).float(),
            ),
            router_norm=computed(
                take(f"{prefix}router.scale", (hidden,)).float(), lambda norm: norm * hidden**-0.5
            ),
            pre_norm=self._weights("pre_feedforward_layernorm_2", (hidden,)),
            post_mlp_norm=self._weights("post_feedforward_layernorm_1", (hidden,)),
            post_norm=self._weights("post_feedforward_layernorm_2", (hidden,)),
        )

    def _mixer(self, parts: Mixer | None) -> dict[str, Any]:
        if isinstance(parts, DeltaNetParts):
            return self._delta_net(parts)
        if isinstance(parts, ShortConvParts):
            return self._short_conv(parts)
        if isinstance(parts, StateSpaceParts):
            return self._state_space(parts)
        return self._attention() if parts is None else self._no_mixer(parts)

    def _no_mixer(self, _parts: NoMixer) -> dict[str, Any]:
        nothing = dict.fromkeys(("q", "k", "v", "o"), _NOTHING)
        return {"qk_norm": None, "features": PLAIN, "rotary": None, **nothing}

    def _short_conv(self, parts: ShortConvParts) -> dict[str, Any]:
        size = parts.channels
        whole = self._both("conv.in_proj", 3 * size, self._shape.hidden_size, has_bias=False)
        b, c, x = (_rows_of(whole, rows) for rows in torch.arange(3 * size).split(size))
        weights = self._reader.take(f"{self._prefix}conv.conv.weight", (size, 1, parts.kernel))
        return {
            "qk_norm": None,
            "q": b,
            "k": c,
            "v": x,
            "features": PLAIN,
            "rotary": None,
            "o": self._both("conv.out_proj", self._shape.hidden_size, size, has_bias=False),
            "short_conv": weights.float()[:, 0].T.contiguous(),
        }

    def _attention(self) -> dict[str, Any]:
        shape = self._shape
        hidden = shape.hidden_size
        kv_heads, head_dim = shape.heads[self._number]
        source = shape.kv_sources[self._number]
        q, kv = shape.num_heads * head_dim, kv_heads * head_dim
        module = shape.family.attention_module
        fused = f"{module}.qkv_proj" if shape.family.has_fused_qkv else None
        attention = [(f"{module}.{letter}_proj", q if letter == "q" else kv) for letter in "qkv"]
        more: tuple[WeightAndBias, ...] = ()
        if shape.family.has_output_gate:
            attention[0] = f"{module}.q_proj", 2 * q
        letters = 1 if source is not None else 2 if shape.k_for_v[self._number] else 3
        parts = self._parts(attention[:letters], fused, hidden, has_bias=shape.qkv_bias)
        if letters == 1:
            parts += [_NOTHING, _NOTHING]
        q_proj, k_proj, v_proj = parts if letters != 2 else [*parts, parts[1]]
        if shape.family.has_output_gate:  # of each head first q, then the gate
            halves = torch.arange(2 * q).view(shape.num_heads, 2, shape.head_dim)
            q_proj, gate = (_rows_of(q_proj, halves[:, half].flatten()) for half in range(2))
            more = (gate,)
        return {
            "qk_norm": self._qk_norm(),
            "q": self._turned(q_proj),
            "k": self._turned(k_proj) if source is None else k_proj,
            "v": v_proj,
            "more": more,
            "o": self._both(f"{module}.{shape.family.o_name}", hidden, q, has_bias=shape.o_bias),
            "features": self._features(),
            "rotary": shape.rotary[self._number],
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "kv_source": source,
            "has_v_norm": shape.family.has_v_norm,
        }

    def _delta_net(self, parts: DeltaNetParts) -> dict[str, Any]:
        hidden, prefix = self._shape.hidden_size, "linear_attn."
        keys, values = parts.num_k_heads * parts.k_dim, parts.num_v_heads * parts.v_dim
        channels, heads = 2 * keys + values, parts.num_v_heads
        if parts.is_grouped:  # all of a key head together
            qkvz, ba = (
                self._both(f"{prefix}{name}", size, hidden, has_bias=False)
                for name, size in (("in_proj_qkvz", channels + values), ("in_proj_ba", 2 * heads))
            )
            q, k, v, z = (_rows_of(qkvz, rows) for rows in parts.grouped_rows())
            b, a = (_rows_of(ba, rows) for rows in parts.grouped_gate_rows())
        else:
            qkv, z, b, a = (
                self._both(f"{prefix}in_proj_{name}", size, hidden, has_bias=False)
                for name, size in (("qkv", channels), ("z", values), ("b", heads), ("a", heads))
            )
            rows = torch.arange(channels).split((keys, keys, values))
            q, k, v = (_rows_of(qkv, some) for some in rows)
        take, name = self._reader.take, f"{self._prefix}{prefix}"
        conv = take(f"{name}conv1d.weight", (channels, 1, parts.kernel))
        net = DeltaNet(
            *(parts.num_k_heads, heads, parts.k_dim, parts.v_dim),
            conv=conv.float()[:, 0].T.contiguous(),
            decay=_decay(take(f"{name}A_log", (heads,)).float()),
            dt_bias=take(f"{name}dt_bias", (heads,)).float(),
            norm=take(f"{name}norm.weight", (parts.v_dim,)).float(),
        )
        out = self._both(f"{prefix}out_proj", hidden, values, has_bias=False)
        return {
            "qk_norm": None,
            "q": q,
            "k": k,
            "v": v,
            "more": (z, b, a),
            "o": out,
            "features": PLAIN,
            "rotary": None,
            "recurrence": net,
        }

    def _state_space(self, parts: StateSpaceParts) -> dict[str, Any]:
        """The checkpoint has z, x, B, C and dt; x, B and C go through the convolution, which takes
        the factors of its inputs into its weights."""
        hidden, module = self._shape.hidden_size, parts.module
        keys, values, channels = parts.keys, parts.values, parts.channels
        sizes = (values, values, keys, keys, parts.num_heads)
        whole = self._both(f"{module}.in_proj", sum(sizes), hidden, has_bias=parts.has_bias)
        z, x, b, c, dt = (_rows_of(whole, rows) for rows in torch.arange(sum(sizes)).split(sizes))
        take, name = self._reader.take, f"{self._prefix}{module}."
        order = torch.cat(torch.arange(channels).split((values, keys, keys))[::-1])  # C, B, x
        z_scale, *scales, step_scale = parts.in_scales
        factors = torch.tensor(scales).repeat_interleave(torch.tensor((values, keys, keys)))[
            :, None
        ]
        conv = take(f"{name}conv1d.weight", (channels, 1, parts.kernel)).float()[:, 0]
        conv_bias = take(f"{name}conv1d.bias", (channels,)) if parts.has_conv_bias else None
        net = StateSpace(
            *(parts.num_groups, parts.num_heads, parts.state_size, parts.head_dim),
            conv=computed(
                conv, lambda conv: (conv * factors.to(conv.device))[order].T.contiguous()
            ),
            conv_bias=None
            if conv_bias is None
            else computed(conv_bias, lambda conv_bias: conv_bias.float()[order]),
            decay=_decay(take(f"{name}A_log", (parts.num_heads,)).float()),
            dt_bias=take(f"{name}dt_bias", (parts.num_heads,)).float(),
            skip=take(f"{name}D", (parts.num_heads,)).float(),
            norm=take(f"{name}norm.weight", (values,)).float() if parts.has_norm else None,
            norm_size=values // parts.num_groups if parts.has_norm else 0,
            gates_first=parts.gates_first,
            step_limits=parts.step_limits,
            step_scale=step_scale,
            z_scale=z_scale,
            out_scale=parts.out_scale,
        )
        out = self._both(f"{module}.out_proj", hidden, values, has_bias=parts.has_bias)
        if parts.is_beside:
            return {
                **self._attention(),
                "more": (c, b, x, z, dt),
                "beside": out,
                "recurrence": net,
            }
        return {
            **self._no_mixer(NoMixer()),
            "q": c,
            "k": b,
            "v": x,
            "more": (z, dt),
            "o": out,
            "recurrence": net,
        }

    def _features(self) -> AttentionFeatures:
        features = self._shape.features[self._number]
        if not self._shape.family.has_sinks:
            return features
        sinks = self._reader.take(f"{self._prefix}self_attn.sinks", (self._shape.num_heads,))
        return replace(features, sinks=sinks.float())

    def _mlp(self) -> MlpTensors | ExpertTensors:
        shape = self._shape
        if not shape.has_mlp[self._number]:
            return MlpTensors(None, _NOTHING, _NOTHING)
        if (experts := shape.experts[self._number]) is not None:
            return read_experts(self._reader, self._prefix, experts, shape.hidden_size)
        size = shape.intermediate_sizes[self._number], shape.hidden_size
        names = shape.family.mlp_names
        return read_mlp(self._reader, self._prefix, names, size, has_biases=shape.mlp_bias)

    def _norm(self, name: str | None) -> Tensor | None:
        return None if name is None else self._weights(name, (self._shape.hidden_size,))

    def _weights(self, name: str, size: tuple[int, ...]) -> Tensor:
        """A norm's weights, float32."""
        weights = self._reader.take(f"{self._prefix}{name}.weight", size)
        offset = self._shape.family.norm_offset
        return computed(weights.float(), lambda norm: norm + offset)

    def _qk_norm(self) -> Tensor | None:
        shape, kind = self._shape, self._shape.qk_norm
        if kind is None:
            return None
        rows = []
        kv_heads, head_dim = shape.heads[self._number]
        has_kv = shape.kv_sources[self._number] is None
        counts = (("q", shape.num_heads), ("k", kv_heads))
        for name, heads in counts if has_kv else counts[:1]:
            sizes = {
                "shared": (head_dim,),
                "head": (heads, head_dim),
                "whole": (heads * head_dim,),
            }
            weights = self._weights(f"self_attn.{name}_{shape.family.qk_norm_name}", sizes[kind])
            weights = self._order(weights.reshape(-1)).view(-1, head_dim)
            rows.append(weights.expand(heads, -1))
        if shape.family.has_v_norm and has_kv:
            rows.append(torch.ones_like(rows[0][:1]).expand(kv_heads, -1))
        return computed(rows[0], lambda _: torch.cat(rows))

    def _order(self, rows: Tensor) -> Tensor:
        return rows if rows.is_meta else paired_rows(self._shape, self._number, rows)

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
