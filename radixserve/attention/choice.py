"""Chooses the attention backend of a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from radixserve.attention.base import (
    AttentionBackend,
    AttentionVariant,
    LayersKV,
    WindowKV,
    missing_features,
)
from radixserve.attention.cpu import CpuBackend
from radixserve.attention.cuda import flashinfer_calls
from radixserve.attention.cuda.flashinfer import FlashInferBackend
from radixserve.attention.cuda.triton import TritonBackend
from radixserve.attention.reference import ReferenceBackend
from radixserve.errors import ModelNotSupported
from radixserve_kernels import cpu_ops, gpu_ops

logger = logging.getLogger("radixserve")

_BACKENDS: dict[str, type[AttentionBackend]] = {
    "cpu": CpuBackend,
    "flashinfer": FlashInferBackend,
    "triton": TritonBackend,
    "torch": ReferenceBackend,
}
_ON_CUDA = ("flashinfer", "triton", "torch")  # "auto": the first one available
_ON_CPU = ("cpu", "torch")


def choose_backend(
    asked: str,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int | None = None,
    features: frozenset[str] = frozenset(),
) -> str:
    """Resolve an attention backend by name, "auto" included.

    "auto" is the fastest available one: on CUDA "flashinfer", "triton", "torch"; elsewhere "cpu",
    "torch". "triton" on a CPU, where its kernels' torch references run, must be requested.
    head_dim: of the model, where it is known; features: of AttentionFeatures, what any of its
    layers needs. Raises ModelNotSupported, with the reason and what
    can be used, if none can or the one asked for cannot.
    """
    candidates = _ON_CUDA if device.type == "cuda" else _ON_CPU
    if asked != "auto":
        if reason := unusable_reason(asked, dtype, device, head_dim, features):
            others = [
                candidate
                for candidate in candidates
                if not unusable_reason(candidate, dtype, device, head_dim, features)
            ]
            allowed = f'"auto" and "{", ".join(others)}" can'.replace(", ", '", "')
            raise ModelNotSupported(
                f'attention_backend="{asked}" cannot be used: {reason}'
                + (f"; {allowed}" if others else "")
            )
        return asked
    reasons: list[str] = []
    for name in candidates:
        reason = unusable_reason(name, dtype, device, head_dim, features)
        if not reason:
            _log_choice(name, device, reasons)
            return name
        reasons.append(f"no {name}: {reason}")
    raise ModelNotSupported(f"no attention backend can be used: {'; '.join(reasons)}")


def features_of(name: str) -> frozenset[str]:
    """The features, of AttentionFeatures, that the backend `name` computes."""
    return _BACKENDS[name].features


def unusable_reason(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int | None = None,
    features: frozenset[str] = frozenset(),
) -> str:
    """Why the backend `name` cannot run there, a model with such features; "" if it can."""
    if reason := missing_features(features_of(name), features):
        return reason
    where = {"cpu": ("cpu",), "flashinfer": ("cuda",), "triton": ("cuda", "cpu")}.get(name)
    if where is not None and device.type not in where:
        return f"the device is {device.type}"
    if name == "cpu":
        return cpu_ops.unsupported_reason(dtype)
    if name == "flashinfer":
        return (
            flashinfer_calls.flashinfer_unsupported_reason(dtype, head_dim)
            or flashinfer_calls.import_error()
        )
    if name == "triton":
        return gpu_ops.triton_unsupported_reason() if device.type == "cuda" else ""
    if dtype == torch.float16:
        return "PyTorch's operations are used with float32 and bfloat16, not with float16"
    return ""


def has_window_pages(name: str) -> bool:
    """Whether the backend `name` takes a WindowKV."""
    return _BACKENDS[name].has_window_pages


def kv_dtypes_of(name: str) -> frozenset[torch.dtype]:
    """In which the backend `name` reads K and V, beside the dtype of queries."""
    return _BACKENDS[name].kv_dtypes


def make_backend(
    name: str,
    kv: Tensor,
    num_heads: int,
    *,
    dtype: torch.dtype | None = None,
    windows: WindowKV | None = None,
    others: Sequence[LayersKV] = (),
    variants: Sequence[AttentionVariant] = (),
    shares: bool = True,
    is_exact: bool = False,
) -> AttentionBackend:
    """The backend of that name over a pool's kv [L, 2, num_pages, P, Hkv, W], and `windows` where
    it `has_window_pages`. `others`, of cpu only: layers whose heads have other shapes.

    `dtype`: of queries, None: that of kv, which is another one only among `kv_dtypes_of`.
    `variants`: the distinct ones of the model's layers, for each of which flashinfer plans; ()
    where all are plain. `shares`: whether rows attend together to pages that they have in common,
    where that pays; `is_exact`, of cpu and triton: only so that no bit of a result depends on it.
    """
    make: Callable[..., AttentionBackend] = _BACKENDS[name]
    if name in ("cpu", "triton"):
        make = partial(make, is_exact=is_exact)
    if name == "flashinfer":
        make = partial(FlashInferBackend, variants=variants)
    if dtype not in (None, kv.dtype):
        make = partial(make, dtype=dtype)
    if others:
        make = partial(make, others=others)
    if windows is None:
        return make(kv, num_heads, shares=shares)
    return make(kv, num_heads, windows, shares=shares)


def _log_choice(name: str, device: torch.device, reasons: list[str]) -> None:
    """Log the choice of "auto", and why the backends before it cannot be used."""
    why = "; ".join(reasons)
    if name == "torch":
        logger.warning("PyTorch's operations are used, which are slower: %s", why)
    else:
        why = cpu_ops.describe() if name == "cpu" else why
        logger.info("attention on %s: %s%s", device, name, f" ({why})" if why else "")
