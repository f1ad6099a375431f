"""Which backend a model's attention runs on."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from radixserve.attention.base import AttentionBackend
from radixserve.attention.cpu import CpuBackend
from radixserve.attention.torch import TorchBackend
from radixserve.errors import ModelNotSupported
from radixserve_kernels.cpu_ops import unavailable

logger = logging.getLogger("radixserve")

_BACKENDS: dict[str, type[TorchBackend | CpuBackend]] = {"torch": TorchBackend, "cpu": CpuBackend}


def choose_backend(asked: str, dtype: torch.dtype, device: torch.device) -> str:
    """The name of the backend that "auto" stands for, or the one that is asked for.

    "auto" is "cpu" where its kernels can be had and "torch" elsewhere. Raises ModelNotSupported,
    with the reason, if the one asked for cannot run.
    """
    if asked == "torch":
        return asked
    reason = unavailable(dtype) if device.type == "cpu" else f"the device is {device.type}"
    if not reason:
        return "cpu"
    if asked != "auto":
        raise ModelNotSupported(
            f'attention_backend="cpu" cannot be used: {reason}; "auto" and "torch" can'
        )
    logger.warning("PyTorch's operations are used, which are slower: no CPU kernels, %s", reason)
    return "torch"


def make_backend(name: str, kv: Tensor, num_heads: int, *, shares: bool = True) -> AttentionBackend:
    """The backend of that name over a pool's kv [L, 2, num_pages, P, Hkv, D].

    `shares`: whether rows attend together to pages that they have in common, where that pays.
    """
    return _BACKENDS[name](kv, num_heads, shares=shares)
