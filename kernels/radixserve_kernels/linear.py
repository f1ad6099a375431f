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

_ONEDNN: Any = torch.backends.mkldnn  # its functions have no types
PACK_ROWS = 64  # rows of a typical product, a hint for the layout


def _find(name: str, overload: str) -> Any:
    """An operation of torch.ops.mkldnn, resolved once; one that always fails where it is not."""
    try:
        return getattr(getattr(torch.ops.mkldnn, name), overload)
    except AttributeError:
        return _missing


def _missing(*_: object) -> Any:
    raise RuntimeError("this build of torch has no such oneDNN operation")


_product = _find("_linear_pointwise", "default")
_product_and_sum = _find("_linear_pointwise", "binary")


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
    """The weight in oneDNN's layout; None where there is none."""
    if weight.device.type != "cpu" or not _ONEDNN.is_available():
        return None
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        probe = weight.new_ones((2, weight.shape[1]))
        _product_and_sum(probe, _product(probe, packed, None, "none", [], ""), packed, None, "add")
    except (AttributeError, RuntimeError):  # another build of torch, or no kernel for this dtype
        return None
    return packed


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T`, x [M, K], weight [N, K], for a weight that is used once; returns [M, N].

    A weight with gaps between its rows is copied: oneDNN is a thousand times slower on these.
    """
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.bfloat16) and _HAS_ONEDNN:
        result: Tensor = _product(x, weight, None, "none", [], "")
        return result
    return F.linear(x, weight)


def _try_onednn() -> bool:
    if not _ONEDNN.is_available():
        return False
    try:
        _product(torch.ones(2, 2), torch.ones(2, 2), None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return True


_HAS_ONEDNN = _try_onednn()
