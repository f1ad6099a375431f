"""System memory: settings of malloc, memory mapped on demand, and the number of free bytes."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("radixserve")

FREE_FALLBACK = 4 << 30  # bytes assumed free where the system does not report them
CONTROL_GROUPS = Path("/sys/fs/cgroup")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST = 1 << 30  # bytes; int is what mallopt takes
_LARGE_PAGES, _NO_LARGE_PAGES, _COLLAPSE = 14, 15, 25  # Linux's MADV_HUGEPAGE and so on


def keep_freed_memory() -> bool:
    """Make glibc reuse the memory of freed tensors instead of giving it back to the system.

    A step allocates the same activations over and over; fresh pages for them, which the system
    clears one by one, cost up to ten times the operation that fills them. Process-wide; True if the
    allocator took it, False where it is not glibc's.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    taken = bool(mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(mallopt(_TRIM_THRESHOLD, _LARGEST))
    logger.debug("freed memory is %s", "kept for the next step" if taken else "given back")
    return taken


def map_on_demand(num_bytes: int) -> NDArray[np.uint8]:
    """Zeros in small memory pages, each mapped by the system when it is first written.

    A page costs 0.6 us then. Raises MemoryError.
    """
    if sys.platform != "linux":
        return np.zeros(num_bytes, np.uint8)
    try:
        mapped = mmap.mmap(-1, max(num_bytes, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be had: {error}") from error
    with contextlib.suppress(OSError):  # a system without large pages
        mapped.madvise(_NO_LARGE_PAGES)
    return np.frombuffer(mapped, np.uint8, num_bytes)  # which holds `mapped`


def use_small_pages(address: int, num_bytes: int) -> None:
    """Have the system map this memory in small pages. It must begin and end with a large one."""
    _advise(address, num_bytes, _NO_LARGE_PAGES)


def make_large_page(address: int, num_bytes: int) -> None:
    """Undo `use_small_pages`: small pages that are mapped are copied into a large one. A system
    that cannot do it at once does it by and by."""
    _advise(address, num_bytes, _LARGE_PAGES)
    _advise(address, num_bytes, _COLLAPSE)


def _advise(address: int, num_bytes: int, advice: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice)


def free_memory() -> int:
    """Bytes that can be allocated without swapping, as reported by the system; in a container no
    more than its limit leaves."""
    return min([_free_of_system(), *cgroup_free_bytes()])


def _free_of_system() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (OSError, ValueError, AttributeError):
        return FREE_FALLBACK


def cgroup_free_bytes(folder: Path = CONTROL_GROUPS) -> list[int]:
    """Bytes left by Linux's control groups, version 2 and 1; cached files count as free."""
    free_bytes = []
    for limit, used, kept in (
        ("memory.max", "memory.current", ("active_file", "inactive_file")),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            ("total_active_file", "total_inactive_file"),
        ),
    ):
        try:
            most, now = (int((folder / name).read_text("ascii")) for name in (limit, used))
            lines = (folder / limit).with_name("memory.stat").read_text("ascii").splitlines()
            files = sum(int(count) for name, count in map(str.split, lines) if name in kept)
        except (OSError, ValueError):  # there is none, or it is without a limit
            continue
        free_bytes.append(max(0, most - now + files))
    return free_bytes
