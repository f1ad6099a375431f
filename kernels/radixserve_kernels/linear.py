"""`Linear`: a weight in the layout of the fastest matrix kernel.

On the CPU that is the compiled kernels', which sum each row in one order, whatever rows there are.
Where they are missing it is oneDNN's blocked layout: on processors that MKL treats as foreign it
is two to four times as fast as MKL's float32 product, and never much slower. Where that is missing
too, and on other devices, it is `torch.nn.functional.linear`; on these, where results are to be
exact, the Triton kernel of experts, with one expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve_kernels.cpu_ops import unsupported_reason
from radixserve_kernels.cpu_weights import PackedWeight
from radixserve_kernels.gpu_ops import row_linear

PACK_ROWS = 64  # rows of a typical product, a hint for oneDNN's layout


def _find_onednn() -> Any:
    """oneDNN's product; None where torch has no such operation."""
    mkldnn: Any = torch.backends.mkldnn
    if not mkldnn.is_available():
        return None
    try:
        operation = torch.ops.mkldnn._linear_pointwise.default
        operation(torch.ones(2, 2), torch.ones(2, 2), None, "none", [], "")
    except (AttributeError, RuntimeError):
        return None
    return operation


_product: Any = _find_onednn()


class Linear:
    """`x @ weight.T + bias`, x [M, K], weight [N, K], bias [N] or None; returns [M, N].

    is_exact: on a device, too, a row's bits do not depend on the number of rows.
    compiles: the compiled kernels may be used; they are compiled when none has been.
    """

    __slots__ = ("_bias", "_is_exact", "_own", "_packed", "_plain")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        is_exact: bool = False,
        compiles: bool = True,
    ) -> None:
        self._own: PackedWeight | None = None
        self._is_exact = is_exact
        self._bias = self._packed = self._plain = None
        if compiles and weight.device.type == "cpu" and not unsupported_reason(weight.dtype):
            self._own = PackedWeight(weight, bias)
            return
        self._bias, self._packed = bias, _pack(weight)
        self._plain = weight if self._packed is None else None

    @property
    def can_be_copied(self) -> bool:
        """Whether another weight can be copied into its memory."""
        return self._packed is None

    def __call__(self, x: Tensor) -> Tensor:
        if self._own is not None:
            return self._own(x)
        if self._plain is not None:
            if self._is_exact:
                return row_linear(x, self._plain, self._bias)
            return F.linear(x, self._plain, self._bias)
        result: Tensor = _product(x, self._packed, self._bias, "none", [], "")
        return result


def _pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's layout; None if unavailable."""
    is_known = weight.dtype in (torch.float32, torch.bfloat16)
    if _product is None or weight.device.type != "cpu" or not is_known:
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        _product(weight.new_ones((2, weight.shape[1])), packed, None, "none", [], "")
    except (AttributeError, RuntimeError):  # another build of torch, or no kernel for this dtype
        return None
    return packed
