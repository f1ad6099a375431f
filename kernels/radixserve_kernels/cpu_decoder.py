"""All layers of a decoder in one call of the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve_kernels.cpu_attention import FeaturesRecord, Plan, features_record
from radixserve_kernels.cpu_experts import PackedExperts
from radixserve_kernels.cpu_library import address, cpu_library, finalize, is_bf16
from radixserve_kernels.cpu_weights import PackedWeight, WeightRecord
from radixserve_kernels.decoder_layer import (
    ACTIVATIONS,
    NORM_TYPES,
    DecoderLayer,
    DecoderSizes,
)

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
            )
        ),
        *(
            (name, ctypes.c_float)
            for name in (
                *("eps", "attention_scale", "embedding_scale", "residual_scale"),
                *("logit_scale", "logit_soft_cap"),
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
        *((name, WeightRecord) for name in ("qkv", "o")),
        ("mlp", _Mlp),
        ("features", FeaturesRecord),
        ("rotary", ctypes.c_int64),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_sampled")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("input_ids", "positions", "slots", "sampled", "rotations", "logits"),
                *("window_slots", "window_page_ids"),
            )
        ),
    )


class _LayerKV(ctypes.Structure):
    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("has_window_pages", ctypes.c_int64),
    )


class DecoderKV:
    """K and V of every layer as C takes them."""

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor, bool]]) -> None:
        """layers: k and v [num_slots, Hkv, D], and whether they are in window pages."""
        self._borrowed = layers
        records = [_LayerKV(k.data_ptr(), v.data_ptr(), windowed) for k, v, windowed in layers]
        self.records = (_LayerKV * len(records))(*records)


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
    ) -> None:
        library = cpu_library(dtype)
        self._is_bf16, self._vocab_size = is_bf16(dtype), shape.vocab_size
        self._borrowed: tuple[Any, ...] = (layers, embedding, norm, head)  # by C
        self._library = library
        sizes = _shape_record(shape)
        records = (_Layer * len(layers))(*map(_layer_record, layers))
        self._pointer = library.radixserve_decoder(
            *(self._is_bf16, ctypes.byref(sizes), records, ctypes.byref(_rows_record(embedding))),
            *(norm.data_ptr(), ctypes.byref(head.record)),
        )
        finalize(self, library.radixserve_delete_decoder, self._pointer)

    def run(
        self,
        input_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        slots: Tensor,  # [T] int64
        sampled: Tensor,  # [S] int64, ascending
        rotations: Sequence[Tensor],  # of each rotary [n, 1, D/2] complex64, of every position
        plan: Plan,
        kv: DecoderKV,
        window_slots: Tensor | None = None,  # [T] int64, of layers in window pages
        window_page_ids: NDArray[np.int32] | None = None,  # in the places of the plan's
    ) -> Tensor:
        """Logits [S, V] float32 after the tokens `sampled`; writes the new tokens' slots of kv."""
        size = (len(sampled), self._vocab_size)
        logits = torch.empty(size, dtype=torch.float32, device="cpu")  # not the default device
        tables = (ctypes.c_void_p * len(rotations))(*(table.data_ptr() for table in rotations))
        step = _Step(
            *(len(input_ids), len(sampled)),
            *(tensor.data_ptr() for tensor in (input_ids, positions, slots, sampled)),
            *(ctypes.addressof(tables), logits.data_ptr(), address(window_slots)),
            None if window_page_ids is None else window_page_ids.ctypes.data,
        )
        self._library.radixserve_set_threads(torch.get_num_threads())
        self._library.radixserve_run(self._pointer, ctypes.byref(step), plan.pointer, kv.records)
        return logits


def _shape_record(shape: DecoderSizes) -> _Shape:
    numbers = {"norm_type": NORM_TYPES.index(shape.norm_type)}
    numbers["activation"] = ACTIVATIONS.index(shape.activation)
    names = (field[0] for field in _Shape._fields_)
    return _Shape(*(numbers.get(name, getattr(shape, name)) for name in names))


def _layer_record(layer: DecoderLayer[PackedWeight, PackedExperts]) -> _Layer:
    if isinstance(layer.mlp, PackedExperts):
        assert layer.post_mlp_norm is None, "experts are added to the residual as they are"
        mlp = _Mlp(experts=ctypes.addressof(layer.mlp.record))
    else:
        mlp = _Mlp(layer.mlp.gate_up.record, layer.mlp.down.record)
    return _Layer(
        *(address(getattr(layer, name)) for name in _NORMS),
        *(layer.qkv.record, layer.o.record, mlp, features_record(layer.features)),
        -1 if layer.rotary is None else layer.rotary,
    )


def _rows_record(embedding: PackedWeight | Tensor) -> WeightRecord:
    if isinstance(embedding, PackedWeight):
        return embedding.record
    return WeightRecord(embedding.data_ptr(), None, None, *embedding.shape, 0)
