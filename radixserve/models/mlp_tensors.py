"""The tensors of a layer's MLP: one for all tokens, or a router and its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from radixserve.models.families import ExpertParts
from radixserve_kernels.experts import Routing
from radixserve_kernels.quantized import AnyWeight, map_parts

WeightAndBias = tuple[AnyWeight, Tensor | None]  # only the decoder of the CPU gets quantised ones


@dataclass(frozen=True, slots=True)
class MlpTensors:
    """A gated MLP of M features."""

    gate: WeightAndBias  # [M, H]
    up: WeightAndBias  # [M, H]
    down: WeightAndBias  # [H, M]

    @property
    def projections(self) -> tuple[WeightAndBias, ...]:
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """A mixture of E experts; the shared one, which may have another M, is the last."""

    routing: Routing
    router: WeightAndBias  # [E, H], the shared expert's gate included
    experts: tuple[MlpTensors, ...]

    @property
    def projections(self) -> tuple[WeightAndBias, ...]:
        return self.router, *(both for one in self.experts for both in one.projections)


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
    routing, fused = parts.routing, f"{prefix}mlp.experts."
    has_biases, is_single = parts.is_interleaved, f"{fused}0.gate_proj.weight" in reader
    is_fused = has_biases or f"{fused}gate_up_proj" in reader
    module = f"{prefix}{'mlp' if is_fused else parts.module}."
    name = f"{module}{parts.router}"
    router = reader.take(f"{name}.weight", (routing.num_experts, hidden))
    bias = None
    if has_biases:
        bias = reader.take(f"{name}.bias", (routing.num_experts,))
    if has_biases and not is_single:
        experts = _read_interleaved(reader, fused, parts, hidden)
    elif is_fused and not is_single:
        experts = _read_fused(reader, fused, parts, hidden)
    else:
        experts = [
            _read_mlp(
                *(reader, f"{module}experts.{number}.", parts.names),
                (parts.intermediate_size, hidden),
                has_biases=has_biases,
            )
            for number in range(routing.num_experts)
        ]
    if routing.has_shared:
        gate = reader.take(f"{prefix}mlp.shared_expert_gate.weight", (1, hidden))
        router = torch.cat((router, gate))
        size = parts.shared_size, hidden
        experts.append(_read_mlp(reader, f"{prefix}mlp.shared_expert.", parts.names, size))
    return ExpertTensors(routing, (router, bias), tuple(experts))


def _read_mlp(
    reader: MatrixReader,
    prefix: str,
    names: tuple[str, str, str],
    size: tuple[int, int],
    *,
    has_biases: bool = False,
) -> MlpTensors:
    """`size`: [M, H]; names of gate, up and down."""

    def both(name: str, shape: tuple[int, int]) -> WeightAndBias:
        weight = reader.matrix(f"{prefix}{name}.weight", shape)
        return weight, reader.take(f"{prefix}{name}.bias", shape[:1]) if has_biases else None

    shapes = (size, size, size[::-1])
    return MlpTensors(*map(both, names, shapes))


def _read_fused(
    reader: MatrixReader, prefix: str, parts: ExpertParts, hidden: int
) -> list[MlpTensors]:
    """Split [E, 2 M, H], gate's rows first, and [E, H, M]."""
    count, inner = parts.routing.num_experts, parts.intermediate_size
    gate_up = reader.matrices(f"{prefix}gate_up_proj", (count, 2 * inner, hidden))
    down = reader.matrices(f"{prefix}down_proj", (count, hidden, inner))
    return [
        MlpTensors(
            gate=(map_parts(both, lambda part: part[:inner]), None),
            up=(map_parts(both, lambda part: part[inner:]), None),
            down=(one, None),
        )
        for both, one in zip(gate_up, down, strict=True)
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
            down=(one, down_bias[number]),
        )
        for number, (both, one) in enumerate(zip(gate_up, down, strict=True))
    ]
