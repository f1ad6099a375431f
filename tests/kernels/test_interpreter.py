"""The interpreter that runs Triton kernels in tests finds overflows of integers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton for this system")

from radixserve_kernels.gpu.launch import KernelLaunch, kernel, tl
from tests.kernels.interpreter import interpret


@kernel()
def combine_kernel(x, y, out, operation: tl.constexpr):
    at = tl.arange(0, 2)
    left, right = tl.load(x + at), tl.load(y + at)
    if operation == 0:
        result = left + right
    elif operation == 1:
        result = left - right
    else:
        result = left * right
    tl.store(out + at, result)


def combined(left: int, right: int, operation: int, dtype: torch.dtype) -> list[int]:
    numbers = [torch.tensor([1, number], dtype=dtype) for number in (left, right)]
    out = torch.zeros(2, dtype=dtype)
    arguments = {"x": numbers[0], "y": numbers[1], "out": out, "operation": operation}
    interpret(KernelLaunch(combine_kernel, (1,), arguments))
    return out.tolist()


def test_results() -> None:
    assert combined(7, 5, 0, torch.int32) == [2, 12]
    assert combined(7, 5, 1, torch.int32) == [0, 2]
    assert combined(-(2**16), 2**15, 2, torch.int32) == [1, -(2**31)]
    assert combined(2**31, 2, 2, torch.int64) == [1, 2**32]
    assert combined(2**31 - 1, 2**31 - 1, 0, torch.int64) == [2, 2**32 - 2]


@pytest.mark.parametrize(
    ("left", "right", "operation", "name"),
    [
        (2**31 - 1, 1, 0, "add"),
        (-(2**31), -1, 0, "add"),
        (-(2**31), 1, 1, "sub"),
        (2**16, 2**15, 2, "mul"),
    ],
)
def test_overflows(left: int, right: int, operation: int, name: str) -> None:
    with pytest.raises(Exception, match=f"int32 overflow detected for operation {name}"):
        combined(left, right, operation, torch.int32)
