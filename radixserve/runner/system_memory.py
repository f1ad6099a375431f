"""System memory: settings of malloc, prefaulting, and the number of free bytes."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import weakref
from pathlib import Path
from threading import Thread

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("radixserve")

MEMORY_PAGE = 4096  # bytes, the smallest unit that systems map
FREE_FALLBACK = 4 << 30  # bytes assumed free where the system does not report them
CONTROL_GROUPS = Path("/sys/fs/cgroup")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST = 1 << 30  # bytes; int is what mallopt takes
_POPULATE_WRITE = 23  # Linux's madvise: prefault the memory, keep its contents
_PIECE_BYTES = 2 << 20  # prefaulted by one call


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


def prefault_async(memory: NDArray[np.uint8], num_runs: int, start: int, end: int) -> Thread | None:
    """Prefault bytes [start, end) of each of `num_runs` equal parts of `memory`, in a thread.

    They may be read and written meanwhile. Otherwise the first step to touch them would wait until
    the system has cleared them. Linux only, from 5.14 on; the thread ends when `memory` has no
    other reference. Returns the thread, None where there is nothing to do.
    """
    run_bytes = len(memory) // num_runs
    end = min(end, run_bytes)
    if start >= end or sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    owned = weakref.ref(memory)

    def provide() -> None:
        for first in range(start, end, _PIECE_BYTES):
            for run in range(num_runs):
                held = owned()
                if held is None:
                    return
                piece = held.ctypes.data + run * run_bytes + first
                address = piece // MEMORY_PAGE * MEMORY_PAGE
                size = piece + min(_PIECE_BYTES, end - first) - address
                if madvise(address, size, _POPULATE_WRITE):
                    logger.debug("the system does not provide memory in advance")
                    return
                del held

    thread = Thread(target=provide, name="radixserve-memory", daemon=True)
    thread.start()
    return thread


def free_memory() -> int:
    """Bytes that can be allocated without swapping, as reported by the system; in a container no
    more than its limit leaves."""
    return min(_free_of_system(), *cgroup_free_bytes())


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
    found = []
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
        found.append(max(0, most - now + files))
    return found
