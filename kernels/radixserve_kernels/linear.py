"""`Linear`: a weight in the layout of the fastest matrix kernel.

On the CPU that is oneDNN's blocked layout, made once: on processors that MKL treats as foreign it
is two to four times as fast as MKL's float32 product, and never much slower. Where oneDNN is
missing, and on other devices, it is `torch.nn.functional.linear`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

PACK_ROWS = 64  # rows of a typical product, a hint for the layout


def _find_onednn() -> tuple[Any, Any] | None:
    """oneDNN's product, alone and with a sum; None where torch has no such operations."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        operations = torch.ops.mkldnn._linear_pointwise
        found = operations.default, operations.binary
        found[0](torch.ones(2, 2), torch.ones(2, 2), None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return found


_ONEDNN = _find_onednn()
_product: Any
_product_and_sum: Any
_product, _product_and_sum = _ONEDNN or (None, None)


class Linear:
    """`x @ weight.T + bias`, x [M, K], weight [N, K], bias [N] or None; returns [M, N].

    With `plus` [M, N] that is added in the same pass, before the sum is rounded to the dtype.
    """

    __slots__ = ("_bias", "_packed", "_plain")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = _pack(weight)
        self._plain = weight if self._packed is None else None

    def __call__(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        if self._plain is not None:
            out = F.linear(x, self._plain, self._bias)
            return out if plus is None else out.add_(plus)
        if plus is not None:
            summed: Tensor = _product_and_sum(x, plus, self._packed, self._bias, "add")
            return summed
        result: Tensor = _product(x, self._packed, self._bias, "none", [], "")
        return result


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's layout; None if unavailable."""
    if not _is_served(weight):
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        probe = weight.new_ones((2, weight.shape[1]))
        _product_and_sum(probe, _product(probe, packed, None, "none", [], ""), packed, None, "add")
    except (AttributeError, RuntimeError):  # another build of torch, or no kernel for this dtype
        return None
    return packed


def _is_served(x: Tensor) -> bool:
    """Whether oneDNN takes such tensors here."""
    is_known = x.dtype in (torch.float32, torch.bfloat16)
    return _ONEDNN is not None and x.device.type == "cpu" and is_known


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`, x [M, K], weight [N, K], for a weight that is used once; returns [M, N].

    A weight with gaps between its rows is copied: oneDNN is a thousand times slower on these.
    """
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    if _is_served(x):
        result: Tensor = _product(x, weight, None, "none", [], "")
        return result
    return F.linear(x, weight)
