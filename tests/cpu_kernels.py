"""Fixtures of the tests that run the compiled CPU kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from radixserve_kernels.cpu_library import cpu_library
from radixserve_kernels.cpu_ops import unsupported_reason


@contextlib.contextmanager
def _tiles(use: bool) -> Iterator[None]:
    """AMX is used or not; skips the test if it should be and there is none."""
    library = cpu_library()
    had_tiles = library.radixserve_bf16() == 2
    library.radixserve_use_amx(int(use))
    try:
        if use and library.radixserve_bf16() != 2:
            pytest.skip("this processor has no AMX")
        yield
    finally:
        library.radixserve_use_amx(int(had_tiles))


@pytest.fixture(params=["AMX", "AVX-512"])
def bf16_routine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs by one way to multiply in bfloat16, then by the other."""
    if reason := unsupported_reason(torch.bfloat16):
        pytest.skip(reason)
    with _tiles(request.param == "AMX"):
        yield request.param


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
