"""The K and V of every page: one tensor for all layers, so that a page prefix is copied at once.

Layers that see a window of positions only may have a tensor of their own with fewer pages. Owns the
memory; the cache owns the assignment of pages.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.arrays import IntArray
from radixserve.attention.base import WindowKV
from radixserve.errors import InvalidRequest
from radixserve.models.base import ModelInfo
from radixserve.runner.pool_sizing import PoolSize
from radixserve.runner.system_memory import map_on_demand
from radixserve.store.run_file import ByteArray, KVLayout
from radixserve_kernels.stored_kv import stored_width
from radixserve_kernels.torch_ops import copy_slots

_MIN_SPAN = 4  # slots in a row, on average, that are copied together


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
        """The layout of a token in `kv`."""
        num_layers, num_kv_heads, width = self.kv.shape[0], *self.kv.shape[-2:]
        name = str(self.kv.dtype).removeprefix("torch.")
        itemsize, scale = self.kv.element_size(), width - self._head_dim
        return KVLayout(num_layers, num_kv_heads, self._head_dim, name, itemsize, scale * itemsize)

    def read(self, slots: IntArray, into: ByteArray) -> ByteArray:
        """A copy of the K/V in some slots of `kv`: [layers, 2, slots, bytes of a row], at the
        beginning of `into`, which is at least as large."""
        pool = self.kv.flatten(2, 3)  # [L, 2, num_slots, Hkv, W]
        num_layers, row_bytes = pool.shape[0], pool[0, 0, 0].numel() * pool.element_size()
        copy = into[: num_layers * 2 * len(slots) * row_bytes]
        copy = copy.reshape(num_layers, 2, len(slots), row_bytes)
        if self._rows is None:
            index = torch.from_numpy(slots).to(pool.device)
            shape = (num_layers, 2, len(slots), *pool.shape[3:])
            torch.from_numpy(copy).view(pool.dtype).view(shape).copy_(pool.index_select(2, index))
        elif (spans := _spans(slots)) is None:
            # With mode="raise" numpy would copy the result once more.
            self._rows.take(slots, 2, out=copy.view(self._rows.dtype), mode="clip")
        else:
            rows = copy.view(self._rows.dtype)
            for begin, end, slot in spans:
                rows[:, :, begin:end] = self._rows[:, :, slot : slot + end - begin]
        return copy

    def write(self, slots: IntArray, kv: ByteArray) -> None:
        """Set the K/V in some slots of `kv`, which are distinct; shape as of `read`."""
        if self._rows is None:
            pool = self.kv.flatten(2, 3)  # [L, 2, num_slots, Hkv, W]
            copy = torch.from_numpy(np.ascontiguousarray(kv)).view(pool.dtype)
            shape = (pool.shape[0], 2, len(slots), *pool.shape[3:])
            index = torch.from_numpy(slots).to(pool.device)
            pool.index_copy_(2, index, copy.view(shape).to(pool.device))
        elif (spans := _spans(slots)) is None:
            self._rows[:, :, slots] = kv.view(self._rows.dtype)
        else:
            rows = kv.view(self._rows.dtype)
            for begin, end, slot in spans:
                self._rows[:, :, slot : slot + end - begin] = rows[:, :, begin:end]

    @functools.cached_property
    def _rows(self) -> NDArray[Any] | None:
        """The memory of `kv` as [L, 2, num_slots, words], in the widest words that make up a row;
        None on a device. Numpy copies rows several times as fast as PyTorch."""
        if self.kv.device.type != "cpu":
            return None
        rows = self.kv.flatten(2, 3).flatten(3, 4).view(torch.uint8).numpy()
        itemsize = math.gcd(rows.shape[-1], 8)
        return rows.view(f"u{itemsize}")

    def copy_window_prefixes(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """The same of window pages, but one after the other."""
        for source, destination, num_tokens in copies:
            assert self.windows is not None
            kv = self.windows.kv[:, :, :, :num_tokens]
            kv[:, :, destination] = kv[:, :, source]


def _spans(slots: IntArray) -> list[tuple[int, int, int]] | None:
    """Slots [begin, end) that lie in a row, and the first of each; None where most lie alone."""
    ends = np.flatnonzero(np.diff(slots) != 1) + 1
    if _MIN_SPAN * len(ends) > len(slots):
        return None
    begins = np.concatenate([np.zeros(1, np.int64), ends])
    ends = np.append(ends, len(slots))
    return list(zip(begins.tolist(), ends.tolist(), slots[begins].tolist(), strict=True))


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
