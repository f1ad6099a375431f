"""The K and V of every page: one tensor for all layers, so that a page prefix is copied at once.

Layers whose heads have another shape than those of the first layer have a tensor of their own, with
the same pages; layers that see a window of positions only may have one with fewer pages. Owns the
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
from radixserve.attention.base import LayersKV, WindowKV
from radixserve.models.base import KVShape, ModelInfo
from radixserve.runner.device import lacks_memory
from radixserve.runner.kv_layout import ByteArray, KVLayout
from radixserve.runner.pool_sizing import PoolSize
from radixserve.runner.system_memory import make_large_page, map_on_demand, use_small_pages
from radixserve_kernels.cpu_weights import LARGE_PAGE, fresh_memory
from radixserve_kernels.stored_kv import dtype_name, stored_width
from radixserve_kernels.torch_ops import as_bytes, copy_slots

_LARGE_POOL = 1 << 30  # bytes from which on a tensor of the pool has large memory pages
_MIN_SPAN = 4  # slots in a row, on average, that are copied together
Spans = list[tuple[int, int, int]]  # of slots in a row the indices [begin, end), and the first slot


class KVPool:
    """kv [L, 2, num_pages, P, Hkv, W], zeros: a slot that was never written holds no NaN. W: the
    `stored_width` of a head in the dtype of stored K and V.

    With window pages `windows` has the layers that see a window of positions. `others` has the
    layers with the same pages as `kv` and other heads, those of a shape each; kv has all that are
    left.
    """

    def __init__(
        self, info: ModelInfo, size: PoolSize, page_size: int, device: torch.device
    ) -> None:
        self.num_pages, self.num_window_pages = size
        self.page_size = page_size
        self._dtype, self._device = info.stored_kv_dtype, device
        in_windows = info.window_layers if self.num_window_pages else ()
        self._shapes = info.shapes_of_kv
        layers_by_shape: dict[KVShape, list[int]] = {}
        for layer, shape in enumerate(self._shapes):
            if layer not in in_windows:
                layers_by_shape.setdefault(shape, []).append(layer)
        if not layers_by_shape:
            layers_by_shape = {self._shapes[0]: []}
        first, *others = (
            LayersKV(self._make(len(layers), self.num_pages, shape), tuple(layers))
            for shape, layers in layers_by_shape.items()
        )
        self.kv, self._layers = first
        self.others = tuple(others)
        self._firsts = [  # the first number of each layer's K and V
            part.view(-1)[:1]
            for layers in (first, *others)
            for part in layers.kv.flatten(0, 1)
            if device.type == "cpu" and layers.kv.nbytes >= _LARGE_POOL
        ]
        for number in self._firsts:
            use_small_pages(*_large_page(number))
        self.windows: WindowKV | None = None
        if in_windows:
            # One shape: `divide_pool` makes no window pages otherwise.
            (shape,) = {self._shapes[layer] for layer in in_windows}
            kv = self._make(len(in_windows), self.num_window_pages + 1, shape)
            self.windows = WindowKV(kv, in_windows)

    def _make(self, num_layers: int, num_pages: int, shape: KVShape) -> Tensor:
        head = shape.num_heads, stored_width(shape.dim, self._dtype)
        size = (num_layers, 2, num_pages, self.page_size, *head)
        return _zeros(size, self._dtype, self._device)

    def enlarge_next(self) -> bool:
        """Replace the small memory pages at the begin of a layer's K or V by a large one, which
        attention reads faster. A pool of large pages has small ones there at first: to clear a
        large one for every layer takes longer than a short prompt. A millisecond or two, up to
        five in a virtual machine. Returns False once all are large.
        """
        if not self._firsts:
            return False
        first = self._firsts.pop()
        make_large_page(*_large_page(first))
        first.copy_(first.clone())  # maps the page if nothing was written yet
        return True

    @property
    def layers(self) -> list[LayersKV]:
        """`kv` and `others`."""
        return [LayersKV(self.kv, self._layers), *self.others]

    @property
    def num_bytes(self) -> int:
        tensors = [self.kv, *(layers.kv for layers in self.others)]
        if self.windows is not None:
            tensors.append(self.windows.kv)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def copy_page_prefixes(self, copies: IntArray) -> None:
        """Copy page prefixes in every layer of `kv` and `others`, as if all at once.

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
        for layers in self.layers:
            copy_slots(layers.kv.flatten(2, 3), read, write)  # [L, 2, num_slots, Hkv, W]

    @property
    def is_in_host_memory(self) -> bool:
        return self.kv.device.type == "cpu"

    def make_pinned(self, num_bytes: int) -> ByteArray:
        """Host memory that the pool's device reads at full speed."""
        memory: ByteArray = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memory

    @property
    def layout(self) -> KVLayout:
        """The layout of a token in `kv` and `others`."""
        shapes = tuple(self._shapes[layer] for layer in self._layers_of_tokens())
        return KVLayout(
            num_layers=len(shapes),
            num_kv_heads=max(shape.num_heads for shape in shapes),
            head_dim=max(shape.dim for shape in shapes),
            dtype=dtype_name(self._dtype),
            itemsize=self._dtype.itemsize,
            scale_bytes=stored_width(0, self._dtype) * self._dtype.itemsize,
            shapes=shapes if self.others else (),
        )

    def read(self, slots: IntArray, into: ByteArray) -> ByteArray:
        """A copy of the K/V in some slots of `kv` and `others`, at the beginning of `into`, which
        is at least as large: [rows, 2, slots, bytes of a row], see `KVLayout`."""
        layout = self.layout
        num_rows, row_bytes = layout.num_rows, layout.row_bytes
        copy = into[: num_rows * 2 * len(slots) * row_bytes]
        copy = copy.reshape(num_rows, 2, len(slots), row_bytes)
        spans = _spans(slots)
        for layers in self._layers_by_row:
            layers.read(slots, spans, copy[..., layers.row_part])
        return copy

    def write(self, slots: IntArray, kv: ByteArray) -> None:
        """Set the K/V in some slots of `kv` and `others`, which are distinct; shape as of
        `read`."""
        spans = _spans(slots)
        for layers in self._layers_by_row:
            layers.write(slots, spans, kv[..., layers.row_part])

    def _layers_of_tokens(self) -> list[int]:
        """The layers in `kv` and `others`, ascending."""
        return sorted((*self._layers, *(layer for apart in self.others for layer in apart.layers)))

    @functools.cached_property
    def _layers_by_row(self) -> list[_StoredLayers]:
        """`kv`, or each layer of `kv` and `others`, whose rows are then parts of a longer one."""
        if not self.others:
            return [_StoredLayers(self.kv, slice(None))]
        tensors = {
            layer: apart.kv[index : index + 1]
            for apart in self.layers
            for index, layer in enumerate(apart.layers)
        }
        layers: list[_StoredLayers] = []
        end = 0
        for layer in self._layers_of_tokens():
            begin, kv = end, tensors[layer]
            end += kv[0, 0, 0, 0].numel() * kv.element_size()
            layers.append(_StoredLayers(kv, slice(begin, end)))
        return layers

    def copy_window_prefixes(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """The same of window pages, but one after the other."""
        for source, destination, num_tokens in copies:
            assert self.windows is not None
            kv = self.windows.kv[:, :, :, :num_tokens]
            kv[:, :, destination] = kv[:, :, source]


class _StoredLayers:
    """Copies the K/V of slots out of the memory of some layers and into it."""

    def __init__(self, kv: Tensor, row_part: slice) -> None:
        """kv [L, 2, num_pages, P, Hkv, W]; row_part: bytes of a token's row that these layers
        have."""
        self.row_part = row_part
        self._pool = as_bytes(kv.flatten(2, 3))  # [L, 2, num_slots, Hkv, W]
        # On a CPU the same as [L, 2, num_slots, words], in the widest words that make up a row and
        # what is before it. Numpy copies rows several times as fast as PyTorch.
        self._words: NDArray[Any] | None = None
        if kv.device.type == "cpu":
            rows = self._pool.flatten(3, 4).view(torch.uint8).numpy()
            self._words = rows.view(f"u{math.gcd(rows.shape[-1], row_part.start or 0, 8)}")

    def read(self, slots: IntArray, spans: Spans | None, to: ByteArray) -> None:
        """to: [L, 2, slots, bytes of a row]; spans: `_spans` of the slots."""
        if self._words is None:
            rows = self._pool.index_select(2, torch.from_numpy(slots).to(self._pool.device))
            torch.from_numpy(to).view(rows.dtype).view(rows.shape).copy_(rows)
        elif spans is None:
            # With mode="raise" numpy would copy the result once more.
            self._words.take(slots, 2, out=to.view(self._words.dtype), mode="clip")
        else:
            words = to.view(self._words.dtype)
            for begin, end, slot in spans:
                words[:, :, begin:end] = self._words[:, :, slot : slot + end - begin]

    def write(self, slots: IntArray, spans: Spans | None, kv: ByteArray) -> None:
        """The reverse of `read`."""
        if self._words is None:
            rows = torch.from_numpy(np.ascontiguousarray(kv)).view(self._pool.dtype)
            rows = rows.view(len(self._pool), 2, len(slots), *self._pool.shape[3:])
            index = torch.from_numpy(slots).to(self._pool.device)
            self._pool.index_copy_(2, index, rows.to(self._pool.device))
        elif spans is None:
            self._words[:, :, slots] = kv.view(self._words.dtype)
        else:
            words = kv.view(self._words.dtype)
            for begin, end, slot in spans:
                self._words[:, :, slot : slot + end - begin] = words[:, :, begin:end]


def _spans(slots: IntArray) -> Spans | None:
    """The slots that lie in a row; None where most lie alone."""
    ends = np.flatnonzero(np.diff(slots) != 1) + 1
    if _MIN_SPAN * len(ends) > len(slots):
        return None
    begins = np.concatenate([np.zeros(1, np.int64), ends])
    ends = np.append(ends, len(slots))
    return list(zip(begins.tolist(), ends.tolist(), slots[begins].tolist(), strict=True))


def _large_page(number: Tensor) -> tuple[int, int]:
    """The address and the size of the large memory page with a number of the pool."""
    return number.data_ptr() // LARGE_PAGE * LARGE_PAGE, LARGE_PAGE


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU in memory pages that the system maps when they are first written. Attention
    reads large ones up to 1.2 times as fast, but they clear 2 MiB for the first token of every
    layer: they are for pools of _LARGE_POOL bytes and more."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        map_memory = fresh_memory if num_bytes >= _LARGE_POOL else map_on_demand
        flat = map_memory(num_bytes)
    except (MemoryError, ValueError, OverflowError, torch.OutOfMemoryError) as error:
        remedy = "set a smaller num_pages or kv_cache_memory"
        raise lacks_memory("a KV pool", num_bytes, device, remedy) from error
    return torch.from_numpy(flat).view(dtype).view(shape)  # which holds `flat`
