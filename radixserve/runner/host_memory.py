"""`keep_freed_memory`: what the CPU runner asks of the C library's allocator."""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger("radixserve")

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGEST = 1 << 30  # bytes; int is what mallopt takes


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
