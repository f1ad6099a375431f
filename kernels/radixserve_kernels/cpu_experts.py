"""The MLP of a mixture of experts on the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from radixserve_kernels.cpu_library import address, cpu_library, is_bf16
from radixserve_kernels.cpu_weights import PackedWeight, WeightRecord
from radixserve_kernels.experts import Routing


class ExpertsRecord(ctypes.Structure):
    """Experts as C takes them."""

    _fields_ = (
        ("router", WeightRecord),
        *((name, ctypes.c_void_p) for name in ("gate_up", "down")),
        *(
            (name, ctypes.c_int64)
            for name in (
                *("num_experts", "top_k", "has_shared", "has_shared_gate", "renormalizes"),
                *("has_sigmoid", "is_gated"),
            )
        ),
        ("choice_bias", ctypes.c_void_p),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "sum_eps", "scale")),
        ("expert_scale", ctypes.c_void_p),
        ("has_gelu", ctypes.c_int64),
    )


class PackedExperts:
    """Experts ready to compute; the shared expert, if the layer has one, is the last.

    router: H -> E, and the shared expert's gate if it has one. gate_up: H -> 2 M, interleaved, see
    `interleave`, or up alone where experts have no gate; all in one form. down: M -> H, all in one
    form. choice_bias: see `choose_experts`. expert_scale [E] float32: of the weights.
    """

    record: ExpertsRecord

    __slots__ = ("_borrowed", "record")

    def __init__(
        self,
        router: PackedWeight,
        gate_up: Sequence[PackedWeight],
        down: Sequence[PackedWeight],
        routing: Routing,
        choice_bias: Tensor | None = None,
        expert_scale: Tensor | None = None,
    ) -> None:
        count = routing.num_experts + routing.has_shared
        assert (len(gate_up), len(down)) == (count, count)
        assert router.num_columns == routing.num_logits
        assert choice_bias is None or choice_bias.dtype == torch.float32
        assert (
            len({weight.form for weight in gate_up}) == len({weight.form for weight in down}) == 1
        )
        records = [
            (WeightRecord * count)(*(weight.record for weight in some)) for some in (gate_up, down)
        ]
        bias = None if choice_bias is None else choice_bias.contiguous()
        self._borrowed = (router, gate_up, down, records, bias, expert_scale)  # by C
        self.record = ExpertsRecord(
            router.record,
            *map(ctypes.addressof, records),
            *(routing.num_experts, routing.top_k, routing.has_shared, routing.has_shared_gate),
            *(routing.renormalizes, routing.has_sigmoid, routing.is_gated, address(bias)),
            *(routing.swiglu_alpha, routing.swiglu_limit, routing.sum_eps, routing.scale),
            *(address(expert_scale), routing.has_gelu),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """What the experts make of x [M, H]: [M, H] float32."""
        library, hidden = cpu_library(x.dtype), x.shape[1]
        padded = x.new_zeros((len(x), -(-hidden // 32) * 32))
        padded[:, :hidden] = x
        out = x.new_empty((len(x), hidden), dtype=torch.float32)
        library.radixserve_set_threads(torch.get_num_threads())
        library.radixserve_experts(
            *(is_bf16(x.dtype), ctypes.addressof(self.record), padded.data_ptr()),
            *(padded.shape[1], len(x), out.data_ptr()),
        )
        return out
