"""What these tests share with those of attention, and the two ways through gpu_ops on a CPU."""

from __future__ import annotations

import importlib.util

import pytest

from tests.cpu_kernels import cpu_level, num_threads

__all__ = ["cpu_level", "num_threads", "path"]


@pytest.fixture(params=["reference", "triton"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The torch references, or the Triton kernels in Triton's interpreter."""
    name: str = request.param
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            pytest.skip("Triton is not installed: there is none for this system")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    else:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return name
