"""The tensors of a layer's MLP: one for all tokens, or a router and its experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from radixserve.models.families import ExpertParts, MlpNames
from radixserve_kernels.experts import Routing
from radixserve_kernels.quantized import AnyWeight, map_parts

WeightAndBias = tuple[AnyWeight, Tensor | None]  # only the decoder of the CPU gets quantised ones


def computed(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """`function(tensor)`; of a tensor on the device "meta", which is read for its shape alone, the
    tensor itself: arithmetic there imports torch._dynamo and sympy, which takes a second."""
    return tensor if tensor.is_meta else function(tensor)


@dataclass(frozen=True, slots=True)
class MlpTensors:
    """An MLP of M features; 0 of a layer without one."""

    gate: WeightAndBias | None  # [M, H]; None: it has none
    up: WeightAndBias  # [M, H]
    down: WeightAndBias  # [H, M]

    @property
    def projections(self) -> tuple[WeightAndBias, ...]:
        return *(() if self.gate is None else (self.gate,)), self.up, self.down


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """A mixture of E experts; the shared one, which may have another M, is the last."""

    routing: Routing
    router: WeightAndBias  # [E, H], the shared expert's gate included
    experts: tuple[MlpTensors, ...]
    choice_bias: Tensor | None = None  # [E] float32, see `choose_experts`
    expert_scale: Tensor | None = None  # [E] float32, of the weights

    @property
    def projections(self) -> tuple[WeightAndBias, ...]:
        return self.router, *(both for expert in self.experts for both in expert.projections)


class MatrixReader(Protocol):
    """Takes a checkpoint's tensors by name."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor: ...

    def matrix(self, name: str, shape: tuple[int, ...]) -> AnyWeight:
        """In the form that it is computed with."""
        ...

    def matrices(
        self, name: str, shape: tuple[int, int, int], *, is_transposed: bool = False
    ) -> list[AnyWeight]:
        """The same of each [N, K] in one tensor [E, N, K], or [E, K, N] if `is_transposed`."""
        ...


def read_experts(
    reader: MatrixReader, prefix: str, parts: ExpertParts, hidden: int
) -> ExpertTensors:
    """A layer's experts, from a tensor for each or from one for all. `prefix`: of the layer."""
    routing, module = parts.routing, f"{prefix}{parts.module}."
    if f"{prefix}mlp.experts.gate_up_proj" in reader:  # as transformers has it in memory
        module = f"{prefix}mlp."
    fused = f"{module}experts."
    has_biases, is_single = parts.is_interleaved, f"{fused}0.{parts.names[0]}.weight" in reader
    is_fused = has_biases or f"{module}{parts.fused_names[0]}" in reader
    name = f"{module}{parts.router}"
    router = reader.take(f"{name}.weight", (routing.num_experts, hidden))
    bias = None
    if has_biases:
        bias = reader.take(f"{name}.bias", (routing.num_experts,))
    if has_biases and not is_single:
        experts = _read_interleaved(reader, fused, parts, hidden)
    elif is_fused and not is_single:
        experts = _read_fused(reader, module, parts, hidden)
    else:
        experts = [
            read_mlp(
                *(reader, f"{fused}{number}.", parts.names),
                (parts.intermediate_size, hidden),
                has_biases=has_biases,
            )
            for number in range(routing.num_experts)
        ]
    if routing.has_shared:
        if routing.has_shared_gate:
            gate = reader.take(f"{prefix}mlp.shared_expert_gate.weight", (1, hidden))
            router = computed(router, lambda router: torch.cat((router, gate)))
        size = parts.shared_size, hidden
        experts.append(read_mlp(reader, prefix, parts.shared_names, size))
    choice_bias = None
    if parts.choice_bias is not None:
        choice_bias = reader.take(f"{module}{parts.choice_bias}", (routing.num_experts,)).float()
    return ExpertTensors(routing, (router, bias), tuple(experts), choice_bias)


def read_mlp(
    reader: MatrixReader,
    prefix: str,
    names: MlpNames,
    size: tuple[int, int],
    *,
    has_biases: bool = False,
) -> MlpTensors:
    """`size`: [M, H]. One tensor with the rows of gate and up, gate's first, where both have one
    name."""
    gate_name, up_name, down_name = names
    inner, hidden = size

    def both(name: str, num_out: int, num_in: int) -> WeightAndBias:
        weight = reader.matrix(f"{prefix}{name}.weight", (num_out, num_in))
        return weight, reader.take(f"{prefix}{name}.bias", (num_out,)) if has_biases else None

    down = both(down_name, hidden, inner)
    if gate_name is None:
        return MlpTensors(None, both(up_name, inner, hidden), down)
    if gate_name != up_name:
        return MlpTensors(both(gate_name, inner, hidden), both(up_name, inner, hidden), down)
    weight, bias = both(up_name, 2 * inner, hidden)
    gate_bias, up_bias = (None, None) if bias is None else (bias[:inner], bias[inner:])
    gate = map_parts(weight, lambda part: part[:inner]), gate_bias
    up = map_parts(weight, lambda part: part[inner:]), up_bias
    return MlpTensors(gate, up, down)


def _read_fused(
    reader: MatrixReader, module: str, parts: ExpertParts, hidden: int
) -> list[MlpTensors]:
    """Split [E, 2 M, H], gate's rows first, and [E, H, M]."""
    count, inner = parts.routing.num_experts, parts.intermediate_size
    gate_up_name, down_name = parts.fused_names
    gate_up = reader.matrices(f"{module}{gate_up_name}", (count, 2 * inner, hidden))
    down = reader.matrices(f"{module}{down_name}", (count, hidden, inner))
    return [
        MlpTensors(
            gate=(map_parts(both, lambda part: part[:inner]), None),
            up=(map_parts(both, lambda part: part[inner:]), None),
            down=(down_proj, None),
        )
        for both, down_proj in zip(gate_up, down, strict=True)
    ]


def _read_interleaved(
    reader: MatrixReader, prefix: str, parts: ExpertParts, hidden: int
) -> list[MlpTensors]:
    """Split [E, H, 2 M], gate's and up's columns in turn, and [E, M, H], with biases."""
    count, inner = parts.routing.num_experts, parts.intermediate_size
    name = f"{prefix}gate_up_proj"
    gate_up = reader.matrices(name, (count, hidden, 2 * inner), is_transposed=True)
    gate_up_bias = reader.take(f"{name}_bias", (count, 2 * inner))
    name = f"{prefix}down_proj"
    down = reader.matrices(name, (count, inner, hidden), is_transposed=True)
    down_bias = reader.take(f"{name}_bias", (count, hidden))
    return [
        MlpTensors(
            gate=(map_parts(both, lambda part: part[::2]), gate_up_bias[number, ::2]),
            up=(map_parts(both, lambda part: part[1::2]), gate_up_bias[number, 1::2]),
            down=(down_proj, down_bias[number]),
        )
        for number, (both, down_proj) in enumerate(zip(gate_up, down, strict=True))
    ]
