"""What these tests share with those of attention, and the three ways through gpu_ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cpu_kernels import cpu_level, num_threads

__all__ = ["cpu_level", "num_threads", "path"]


@pytest.fixture(params=["reference", "triton", "cuda"])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """The torch references and the interpreted Triton kernels on the CPU, or the compiled ones on
    a CUDA device, where every tensor of the test lies and fresh memory holds NaN."""
    name: str = request.param
    if name != "cuda":
        if name == "triton":
            request.getfixturevalue("interpreted")
        yield name
        return
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    torch.set_default_device("cuda")
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills fresh memory with NaN
    yield name
    torch.use_deterministic_algorithms(False)
    torch.set_default_device(None)
