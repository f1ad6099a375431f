"""All layers of a decoder in one call of the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve_kernels.cpu_attention import (
    CpuAttentionPlan,
    FeaturesRecord,
    LayerKVRecord,
    features_record,
    kv_type,
)
from radixserve_kernels.cpu_experts import PackedExperts
from radixserve_kernels.cpu_library import address, cpu_library, finalize, is_bf16
from radixserve_kernels.cpu_lora import AdapterRows, PackedLora, group_records
from radixserve_kernels.cpu_recurrent import CompiledStates
from radixserve_kernels.cpu_weights import PackedWeight, WeightRecord
from radixserve_kernels.decoder_layer import (
    ACTIVATIONS,
    NORM_TYPES,
    DecoderLayer,
    DecoderSizes,
    ExpertsBeside,
    LayerInput,
    LayerInputs,
)
from radixserve_kernels.stored_kv import stored_width

_NORMS = (
    *("pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm", "qk_norm"),
)


class _Shape(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("num_layers", "num_heads", "num_kv_heads", "head_dim"),
                *("hidden_size", "intermediate_size", "vocab_size"),
                *("norm_type", "activation", "has_whole_qk_norm", "has_parallel_residual"),
                "has_gated_mlp",
            )
        ),
        *(
            (name, ctypes.c_float)
            for name in (
                *("eps", "attention_scale", "embedding_scale", "residual_scale"),
                *("logit_scale", "logit_soft_cap"),
                *("attention_out_scale", "gate_scale", "mlp_out_scale"),
            )
        ),
    )


class _Mlp(ctypes.Structure):
    _fields_ = (
        *((name, WeightRecord) for name in ("gate_up", "down")),
        ("experts", ctypes.c_void_p),  # instead, or null
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _NORMS),
        *((name, WeightRecord) for name in ("qkv", "o", "beside")),
        ("mlp", _Mlp),
        ("features", FeaturesRecord),
        *((name, ctypes.c_int64) for name in ("rotary", "has_gate")),
        *((name, ctypes.c_void_p) for name in ("recurrence", "short_conv")),  # or null
        *(
            (name, ctypes.c_int64)
            for name in ("num_kv_heads", "head_dim", "kv_layer", "stores_kv", "has_v_norm")
        ),
        *((name, ctypes.c_void_p) for name in ("experts_beside", "own_input")),  # or null
        ("scale", ctypes.c_double),
    )


class _ExpertsBeside(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("experts", "router_norm", "pre_norm")),
        *((name, ctypes.c_void_p) for name in ("post_mlp_norm", "post_norm")),
    )


class _LayerInput(ctypes.Structure):
    _fields_ = (("gate", WeightRecord), ("up", WeightRecord), ("norm", ctypes.c_void_p))


class _LayerInputs(ctypes.Structure):
    _fields_ = (
        *((name, WeightRecord) for name in ("rows", "projection")),
        ("norm", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("rows_scale", "projection_scale", "scale")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_sampled")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("input_ids", "positions", "slots", "sampled", "rotations", "logits"),
                *("window_slots", "window_page_ids", "states", "adapters"),
            )
        ),
        ("num_adapters", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("given_rows", "given")),
        *((name, ctypes.c_int64) for name in ("num_given", "num_threads")),
    )


class DecoderKV:
    """K and V of every layer as C takes them."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor, bool]], dtype: torch.dtype) -> None:
        """layers: k and v [num_slots, Hkv, W], and whether they are in window pages. dtype: of the
        decoder that reads them."""
        self._borrowed = layers
        self.heads = [k.shape[1:] for k, _, _ in layers]  # Hkv, W of each layer
        self.stored_dtype = layers[0][0].dtype if layers else dtype
        records = [
            LayerKVRecord(k.data_ptr(), v.data_ptr(), windowed, kv_type(k.dtype, dtype))
            for k, v, windowed in layers
        ]
        self.records = (LayerKVRecord * len(records))(*records)


class CompiledStep(NamedTuple):
    """A planned step: its attention, and the memory of K and V. Planned anew in place."""

    plan: CpuAttentionPlan
    kv: DecoderKV


