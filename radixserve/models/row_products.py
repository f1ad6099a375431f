"""Linear layers of transformers' models by the CPU kernels, which sum all rows in one order.

PyTorch's order depends on the number of rows, so a token's bits would depend on the other rows of
its step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from radixserve_kernels.cpu_ops import unsupported_reason
from radixserve_kernels.cpu_weights import PackedWeight
from radixserve_kernels.freed_memory import return_freed_memory

# PyTorch computes activations by vectors, two at a time, and what is left over at the end of a
# thread's part one by one, with other roundings: no row may lie there.
_VECTORS = 64  # numbers of two vectors at most, of 16 bits


def inexact_reason(model: Any) -> str:
    """Why a token's bits may depend on the other rows of a step even when the linear layers of a
    transformers model compute by `pack_products`; "" if nothing is known."""
    head = model.get_output_embeddings()
    linear = dict(_linear_layers(model))
    most_threads = torch.get_num_threads()
    for module in model.modules():
        parameters = list(module.parameters(recurse=False))
        if module in linear:
            width = linear[module].shape[0]
            parts = range(1, most_threads + 1)
            if module is not head and any(width % (threads * _VECTORS) for threads in parts):
                return (
                    f"{width} features are not whole vectors in each thread's part, and PyTorch "
                    "rounds what is left over in another way"
                )
        elif any(x.ndim > 1 for x in parameters) and not isinstance(module, nn.Embedding):
            return f"PyTorch computes products of {type(module).__name__}"
    return ""


def pack_products(model: Any) -> None:
    """Let the model's linear layers compute by the CPU kernels, in place; their weights go, but for
    those that an embedding shares. All are in one dtype that the kernels have."""
    embedded = {
        module.weight.data_ptr() for module in model.modules() if isinstance(module, nn.Embedding)
    }
    for module, weight in list(_linear_layers(model)):
        packed = PackedWeight(weight, module.bias)
        module.forward = _Product(packed)
        if weight.data_ptr() not in embedded:
            module.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return_freed_memory()


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the CPU kernels compute there."""
    return device.type == "cpu" and not unsupported_reason(dtype)


class _Product:
    """A linear layer's `forward`: x [..., K] -> [..., N]."""

    __slots__ = ("_packed",)

    def __init__(self, packed: PackedWeight) -> None:
        self._packed = packed

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self._packed(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return result


def _linear_layers(model: Any) -> Iterator[tuple[Any, Tensor]]:
    """Modules that multiply by a weight and add a bias, and the weight as [N, K]."""
    from transformers.pytorch_utils import Conv1D

    for module in model.modules():
        forward = type(module).forward
        if forward is nn.Linear.forward:
            yield module, module.weight
        elif forward is Conv1D.forward:
            yield module, module.weight.t()
