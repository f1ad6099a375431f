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
from radixserve.runner.system_memory import free_memory, map_on_demand
from radixserve_kernels.torch_ops import copy_slots

FREE_MEMORY_DIVISOR = 4  # the default pool takes at most this fraction of the free memory: 1 / 4


class KVPool:
    """kv [L, 2, num_pages, P, Hkv, D], zeros: a slot that was never written holds no NaN."""

    def __init__(
        self, info: ModelInfo, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        shape = (info.kv_layers, 2, num_pages, page_size, info.num_kv_heads, info.head_dim)
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


def choose_num_pages(config: EngineConfig, info: ModelInfo, states_bytes: int = 0) -> int:
    """Pages of the pool: as many as asked for, as fit the bytes asked for beside the states of
    recurrent layers, or a default.

    The default is what `max_running_requests` sequences of full length need, at most a share of the
    memory that is free now. Raises InvalidRequest if not one page fits.
    """
    if config.num_pages is not None:
        return config.num_pages
    page_bytes = info.kv_bytes_per_token * config.page_size
    if config.kv_cache_memory is not None:
        allowed = parse_bytes(config.kv_cache_memory)
        if allowed < page_bytes + states_bytes:
            beside = f" beside {states_bytes} bytes of states" if states_bytes else ""
            raise InvalidRequest(
                f"kv_cache_memory of {allowed} bytes holds no page{beside}; a page of "
                f"{config.page_size} tokens of this model needs {page_bytes} bytes"
            )
        return min((allowed - states_bytes) // page_bytes, 2**31 - 1)
    longest = min(config.max_seq_len or info.max_positions, info.max_positions)
    wanted = config.max_running_requests * -(-longest // config.page_size)
    free = free_memory()
    fitting = min(free // FREE_MEMORY_DIVISOR, free - states_bytes) // page_bytes
    if fitting < 1:
        raise InvalidRequest(
            f"a page of {config.page_size} tokens of this model needs {page_bytes} bytes, more "
            f"than a quarter of the free memory; set num_pages or kv_cache_memory"
        )
    return max(1, min(wanted, fitting))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU in small memory pages, which the system maps when they are first written:
    large ones would clear 2 MiB for the first token of every layer."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        flat = map_on_demand(num_bytes)
    except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
        raise InvalidRequest(
            f"the KV pool needs {num_bytes} bytes, which cannot be had; "
            "set a smaller num_pages or kv_cache_memory"
        ) from error
    return torch.from_numpy(flat).view(dtype).view(shape)  # which holds `flat`