class CompiledRows(NamedTuple):
    """Tokens whose embeddings are given."""

    rows: NDArray[np.int64]  # [T] of each token, its row of `embeddings`, -1: of none
    embeddings: Tensor  # [n, 1 + L, H] float32, contiguous: for the first layer, and what is added
    # after each of the first L layers


class FusedDecoder:
    """A decoder whose step is one call, from token ids to logits. One thread."""

    def __init__(
        self,
        shape: DecoderSizes,
        layers: Sequence[DecoderLayer[PackedWeight, PackedExperts]],
        embedding: PackedWeight | Tensor,  # [V, H], packed in one of FORMS or as rows
        norm: Tensor,  # [H] float32
        head: PackedWeight,  # H -> V
        dtype: torch.dtype,  # of activations
        layer_inputs: LayerInputs[PackedWeight, PackedWeight | Tensor] | None = None,
    ) -> None:
        library = cpu_library(dtype)
        self._is_bf16, self._vocab_size = is_bf16(dtype), shape.vocab_size
        self._library = library
        self._step = _Step()  # C reads it during a call
        self._rotations: Sequence[Tensor] | None = None  # of the last call
        self._tables: Any = None  # their addresses
        sizes = _shape_record(shape)
        borrowed: list[Any] = [layers, embedding, norm, head, layer_inputs]
        kv_layers = _kv_layers(layers)
        records = (_Layer * len(layers))(
            *(
                _layer_record(shape, layer, kv_layer, borrowed)
                for layer, kv_layer in zip(layers, kv_layers, strict=True)
            )
        )
        self._kv_heads = {
            kv_layer: (record.num_kv_heads, record.head_dim)
            for kv_layer, layer, record in zip(kv_layers, layers, records, strict=True)
            if layer.attends
        }
        self._checked_kv: DecoderKV | None = None
        inputs = None if layer_inputs is None else _inputs_record(layer_inputs)
        self._borrowed = borrowed  # by C
        self._pointer = library.radixserve_decoder(
            *(self._is_bf16, ctypes.byref(sizes), records, ctypes.byref(_rows_record(embedding))),
            *(norm.data_ptr(), ctypes.byref(head.record)),
            None if inputs is None else ctypes.byref(inputs),
        )
        finalize(self, library.radixserve_delete_decoder, self._pointer)

    def run(
        self,
        input_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        slots: Tensor,  # [T] int64
        sampled: Tensor,  # [S] int64, ascending
        rotations: Sequence[Tensor],  # of each rotary [n, 1, D/2] complex64, of every position;
        # another object where one of them changed
        attention: CompiledStep,
        window_slots: Tensor | None = None,  # [T] int64, of layers in window pages
        window_page_ids: NDArray[np.int32] | None = None,  # in the places of the plan's
        states: CompiledStates | None = None,  # of layers that have some
        adapters: Sequence[AdapterRows[PackedLora]] = (),
        given: CompiledRows | None = None,
    ) -> Tensor:
        """Logits [S, V] float32 after the tokens `sampled`; writes K and V of the new tokens.

        Raises ValueError if a layer's memory is for other heads than it has.
        """
        num_sampled = sampled.numel()
        size = (num_sampled, self._vocab_size)
        logits = torch.from_numpy(np.empty(size, np.float32))  # torch.empty gives Python's lock up
        step = self._step
        if rotations is not self._rotations:
            self._rotations = rotations
            self._tables = (ctypes.c_void_p * len(rotations))(*(r.data_ptr() for r in rotations))
            step.rotations = ctypes.addressof(self._tables)
        step.num_tokens, step.num_sampled = input_ids.numel(), num_sampled
        step.input_ids, step.positions = input_ids.data_ptr(), positions.data_ptr()
        step.slots, step.sampled = slots.data_ptr(), sampled.data_ptr()
        step.logits = logits.data_ptr()
        step.window_slots = address(window_slots)
        step.window_page_ids = None if window_page_ids is None else window_page_ids.ctypes.data
        step.states = None if states is None else ctypes.addressof(states.record)
        groups = group_records(adapters) if adapters else None  # lives as long as the call
        step.adapters = None if groups is None else ctypes.addressof(groups)
        step.num_adapters = len(adapters)
        step.given_rows = None if given is None else given.rows.ctypes.data
        step.given = None if given is None else given.embeddings.data_ptr()
        step.num_given = 0 if given is None else given.embeddings.shape[1]
        step.num_threads = torch.get_num_threads()
        plan, kv = attention
        if kv is not self._checked_kv:
            self._check_heads(kv)
        self._library.radixserve_run(self._pointer, ctypes.byref(step), plan.pointer, kv.records)
        return logits

    def _check_heads(self, kv: DecoderKV) -> None:
        for layer, (num_heads, dim) in self._kv_heads.items():
            needed = (num_heads, stored_width(dim, kv.stored_dtype))
            if tuple(kv.heads[layer]) != needed:
                raise ValueError(
                    f"K and V of layer {layer} are of {needed}, not of {tuple(kv.heads[layer])}"
                )
        self._checked_kv = kv


