"""Fixtures of the tests that run the compiled CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from radixserve_kernels.cpu_library import cpu_library
from radixserve_kernels.cpu_ops import unavailable


@pytest.fixture(params=["AMX", "AVX-512"])
def bf16_routine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs by one way to multiply in bfloat16, then by the other."""
    if reason := unavailable(torch.bfloat16):
        pytest.skip(reason)
    library = cpu_library()
    had_tiles = library.radixserve_bf16() == 2
    library.radixserve_use_tiles(int(request.param == "AMX"))
    try:
        if request.param == "AMX" and library.radixserve_bf16() != 2:
            pytest.skip("this processor has no AMX")
        yield request.param
    finally:
        library.radixserve_use_tiles(int(had_tiles))


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
