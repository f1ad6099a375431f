"""All layers of a Llama-like decoder in one call of the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve_kernels.cpu_attention import Plan
from radixserve_kernels.cpu_library import address, cpu_library, finalize, is_bf16
from radixserve_kernels.cpu_weights import PackedWeight, WeightRecord
from radixserve_kernels.decoder_layer import DecoderLayer, DecoderSizes
from radixserve_kernels.host_index import IndexArray


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


class _DecodeSteps(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "num_steps", "page_size", "num_end_ids")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("token_ids", "start", "first_page", "page_ids", "end_ids"),
                *("rotations", "logits", "hurry", "drawn"),
            )
        ),
        ("plan_seconds", ctypes.c_double),
        ("draw_seconds", ctypes.c_double),
    )


class Hurry:
    """Ends several decode steps behind the present one, from any thread and at any time."""

    __slots__ = ("_flag",)

    def __init__(self) -> None:
        self._flag = ctypes.c_int32()

    def set(self) -> None:
        """Until `clear`, only one step at a time."""
        self._flag.value = 1

    def clear(self) -> None:
        self._flag.value = 0

    @property
    def address(self) -> int:
        return ctypes.addressof(self._flag)


@dataclass(frozen=True, slots=True)
class StepRows:
    """R rows of one token each, and their pages up to the last step's; arrays without gaps."""

    token_ids: IndexArray  # [R]
    start: IndexArray  # [R] its position
    first_page: IndexArray  # [R] where the row's pages begin in page_ids
    page_ids: NDArray[np.int32]


class StepsDone(NamedTuple):
    """What came of several decode steps; n of them count."""

    drawn: IndexArray  # [n, R]
    logits: Tensor  # [R, V] float32 of the last one computed, whether it counts or not
    plan_seconds: float
    draw_seconds: float


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

    def decode_steps(
        self,
        rows: StepRows,
        num_steps: int,
        end_ids: IndexArray,
        hurry: Hurry,
        rotations: Tensor,  # [n, D/2] complex64, of every position
        merge_tokens: int | None,  # see Plan
        kv: Tensor,  # [L, 2, num_pages, P, Hkv, D]
    ) -> StepsDone:
        """Up to `num_steps` steps of the same rows, each row's best token going into the next one.

        Fewer count where a step draws one of `end_ids` or there is a `hurry` behind it: that is the
        last one then. Or where the best logit of some row is not finite: then those before that
        step, perhaps none.
        """
        num_rows = len(rows.start)
        logits = torch.empty((num_rows, self._vocab_size), dtype=torch.float32, device="cpu")
        drawn = np.empty((num_steps, num_rows), np.int64)
        record = _DecodeSteps(
            num_rows=num_rows,
            num_steps=num_steps,
            page_size=kv.shape[3],
            num_end_ids=len(end_ids),
            token_ids=rows.token_ids.ctypes.data,
            start=rows.start.ctypes.data,
            first_page=rows.first_page.ctypes.data,
            page_ids=rows.page_ids.ctypes.data,
            end_ids=end_ids.ctypes.data,
            rotations=rotations.data_ptr(),
            logits=logits.data_ptr(),
            hurry=hurry.address,
            drawn=drawn.ctypes.data,
        )
        self._library.radixserve_set_threads(torch.get_num_threads())
        num_done = self._library.radixserve_decode_steps(
            *(self._is_bf16, self._pointer, ctypes.byref(record), merge_tokens is not None),
            *(merge_tokens or 0, kv.data_ptr(), kv.stride(0)),
        )
        return StepsDone(drawn[:num_done], logits, record.plan_seconds, record.draw_seconds)


def _layer_record(layer: DecoderLayer[PackedWeight]) -> _Layer:
    norms = map(address, (layer.input_norm, layer.qk_norm, layer.post_norm))
    weights = (layer.qkv, layer.o, layer.gate_up, layer.down)
    return _Layer(*norms, *(weight.record for weight in weights))