def _shape_record(shape: DecoderSizes) -> _Shape:
    numbers = {"norm_type": NORM_TYPES.index(shape.norm_type)}
    numbers["activation"] = ACTIVATIONS.index(shape.activation)
    names = (field[0] for field in _Shape._fields_)
    return _Shape(*(numbers.get(name, getattr(shape, name)) for name in names))


def _kv_layers(layers: Sequence[DecoderLayer[PackedWeight, PackedExperts]]) -> list[int]:
    """Of each layer, where the K and V that it reads are among those of all layers."""
    places: list[int] = []
    count = 0
    for layer in layers:
        if layer.kv_source is not None:
            places.append(places[layer.kv_source])
            continue
        places.append(count)
        count += layer.attends
    return places


def _layer_record(
    shape: DecoderSizes,
    layer: DecoderLayer[PackedWeight, PackedExperts],
    kv_layer: int,
    borrowed: list[Any],
) -> _Layer:
    """`borrowed`: gets the records that this one refers to."""
    if isinstance(layer.mlp, PackedExperts):
        assert layer.post_mlp_norm is None, "experts are added to the residual as they are"
        mlp = _Mlp(experts=ctypes.addressof(layer.mlp.record))
    else:
        mlp = _Mlp(layer.mlp.gate_up.record, layer.mlp.down.record)
    return _Layer(
        *(address(getattr(layer, name)) for name in _NORMS),
        *(layer.qkv.record, layer.o.record),
        WeightRecord() if layer.beside is None else layer.beside.record,
        *(mlp, features_record(layer.features)),
        -1 if layer.rotary is None else layer.rotary,
        layer.has_gate,
        None if layer.recurrence is None else ctypes.addressof(layer.recurrence.record),
        None if layer.short_conv is None else ctypes.addressof(layer.short_conv.record),
        *(layer.num_kv_heads or shape.num_kv_heads, layer.head_dim or shape.head_dim),
        *(kv_layer, layer.kv_source is None, layer.has_v_norm),
        _beside_address(layer.experts_beside, borrowed),
        _input_address(layer.own_input, borrowed),
        layer.scale,
    )


def _beside_address(beside: ExpertsBeside[PackedExperts] | None, borrowed: list[Any]) -> int | None:
    if beside is None:
        return None
    norms = (beside.router_norm, beside.pre_norm, beside.post_mlp_norm, beside.post_norm)
    record = _ExpertsBeside(ctypes.addressof(beside.experts.record), *map(address, norms))
    borrowed.append(record)
    return ctypes.addressof(record)


def _input_address(own: LayerInput[PackedWeight] | None, borrowed: list[Any]) -> int | None:
    if own is None:
        return None
    record = _LayerInput(own.gate.record, own.up.record, address(own.norm))
    borrowed.append(record)
    return ctypes.addressof(record)


def _inputs_record(inputs: LayerInputs[PackedWeight, PackedWeight | Tensor]) -> _LayerInputs:
    return _LayerInputs(
        *(_rows_record(inputs.rows), inputs.projection.record, address(inputs.norm)),
        *(len(inputs.norm), inputs.rows_scale, inputs.projection_scale, inputs.scale),
    )


def _rows_record(embedding: PackedWeight | Tensor) -> WeightRecord:
    if isinstance(embedding, PackedWeight):
        return embedding.record
    return WeightRecord(embedding.data_ptr(), None, None, *embedding.shape, 0)
