"""Chooses the attention backend of a model, by what each backend says of itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from radixserve.attention.base import (
    AttentionBackend,
    AttentionVariant,
    BackendOptions,
    LayersKV,
    WindowKV,
    missing_features,
)
from radixserve.attention.cpu import CpuBackend
from radixserve.attention.cuda.flashinfer import FlashInferBackend
from radixserve.attention.cuda.triton import TritonBackend
from radixserve.attention.reference import ReferenceBackend
from radixserve.errors import ModelNotSupported

logger = logging.getLogger("radixserve")

# By name, in the order in which "auto" tries them: the fastest first.
BACKENDS: dict[str, type[AttentionBackend]] = {
    backend.name: backend
    for backend in (CpuBackend, FlashInferBackend, TritonBackend, ReferenceBackend)
}


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
    candidates = candidates_on(device.type)
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


def candidates_on(device_type: str) -> list[str]:
    """The backends that "auto" tries on devices of a type, in its order."""
    return [
        name
        for name, backend in BACKENDS.items()
        if device_type in (backend.auto_device_types or backend.device_types or {device_type})
    ]


def unusable_reason(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    head_dim: int | None = None,
    features: frozenset[str] = frozenset(),
) -> str:
    """Why the backend `name` cannot run there, a model with such features; "" if it can."""
    backend = BACKENDS[name]
    if reason := missing_features(backend.features, features):
        return reason
    if backend.device_types is not None and device.type not in backend.device_types:
        return f"the device is {device.type}"
    return backend.unsupported_reason(dtype, device, head_dim)


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
    it `has_window_pages`.

    `dtype`: of queries, None: that of kv, which is another one only among its `kv_dtypes`.
    `shares`: whether rows attend together to pages that they have in common, where that pays. The
    others are `BackendOptions`: a backend gets those that it takes.
    """
    make: Callable[..., AttentionBackend] = BACKENDS[name]
    given = BackendOptions(others=others, variants=variants, is_exact=is_exact)
    options = {option: value for option, value in given.items() if option in BACKENDS[name].options}
    assert not others or "others" in options, f"{name} takes layers of one shape"
    return make(kv, num_heads, windows, dtype, shares=shares, **options)


def _log_choice(name: str, device: torch.device, reasons: list[str]) -> None:
    """Log the choice of "auto", and why the backends before it cannot be used."""
    backend, why = BACKENDS[name], "; ".join(reasons)
    if backend.is_slow:
        logger.warning("PyTorch's operations are used, which are slower: %s", why)
    else:
        about = why or backend.about(device.type)
        logger.info("attention on %s: %s (%s)", device, name, about)
