"""The K and V of every page: one tensor for all layers, so that a page prefix is copied at once.

Owns the memory; the cache owns the assignment of pages.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from radixserve.arrays import IntArray
from radixserve.config import EngineConfig, parse_bytes
from radixserve.errors import InvalidRequest
from radixserve.models.base import ModelInfo
from radixserve.runner.system_memory import MEMORY_PAGE, free_memory, prefault_async
from radixserve_kernels.torch_ops import copy_slots

FREE_MEMORY_DIVISOR = 4  # the default pool takes at most this fraction of the free memory: 1 / 4
PREFAULT_SYNC_BYTES = 256 << 20  # of a pool on the CPU that are mapped before it is used
PREFAULT_ASYNC_BYTES = 1 << 30  # of it that are mapped by a thread soon after


class KVPool:
    """kv [L, 2, num_pages, P, Hkv, D], zeros: a slot that was never written holds no NaN."""

    def __init__(
        self, info: ModelInfo, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        shape = (info.num_layers, 2, num_pages, page_size, info.num_kv_heads, info.head_dim)
        self.kv = _zeros(shape, info.dtype, device)
        self._by_slot = self.kv.flatten(2, 3)  # [L, 2, num_slots, Hkv, D]

    @property
    def num_bytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()

    def copy_page_prefixes(self, copies: IntArray) -> None:
        """Copy page prefixes in every layer, as if all at once.

        copies [n, 3]: source page, destination page, tokens; no page is written twice or both
        written and read.
        """
        if not len(copies):
            return
        source, destination, num_tokens = copies.astype(np.int64).T
        of_copy = np.repeat(np.arange(len(copies)), num_tokens)
        offset = np.arange(len(of_copy)) - np.repeat(np.cumsum(num_tokens) - num_tokens, num_tokens)
        slots = [pages[of_copy] * self.page_size + offset for pages in (source, destination)]
        read, write = (torch.from_numpy(slot).to(self.kv.device) for slot in slots)
        copy_slots(self._by_slot, read, write)


def choose_num_pages(config: EngineConfig, info: ModelInfo) -> int:
    """Pages of the pool: as many as asked for, as fit the bytes asked for, or a default.

    The default is what `max_running_requests` sequences of full length need, at most a share of the
    memory that is free now. Raises InvalidRequest if not one page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    page_bytes = info.kv_bytes_per_token * config.page_size
    if config.kv_cache_memory is not None:
        allowed = parse_bytes(config.kv_cache_memory)
        if allowed < page_bytes:
            raise InvalidRequest(
                f"kv_cache_memory of {allowed} bytes holds no page; a page of {config.page_size} "
                f"tokens of this model needs {page_bytes} bytes"
            )
        return min(allowed // page_bytes, 2**31 - 1)
    longest = min(config.max_seq_len or info.max_positions, info.max_positions)
    wanted = config.max_running_requests * -(-longest // config.page_size)
    fitting = free_memory() // FREE_MEMORY_DIVISOR // page_bytes
    if fitting < 1:
        raise InvalidRequest(
            f"a page of {config.page_size} tokens of this model needs {page_bytes} bytes, more "
            f"than a quarter of the free memory; set num_pages or kv_cache_memory"
        )
    return max(1, min(wanted, fitting))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU the system maps memory when it is first touched, which would delay a step:
    the pages that are allocated first are touched here, those after them in a thread."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        flat = np.zeros(num_bytes, np.uint8)
    except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
        raise InvalidRequest(
            f"the KV pool needs {num_bytes} bytes, which cannot be had; "
            "set a smaller num_pages or kv_cache_memory"
        ) from error
    runs = flat.reshape(shape[0] * shape[1], -1)  # pages with low ids first, in each
    soon = min(PREFAULT_ASYNC_BYTES, free_memory() // FREE_MEMORY_DIVISOR) // len(runs)
    ready = min(PREFAULT_SYNC_BYTES // len(runs), soon)
    runs[:, :ready:MEMORY_PAGE] = 0
    prefault_async(flat, len(runs), ready, soon)
    return torch.from_numpy(flat).view(dtype).view(shape)  # which holds `flat`
