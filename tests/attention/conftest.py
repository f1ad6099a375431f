"""All attention backends behind one name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from radixserve.attention import cpu as cpu_backend
from radixserve.attention import reference
from radixserve.attention.base import AttentionBackend
from radixserve.attention.cuda import cascade, flashinfer_calls
from radixserve.attention.cuda import triton as triton_backend
from radixserve.attention.cuda.backend import PagedBackend
from radixserve.attention.cuda.flashinfer import FlashInferBackend
from radixserve.attention.cuda.triton import TritonBackend
from radixserve_kernels import gpu_ops
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.attention.fake_flashinfer import Fake, mark_sides
from tests.cpu_kernels import cpu_level, num_threads

__all__ = ["cpu_level", "num_threads"]

Make = Callable[..., AttentionBackend]
MakePaged = Callable[..., PagedBackend]
Recording = list[Callable[[], None]]


@pytest.fixture
def make_cpu() -> Make:
    def make(kv: Tensor, num_heads: int, *, shares: bool = True) -> AttentionBackend:
        if reason := unsupported_reason(kv.dtype):
            pytest.skip(reason)
        return cpu_backend.CpuBackend(kv, num_heads, shares=shares)

    return make


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """FlashInfer's place is taken by one that computes on the CPU, for heads of any kind."""
    monkeypatch.setattr(flashinfer_calls, "flashinfer_unsupported_reason", lambda *_: "")
    mark_sides(monkeypatch)
    return Fake()


@pytest.fixture
def make_flashinfer(fake: Fake) -> MakePaged:
    def make(kv: Tensor, num_heads: int, **options: object) -> PagedBackend:
        return FlashInferBackend(kv, num_heads, library=fake.library, **options)

    return make


@pytest.fixture
def recording(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """Everything that is launched from now on, by whichever kernels."""
    kernels: Recording = []
    fake.recording = kernels

    def recorded(call: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            kernels.append(lambda: call(*args, **kwargs))
            return call(*args, **kwargs)

        return launch

    names = ("decode", "extend", "merge_states")
    ops = {name: recorded(getattr(gpu_ops, name)) for name in names}
    ops |= {name: getattr(gpu_ops, name) for name in ("choose_splits", "choose_num_splits")}
    monkeypatch.setattr(triton_backend, "gpu_ops", SimpleNamespace(**ops))
    return kernels


@pytest.fixture(params=["torch", "cpu"])
def make_host(request: pytest.FixtureRequest, make_cpu: Make) -> Make:
    """The CPU's own backends; without its kernels the test of that one is skipped."""
    return make_cpu if request.param == "cpu" else reference.ReferenceBackend


@pytest.fixture(params=["torch", "cpu", "triton"])
def make_featured(request: pytest.FixtureRequest, make_cpu: Make) -> Make:
    """Those that have windows, chunks, soft caps and sinks."""
    if request.param == "triton":
        return partial(TritonBackend, shares=False)
    return make_cpu if request.param == "cpu" else reference.ReferenceBackend


@pytest.fixture(params=["flashinfer", "triton"])
def make_paged(request: pytest.FixtureRequest) -> MakePaged:
    """CUDA's backends: flashinfer over a fake FlashInfer, triton over its kernels' references."""
    if request.param == "flashinfer":
        return request.getfixturevalue("make_flashinfer")
    return TritonBackend


@pytest.fixture(params=["torch", "cpu", "flashinfer", "triton"])
def make(request: pytest.FixtureRequest) -> Make:
    """All of them."""
    if request.param in ("cpu", "flashinfer"):
        return request.getfixturevalue(f"make_{request.param}")
    return TritonBackend if request.param == "triton" else reference.ReferenceBackend


@pytest.fixture
def always_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows have in common is attended to together."""
    monkeypatch.setattr(cpu_backend, "MERGE_TOKENS", 0)
    monkeypatch.setattr(cascade, "SHARE_BYTES", 1)
    monkeypatch.setattr(cascade, "MERGE_TOKENS", 0)
