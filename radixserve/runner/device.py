"""The device of a runner, and the reason why a requested one is unavailable."""

from __future__ import annotations

import torch

from radixserve.config import format_bytes
from radixserve.errors import InvalidRequest
from radixserve.runner.system_memory import free_memory
from radixserve_kernels.stored_kv import FP8_CAPABILITY, KV_DTYPES, dtype_name


def choose_device(asked: str, attention_backend: str = "auto") -> torch.device:
    """Resolve EngineConfig.device to a device, with its number on CUDA.

    "auto" is the first CUDA device, else the CPU; and the CPU for the backend that needs it. Raises
    InvalidRequest, naming the reason and what works, for one that is not there.
    """
    if asked == "cpu" or (asked == "auto" and attention_backend == "cpu"):
        return torch.device("cpu")
    if reason := cuda_unavailable_reason():
        if asked == "auto":
            return torch.device("cpu")
        raise InvalidRequest(
            f'device="{asked}" needs a CUDA device: {reason}; device="cpu" and "auto" work'
        )
    if asked == "auto":
        return torch.device("cuda", 0)
    device, count = torch.device(asked), torch.cuda.device_count()
    number = torch.cuda.current_device() if device.index is None else device.index
    if number >= count:
        last = "" if count == 1 else f" to cuda:{count - 1}"
        raise InvalidRequest(f'device="{asked}" is not there; this machine has cuda:0{last}')
    return torch.device("cuda", number)


def cuda_unavailable_reason() -> str:
    """Why torch reaches no CUDA device, or ""."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    return f"torch {torch.__version__} finds none"


def check_dtype(asked: str, device: torch.device) -> None:
    """Raise InvalidRequest for a dtype (EngineConfig.dtype) that the device does not compute in."""
    if asked == "float16" and device.type == "cpu":
        raise InvalidRequest(
            'dtype="float16" needs a CUDA device, and the device is the CPU; '
            '"float32" and "bfloat16" work there'
        )


def choose_kv_dtype(
    asked: str,
    dtype: torch.dtype,
    device: torch.device,
    backend_name: str,
    *,
    offered: frozenset[torch.dtype],
) -> torch.dtype | None:
    """The dtype of stored K and V for EngineConfig.kv_dtype and a model of `dtype`; None: `dtype`.

    offered: in which the attention backend of that name reads K and V, beside `dtype`. Raises
    InvalidRequest, with what can be used, for another one.
    """
    if asked in ("auto", dtype_name(dtype)):
        return None
    offered = frozenset(kind for kind in offered if not _missing_fp8(kind, device))
    kind = KV_DTYPES[asked]
    if kind in offered:
        return kind
    reason = _missing_fp8(kind, device) or (
        f'attention_backend="{backend_name}" does not read K and V of {dtype_name(dtype)} queries '
        "in it"
    )
    others = '", "'.join(["auto", *sorted(map(dtype_name, offered - {dtype}))])
    raise InvalidRequest(f'kv_dtype="{asked}" cannot be used: {reason}; "{others}" can')


def _missing_fp8(kind: torch.dtype, device: torch.device) -> str:
    """Returns why a CUDA device cannot store this dtype, or "" if it can."""
    if kind != torch.float8_e4m3fn or device.type != "cuda":
        return ""
    capability = torch.cuda.get_device_capability(device)
    if capability >= FP8_CAPABILITY:
        return ""
    return f"the GPU's compute capability is {capability}, fp8_e4m3 needs {FP8_CAPABILITY}"


def lacks_memory(what: str, num_bytes: int, device: torch.device, remedy: str) -> InvalidRequest:
    """The error for memory that could not be allocated, with what is free."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    where = str(device) if device.type == "cuda" else "this machine"
    return InvalidRequest(
        f"{what} of {format_bytes(num_bytes)} cannot be allocated: {where} has "
        f"{format_bytes(free)} free; {remedy}"
    )


def describe_device(device: torch.device) -> str:
    """ "cpu", or "cuda:0 (NVIDIA H200)"."""
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"
