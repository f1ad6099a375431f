"""Memory that the system maps when it is needed, and how much is free."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest

from radixserve.runner import system_memory
from radixserve.runner.system_memory import cgroup_free_bytes, free_memory, map_on_demand

MIB, MEMORY_PAGE = 1 << 20, 4096

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked for it")


@linux
def test_memory_is_mapped_when_it_is_written() -> None:
    memory = map_on_demand(256 * MIB)
    assert len(memory) == 256 * MIB
    assert resident(memory) == 0
    memory[:: 16 * MIB] = 7
    assert resident(memory) == 16 * MEMORY_PAGE  # one page a write, none of 2 MiB
    assert memory.sum() == 16 * 7


def test_memory_that_cannot_be_had() -> None:
    with pytest.raises((MemoryError, ValueError)):
        map_on_demand(1 << 62)


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


def test_a_machine_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_memory, "cgroup_free_bytes", list)
    assert 0 < free_memory() < 1 << 50


def resident(memory: np.ndarray) -> int:
    """How many bytes of it the system has mapped so far."""
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    pages = np.zeros(-(-memory.nbytes // MEMORY_PAGE), np.uint8)
    assert mincore(memory.ctypes.data, memory.nbytes, pages.ctypes.data) == 0
    return int((pages & 1).sum()) * MEMORY_PAGE
