"""Both attention backends behind one name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from radixserve.attention import cpu as cpu_backend
from radixserve.attention import torch as torch_backend
from radixserve.attention.base import AttentionBackend
from radixserve_kernels.cpu_ops import unavailable
from tests.cpu_kernels import bf16_routine, num_threads

__all__ = ["bf16_routine", "num_threads"]

Make = Callable[..., AttentionBackend]


@pytest.fixture
def make_cpu() -> Make:
    def make(kv: Tensor, num_heads: int, *, shares: bool = True) -> AttentionBackend:
        if reason := unavailable(kv.dtype):
            pytest.skip(reason)
        return cpu_backend.CpuBackend(kv, num_heads, shares=shares)

    return make


@pytest.fixture(params=["torch", "cpu"])
def make(request: pytest.FixtureRequest, make_cpu: Make) -> Make:
    """Makes a backend of either kind; without its kernels the test is skipped."""
    return make_cpu if request.param == "cpu" else torch_backend.TorchBackend


@pytest.fixture
def always_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rows have in common is attended to together."""
    monkeypatch.setattr(torch_backend, "SHARE_BYTES", 1)
    monkeypatch.setattr(cpu_backend, "MERGE_TOKENS", 0)
