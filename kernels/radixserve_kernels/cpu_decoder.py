"""All layers of a Llama-like decoder in one call of the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from radixserve_kernels.cpu_attention import Plan
from radixserve_kernels.cpu_library import address, cpu_library, finalize, is_bf16
from radixserve_kernels.cpu_weights import PackedWeight, WeightRecord
from radixserve_kernels.decoder_layer import DecoderLayer, DecoderSizes


class _Shape(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                *("num_layers", "num_heads", "num_kv_heads", "head_dim"),
                *("hidden_size", "intermediate_size", "vocab_size"),
            )
        ),
        ("eps", ctypes.c_float),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "qk_norm", "post_norm")),
        *((name, WeightRecord) for name in ("qkv", "o", "gate_up", "down")),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_sampled")),
        *(
            (name, ctypes.c_void_p)
            for name in ("input_ids", "positions", "slots", "sampled", "rotations", "logits")
        ),
    )


class FusedDecoder:
    """A decoder whose step is one call, from token ids to logits. One thread."""

    def __init__(
        self,
        shape: DecoderSizes,
        layers: Sequence[DecoderLayer[PackedWeight]],
        embedding: Tensor,  # [V, H]
        norm: Tensor,  # [H]
        head: PackedWeight,  # H -> V
    ) -> None:
        library = cpu_library()
        self._is_bf16, self._vocab_size = is_bf16(embedding.dtype), shape.vocab_size
        self._borrowed: tuple[Any, ...] = (layers, embedding, norm, head)  # by C
        self._library = library
        sizes = _Shape(*(getattr(shape, field[0]) for field in _Shape._fields_))
        records = (_Layer * len(layers))(*map(_layer_record, layers))
        self._pointer = library.radixserve_decoder(
            *(self._is_bf16, ctypes.byref(sizes), records, embedding.data_ptr()),
            *(norm.data_ptr(), ctypes.byref(head.record)),
        )
        finalize(self, library.radixserve_delete_decoder, self._pointer)

    def run(
        self,
        input_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        slots: Tensor,  # [T] int64
        sampled: Tensor,  # [S] int64, ascending
        rotations: Tensor,  # [n, D/2] complex64, of every position
        plan: Plan,
        kv: Tensor,  # [L, 2, num_pages, P, Hkv, D]
    ) -> Tensor:
        """Logits [S, V] float32 after the tokens `sampled`; writes the new tokens' slots of kv."""
        size = (len(sampled), self._vocab_size)
        logits = torch.empty(size, dtype=torch.float32, device="cpu")  # not the default device
        tensors = (input_ids, positions, slots, sampled, rotations, logits)
        step = _Step(len(input_ids), len(sampled), *(tensor.data_ptr() for tensor in tensors))
        self._library.radixserve_set_threads(torch.get_num_threads())
        self._library.radixserve_run(
            self._pointer, ctypes.byref(step), plan.pointer, kv.data_ptr(), kv.stride(0)
        )
        return logits


def _layer_record(layer: DecoderLayer[PackedWeight]) -> _Layer:
    norms = map(address, (layer.input_norm, layer.qk_norm, layer.post_norm))
    weights = (layer.qkv, layer.o, layer.gate_up, layer.down)
    return _Layer(*norms, *(weight.record for weight in weights))
