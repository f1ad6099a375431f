"""Memory that the system provides before a step needs it."""

from __future__ import annotations

import resource
import sys

import numpy as np
import pytest

from radixserve.runner.host_memory import provide_meanwhile

MIB = 1 << 20


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked for it")
def test_memory_is_provided_and_left_as_it_is() -> None:
    runs = np.zeros((4, 32 * MIB), np.uint8)
    runs[:, 5 * MIB : 5 * MIB + 10] = 7
    before = resident()
    thread = provide_meanwhile(runs, 4 * MIB + 1, 28 * MIB - 1)
    assert thread is not None
    thread.join(60)
    if resident() - before < MIB:
        pytest.skip("this system does not provide memory in advance")
    assert 80 * MIB < resident() - before < 120 * MIB
    assert (runs[:, 5 * MIB : 5 * MIB + 10] == 7).all()
    assert runs.sum() == 4 * 10 * 7


def test_not_for_an_owner_that_is_gone() -> None:
    runs = np.zeros((64, 64 * MIB), np.uint8)
    before = resident()
    thread = provide_meanwhile(runs, 0, 64 * MIB)
    del runs
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    assert resident() - before < 1024 * MIB


def test_nothing_to_do() -> None:
    runs = np.zeros((2, 1000), np.uint8)
    assert provide_meanwhile(runs, 1000, 5000) is None
    assert provide_meanwhile(runs, 10, 10) is None
