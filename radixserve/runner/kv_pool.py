"""The K and V of every page: one tensor for all layers, so that a page prefix is copied at once.

Layers that see a window of positions only may have a tensor of their own with fewer pages. Owns the
memory; the cache owns the assignment of pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixserve.arrays import IntArray
from radixserve.attention.base import WindowKV
from radixserve.config import (
    MAX_SHORT_WINDOW,
    SWA_FULL_TOKENS_RATIO,
    EngineConfig,
    parse_bytes,
)
from radixserve.errors import InvalidRequest
from radixserve.models.base import ModelInfo
from radixserve.runner.system_memory import free_memory, map_on_demand
from radixserve.store.run_file import ByteArray, KVLayout
from radixserve_kernels.stored_kv import stored_width
from radixserve_kernels.torch_ops import copy_slots

# The ends of a chunk and of a window inside a page, and a copied page prefix.
SPARE_WINDOW_PAGES = 3
FREE_MEMORY_DIVISOR = 4  # the default pool takes at most this fraction of the free memory: 1 / 4


class PoolSize(NamedTuple):
    """Pages of a pool. No window pages: layers with windows are in the pages of all others."""

    num_pages: int
    num_window_pages: int = 0


class KVPool:
    """kv [L, 2, num_pages, P, Hkv, W], zeros: a slot that was never written holds no NaN. W: the
    `stored_width` of a head in the dtype of stored K and V.

    With window pages `windows` has the layers that see a window of positions, kv all others.
    """

    def __init__(
        self, info: ModelInfo, size: PoolSize, page_size: int, device: torch.device
    ) -> None:
        self.num_pages, self.num_window_pages = size
        self.page_size = page_size
        layers = info.window_layers if self.num_window_pages else ()
        dtype, self._head_dim = info.stored_kv_dtype, info.head_dim
        token = (page_size, info.num_kv_heads, stored_width(info.head_dim, dtype))
        shape = (info.kv_layers - len(layers), 2, self.num_pages, *token)
        self.kv = _zeros(shape, dtype, device)
        self.windows: WindowKV | None = None
        if layers:
            shape = (len(layers), 2, self.num_window_pages + 1, *token)
            self.windows = WindowKV(_zeros(shape, dtype, device), layers)

    @property
    def num_bytes(self) -> int:
        tensors = [self.kv] if self.windows is None else [self.kv, self.windows.kv]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def copy_page_prefixes(self, copies: IntArray) -> None:
        """Copy page prefixes in every layer of `kv`, as if all at once.

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
        copy_slots(self.kv.flatten(2, 3), read, write)  # [L, 2, num_slots, Hkv, W]

    @property
    def layout(self) -> KVLayout:
        """What `kv` has of a token."""
        num_layers, num_kv_heads, width = self.kv.shape[0], *self.kv.shape[-2:]
        name = str(self.kv.dtype).removeprefix("torch.")
        itemsize, scale = self.kv.element_size(), width - self._head_dim
        return KVLayout(num_layers, num_kv_heads, self._head_dim, name, itemsize, scale * itemsize)

    def read(self, slots: IntArray, into: ByteArray) -> ByteArray:
        """A copy of the K/V in some slots of `kv`: [layers, 2, slots, bytes of a row], at the
        beginning of `into`, which is at least as large."""
        pool = self.kv.flatten(2, 3)  # [L, 2, num_slots, Hkv, W]
        index = torch.from_numpy(slots).to(self.kv.device)
        shape = (*pool.shape[:2], len(slots), *pool.shape[3:])
        num_bytes = math.prod(shape) * pool.element_size()
        copy = torch.from_numpy(into[:num_bytes]).view(pool.dtype).view(shape)
        if pool.device.type == "cpu":
            torch.index_select(pool, 2, index, out=copy)
        else:
            copy.copy_(pool.index_select(2, index))
        return into[:num_bytes].reshape(*shape[:3], -1)

    def write(self, slots: IntArray, kv: ByteArray) -> None:
        """Set the K/V in some slots of `kv`; shape as of `read`."""
        rows = self.kv.flatten(2, 3)  # [L, 2, num_slots, Hkv, W]
        copy = torch.from_numpy(np.ascontiguousarray(kv)).view(rows.dtype)
        shape = (rows.shape[0], 2, len(slots), *rows.shape[3:])
        index = torch.from_numpy(slots).to(rows.device)
        rows.index_copy_(2, index, copy.view(shape).to(rows.device))

    def copy_window_prefixes(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """The same of window pages, but one after the other."""
        for source, destination, num_tokens in copies:
            assert self.windows is not None
            kv = self.windows.kv[:, :, :, :num_tokens]
            kv[:, :, destination] = kv[:, :, source]


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


def choose_pool_size(config: EngineConfig, info: ModelInfo, states_bytes: int = 0) -> PoolSize:
    """`choose_num_pages`, divided by `divide_pool`."""
    return divide_pool(config, info, choose_num_pages(config, info, states_bytes))


def divide_pool(config: EngineConfig, info: ModelInfo, num_pages: int) -> PoolSize:
    """Split the memory of `num_pages` pages into full pages and window pages. A `num_pages` of the
    settings is kept, and window pages are added.

    The memory is not split if it holds `max_running_requests` sequences of full length. There are
    at least as many window pages as one sequence needs for a window and a chunk of its prompt.
    """
    size = config.page_size
    ratio = config.swa_full_tokens_ratio
    if ratio is None:
        is_short = config.num_pages is None and info.window_size <= MAX_SHORT_WINDOW
        ratio = SWA_FULL_TOKENS_RATIO if is_short else 1.0
    longest = min(config.max_seq_len or info.max_positions, info.max_positions)
    if longest <= info.window_size or not info.window_layers or ratio == 1:
        return PoolSize(num_pages)
    whole = PoolSize(num_pages)
    least = -(-(info.window_size + config.chunked_prefill_size) // size) + SPARE_WINDOW_PAGES
    if config.num_pages is not None:
        num_window_pages = max(least, math.ceil(ratio * num_pages))
    else:
        wanted = config.max_running_requests * -(-longest // size)
        if config.kv_cache_memory is None and num_pages >= wanted:
            return whole
        of_windows = info.window_bytes_per_token * size
        others = info.kv_bytes_per_token * size - of_windows
        num_bytes = num_pages * (of_windows + others)
        num_window_pages = max(least, int(num_bytes / (of_windows + others / ratio)))
        left = num_bytes - num_window_pages * of_windows
        num_pages = left // others if others else math.ceil(num_window_pages / ratio)
    if num_window_pages >= num_pages:
        return whole
    return PoolSize(min(num_pages, 2**31 - 1), num_window_pages)


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
