"""Memory that the system maps when it is needed, and how much is free."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from radixserve.runner import system_memory
from radixserve.runner.kv_pool import _zeros
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


@linux
def test_a_large_pool_has_large_memory_pages() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text("ascii"):
        pytest.skip("the system has no large pages")
    for num_bytes, page in ((256 * MIB, MEMORY_PAGE), (1024 * MIB, 2 * MIB)):
        memory = _zeros((num_bytes,), torch.uint8, torch.device("cpu")).numpy()
        assert resident(memory) == 0
        memory[128 * MIB] = 7
        assert resident(memory) in (page, MEMORY_PAGE)  # where memory is fragmented, a small one
        if page == MEMORY_PAGE:
            continue
        flags = [line for line in vm_flags(memory) if line.startswith("VmFlags:")]
        assert "hg" in flags[0].split()  # large pages are asked for


def vm_flags(memory: NDArray[np.uint8]) -> list[str]:
    """The lines of the system's description of the mapping that holds `memory`."""
    address, is_inside, lines = memory.ctypes.data, False, []
    for line in Path("/proc/self/smaps").read_text("ascii", "replace").splitlines():
        bounds = line.split(" ", 1)[0].split("-")
        if len(bounds) == 2 and not line.startswith("VmFlags"):
            is_inside = int(bounds[0], 16) <= address < int(bounds[1], 16)
        if is_inside:
            lines.append(line)
    return lines


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
