"""Fixtures of the tests that run the compiled CPU kernels."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from radixserve_kernels import cpu_library, processor
from radixserve_kernels.cpu_ops import unsupported_reason

_LOADERS = {  # each remembers its level's library, for all tests
    level: functools.cache(cpu_library.load.__wrapped__) for level in processor.LEVELS
}


def level_param(level: str) -> Any:
    asked = os.environ.get("RADIXSERVE_CPU_LEVEL", level)
    reason = "RADIXSERVE_CPU_LEVEL names another level"
    if level not in processor.levels():
        reason = f"this processor has no {level}"
    elif level == asked:
        return pytest.param(level)
    return pytest.param(level, marks=pytest.mark.skip(reason=reason))


@pytest.fixture(params=map(level_param, processor.LEVELS))
def cpu_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs with kernels for each instruction level that this processor has, or for the
    one that RADIXSERVE_CPU_LEVEL names."""
    if reason := unsupported_reason(torch.float32):
        pytest.skip(reason)
    level: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RADIXSERVE_CPU_LEVEL", level)
        patch.setattr(cpu_library, "load", _LOADERS[level])
        patch.setattr(cpu_library, "loaded", {})
        if level == "amx" and cpu_library.cpu_library().radixserve_bf16() != 2:
            pytest.skip("this system lets no process use AMX")
        yield level


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
