"""What these tests share with those of attention, and the two ways through gpu_ops on a CPU."""

from __future__ import annotations

import pytest

from tests.cpu_kernels import cpu_level, num_threads

__all__ = ["cpu_level", "num_threads", "path"]


@pytest.fixture(params=["reference", "triton"])
def path(request: pytest.FixtureRequest) -> str:
    """The torch references, or the Triton kernels in Triton's interpreter."""
    name: str = request.param
    if name == "triton":
        request.getfixturevalue("interpreted")
    return name
