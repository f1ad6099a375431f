"""Sampling by the compiled CPU kernels: argmax, temperature and bitmasks over logits.

Tensors are on the CPU, contiguous unless a stride is asked for, float32 or bfloat16.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve_kernels import processor
from radixserve_kernels.cpu_library import (
    DTYPE_FLAGS,
    CpuLibraryError,
    cpu_library,
    readings,
)

_SAMPLE_BLOCK = 256  # as in cpu/sample.h
_VECTORS = {512: "AVX-512", 256: "AVX2"}  # their bits
if processor.IS_ARM:
    _VECTORS[128] = "NEON"


def unsupported_reason(dtype: torch.dtype) -> str:
    """The reason why the kernels cannot compute in `dtype` on this machine; "" if they can."""
    if dtype not in DTYPE_FLAGS:
        return f"they compute in float32 and bfloat16, not in {dtype}"
    try:
        cpu_library(dtype)
    except CpuLibraryError as reason:
        return str(reason)
    return ""


def describe() -> str:
    """The processor features that the compiled code uses. Raises CpuLibraryError."""
    library = cpu_library()
    bits = 32 * library.radixserve_lanes()
    vectors = _VECTORS.get(bits, f"vectors of {bits} bits")
    bf16 = (f"{vectors} widened to float32", "AVX-512 BF16", "AMX", "BFMMLA")[
        library.radixserve_bf16()
    ]
    integers = (vectors, vectors, "VNNI", "SDOT", "SMMLA")[library.radixserve_integer_dot()]
    read = "".join(f", read {reading}" for reading in readings)
    return f"vectors of {bits} bits, bfloat16: {bf16}, 8 and 4 bits: {integers}{read}"


def argmax(logits: Tensor) -> tuple[list[int], int]:
    """The index of each row's first maximum, or of its first NaN if it has one.

    logits [S, V] float32. Also the number of rows whose value there is not finite.
    """
    logits = logits.contiguous()
    num_rows, size = logits.shape
    ids = (ctypes.c_int64 * num_rows)()
    num_broken = cpu_library().radixserve_argmax(logits.data_ptr(), num_rows, size, ids)
    return list(ids), num_broken


def argmax_allowed(
    logits: Tensor, bitmask: NDArray[np.int32], mask_of: NDArray[np.int64]
) -> tuple[list[int], int]:
    """`argmax` among the tokens that the rows' masks allow; -1 where that is none.

    bitmask [m, words]: bit t % 32 of word t // 32 for token t; mask_of [S]: its row for each row of
    the logits, -1 for none.
    """
    ids = (ctypes.c_int64 * len(logits))()
    function = cpu_library().radixserve_argmax_allowed
    num_broken = _with_masks(function, logits.contiguous(), bitmask, mask_of, ids)
    return list(ids), num_broken


def sample(
    logits: Tensor,
    bitmask: NDArray[np.int32],
    mask_of: NDArray[np.int64],
    temperature: NDArray[np.float32],
    uniform: NDArray[np.float64],
) -> tuple[list[int], int]:
    """`argmax_allowed` where the temperature [S] is 0 or the best logit is not finite, else a token
    sampled: the first up to which more than `uniform` [S], in (0, 1), of the probability lies."""
    num_rows, size = logits.shape
    assert len(temperature) == len(uniform) == num_rows, "one number a row"
    ids = (ctypes.c_int64 * num_rows)()
    sums = np.empty((num_rows, -(-size // _SAMPLE_BLOCK)))
    scratch = (temperature.ctypes.data, uniform.ctypes.data, sums.ctypes.data, ids)
    library = cpu_library()
    library.radixserve_set_threads(torch.get_num_threads())
    num_broken = _with_masks(
        library.radixserve_sample, logits.contiguous(), bitmask, mask_of, *scratch
    )
    return list(ids), num_broken


def copy_allowed(logits: Tensor, bitmask: NDArray[np.int32], mask_of: NDArray[np.int64]) -> Tensor:
    """Logits [S, V] float32, -inf where the row's mask forbids a token; masks as above."""
    logits = logits.contiguous()
    copy = torch.empty_like(logits)
    function = cpu_library().radixserve_copy_allowed
    _with_masks(function, logits, bitmask, mask_of, copy.data_ptr())
    return copy


def _with_masks(
    function: Any,
    logits: Tensor,
    bitmask: NDArray[np.int32],
    mask_of: NDArray[np.int64],
    *others: Any,
) -> Any:
    bitmask = np.ascontiguousarray(bitmask)
    num_rows, size = logits.shape
    assert logits.dtype == torch.float32, "logits are float32"
    assert len(mask_of) == num_rows, "one mask a row"
    assert bitmask.shape[1] * 32 >= size, "a mask is shorter than the vocabulary"
    assert mask_of.max(initial=-1) < len(bitmask), "there is no such mask"
    return function(
        *(logits.data_ptr(), num_rows, size),
        *(bitmask.ctypes.data, bitmask.shape[1], mask_of.ctypes.data, *others),
    )
