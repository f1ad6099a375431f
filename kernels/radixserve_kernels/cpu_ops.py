"""What the compiled CPU kernels offer here, and the argmax of logits.

Tensors are on the CPU, contiguous unless a stride is asked for, float32 or bfloat16.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from radixserve_kernels.cpu_library import CpuLibraryError, cpu_library

_VECTORS = {512: "AVX-512", 256: "AVX2"}  # their bits


def unsupported_reason(dtype: torch.dtype) -> str:
    """Why these kernels cannot compute in `dtype` here; "" if they can."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"they compute in float32 and bfloat16, not in {dtype}"
    try:
        cpu_library()
    except CpuLibraryError as reason:
        return str(reason)
    return ""


def describe() -> str:
    """The processor features that the compiled code uses. Raises CpuLibraryError."""
    library = cpu_library()
    bits = 32 * library.radixserve_lanes()
    widened = f"{_VECTORS.get(bits, f'vectors of {bits} bits')}, widened to float32"
    bf16 = (widened, "AVX-512 BF16", "AMX")[library.radixserve_bf16()]
    return f"vectors of {bits} bits, bfloat16: {bf16}"


def argmax(logits: Tensor) -> tuple[list[int], int]:
    """The index of each row's first maximum, or of its first NaN if it has one.

    logits [S, V] float32. Also the number of rows whose value there is not finite.
    """
    logits = logits.contiguous()
    num_rows, size = logits.shape
    ids = (ctypes.c_int64 * num_rows)()
    num_broken = cpu_library().radixserve_argmax(logits.data_ptr(), num_rows, size, ids)
    return list(ids), num_broken
