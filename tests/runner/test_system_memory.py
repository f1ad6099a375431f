"""Memory that the system provides before a step needs it."""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

from radixserve.runner.system_memory import (
    MEMORY_PAGE,
    cgroup_free_bytes,
    free_memory,
    prefault_async,
)

MIB = 1 << 20


linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked for it")


@linux
def test_memory_is_provided_and_left_as_it_is() -> None:
    fresh = mmap.mmap(-1, 128 * MIB)  # an allocator may have memory that was in use before
    memory = np.frombuffer(fresh, np.uint8)
    runs = memory.reshape(4, 32 * MIB)
    runs[:, 5 * MIB : 5 * MIB + 10] = 7
    before = provided(runs)
    assert before < 16 * MIB
    thread = prefault_async(memory, 4, 4 * MIB + 1, 28 * MIB - 1)
    assert thread is not None
    thread.join(60)
    if provided(runs) == before:
        pytest.skip("this system does not provide memory in advance")
    assert 90 * MIB < provided(runs) < 120 * MIB
    assert (runs[:, 5 * MIB : 5 * MIB + 10] == 7).all()
    assert runs.sum() == 4 * 10 * 7


@linux
def test_not_for_an_owner_that_is_gone() -> None:
    memory = np.zeros(4096 * MIB, np.uint8)
    before = most_resident()
    thread = prefault_async(memory, 64, 0, 64 * MIB)
    del memory
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    assert most_resident() - before < 2048 * MIB


def test_nothing_to_do() -> None:
    memory = np.zeros(2000, np.uint8)
    assert prefault_async(memory, 2, 1000, 5000) is None
    assert prefault_async(memory, 2, 10, 10) is None


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path) == []
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("7\n")
    (tmp_path / "memory.stat").write_text("anon 400\nactive_file 20\ninactive_file 5\nshmem 9\n")
    assert cgroup_free_bytes(tmp_path) == []  # no limit
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert cgroup_free_bytes(tmp_path) == [325]
    (tmp_path / "memory.current").write_text("1100\n")
    assert cgroup_free_bytes(tmp_path) == [0]
    older = tmp_path / "memory"
    older.mkdir()
    (older / "memory.limit_in_bytes").write_text("500\n")
    (older / "memory.usage_in_bytes").write_text("300\n")
    (older / "memory.stat").write_text("active_file 1\ntotal_active_file 30\n")
    assert cgroup_free_bytes(tmp_path) == [0, 230]
    assert 0 < free_memory() < 1 << 50


def provided(memory: np.ndarray) -> int:
    """How many bytes of it the system has provided so far."""
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    address = memory.ctypes.data // MEMORY_PAGE * MEMORY_PAGE
    size = memory.ctypes.data + memory.nbytes - address
    pages = np.zeros(-(-size // MEMORY_PAGE), np.uint8)
    assert mincore(address, size, pages.ctypes.data) == 0
    return int((pages & 1).sum()) * MEMORY_PAGE


def most_resident() -> int:
    """Bytes of this process at its largest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
