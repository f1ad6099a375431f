"""A plan's arrays on the host and on the device: `LaunchMetadata`, made by `PlanUploader`.

The host's side is pinned: FlashInfer plans from it. On the CPU the arrays are copied as well, so
that later plans do not change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixserve.arrays import IntArray
from radixserve.attention.base import ForwardBatch, WindowBatch
from radixserve.attention.cuda.plan import LaunchPlan, PageRanges
from radixserve_kernels import gpu_ops

ALIGNED = 4  # int32 values: kernels are specialised on whether an address is a multiple of 16 bytes


class LaunchArrays(NamedTuple):
    """A launch's index arrays on one side, int32; see `LaunchPlan`."""

    qo_indptr: Tensor  # [n + 1]
    kv_indptr: Tensor  # [n + 1]
    last_page_len: Tensor  # [n]
    kv_lens: Tensor  # [n]


class GraphBuffers(NamedTuple):
    """Device memory of a graph's launch of n requests, int32. Filled before it is planned."""

    qo_indptr: Tensor  # [n + 1]
    kv_indptr: Tensor  # [n + 1]
    last_page_len: Tensor  # [n]
    kv_indices: Tensor  # [max_pages]
    arrays: Tensor  # all but the page ids: LaunchArrays, then [n] for what ranges of pages need
    window_kv_indices: Tensor | None = None  # [max_pages] of layers that have window pages

    @classmethod
    def empty(
        cls, n: int, kv_indices: Tensor, window_kv_indices: Tensor | None = None
    ) -> GraphBuffers:
        places, total = layout([n + 1, n + 1, n, n, n])
        arrays = kv_indices.new_zeros(total)
        qo_indptr, kv_indptr, last_page_len = (arrays[place] for place in places[:3])
        return cls(qo_indptr, kv_indptr, last_page_len, kv_indices, arrays, window_kv_indices)


@dataclass(frozen=True, slots=True)
class LaunchMetadata:
    """A launch with its arrays on both sides: all that a kernel needs to know of it."""

    plan: LaunchPlan
    host: LaunchArrays  # pinned where the device is CUDA; valid until the next plan
    device: LaunchArrays
    kv_indices: Tensor  # [num_pages] int32 on the device
    wrapper_key: str  # no two launches of a plan have the same
    is_merged: bool  # with another launch of the plan, by its lse
    window_kv_indices: Tensor | None = None  # [num_pages] of layers that have window pages


class PlanUploader:
    """For one stream. `begin`, any number of uploads, `end`; then kernels that read them.

    Between `end` and the next `begin` the device may still be copying from pinned memory, this one
    and that of any library that planned in between: `begin` waits until it has. Under overlap that
    copy belongs to the step before last, so that the wait is over at once.
    """

    def __init__(self, device: torch.device, kernel_pages: int = 1) -> None:
        """kernel_pages: pages, as kernels read them, of a page of the batch."""
        self._device, self._kernel_pages = device, kernel_pages
        self._is_cuda = device.type == "cuda"
        self._pinned = torch.empty(0, dtype=torch.int32)
        self._used = 0
        self._copied: torch.cuda.Event | None = None

    def begin(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._used = 0

    def end(self) -> None:
        if self._is_cuda:
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()

    def launch(
        self,
        plan: LaunchPlan,
        wrapper_key: str,
        batch: ForwardBatch,
        *,
        is_merged: bool,
        buffers: GraphBuffers | None = None,
    ) -> LaunchMetadata:
        """A launch of the batch's plan, for a graph in its buffers; page ids of whole rows are the
        batch's own."""
        places, num_pages = plan.kv_indices, plan.num_pages
        small = [plan.qo_indptr, plan.kv_indptr, plan.last_page_len, plan.kv_lens]
        if isinstance(places, PageRanges):  # small numbers in place of all page ids
            small.append(places.first.astype(np.int32))
        host, device = self.upload(small, None if buffers is None else buffers.arrays)
        pages = None if buffers is None else buffers.kv_indices[:num_pages]
        if isinstance(places, PageRanges):
            if pages is None:
                pages = torch.empty(num_pages, dtype=torch.int32, device=self._device)
            most = int(places.lengths.max())
            gpu_ops.copy_ranges(batch.kv_indices, device[4], device[1], pages, most)
        elif isinstance(places, slice):
            own = batch.kv_indices[places]
            pages = own if pages is None else pages.copy_(own)
        else:
            pages = self.upload([places], pages)[1][0]
        sides = LaunchArrays(*host[:4]), LaunchArrays(*device[:4])
        in_windows = None
        if batch.window is not None:
            in_windows = self._window_pages(pages, batch.window, buffers)
        return LaunchMetadata(plan, *sides, pages, wrapper_key, is_merged, in_windows)

    def _window_pages(
        self, pages: Tensor, window: WindowBatch, buffers: GraphBuffers | None
    ) -> Tensor:
        """The window page of each of the launch's pages."""
        table, count = window.device_page_table, self._kernel_pages
        assert table is not None, "window pages are not on the device"
        out = None
        if buffers is not None:
            assert buffers.window_kv_indices is not None
            out = buffers.window_kv_indices[: len(pages)]
        if count == 1:
            return torch.index_select(table, 0, pages, out=out)
        window_pages = table.index_select(0, pages // count).mul_(count).add_(pages % count)
        return window_pages if out is None else out.copy_(window_pages)

    def upload(
        self, arrays: Sequence[IntArray], into: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The arrays on the host and on the device, by one copy, placed as `layout` says.

        `into`: int32 memory on the device that holds them; else it is new.
        """
        places, total = layout([len(array) for array in arrays])
        host = self._take(total)
        flat = host.numpy()
        for array, place in zip(arrays, places, strict=True):
            flat[place] = array
        if into is None:
            into = torch.empty(total, dtype=torch.int32, device=self._device)
        device = into[:total]
        device.copy_(host, non_blocking=True)
        return [host[place] for place in places], [device[place] for place in places]

    def _take(self, size: int) -> Tensor:
        """[size] of the pinned buffer; a full one lives on with the views of it."""
        if not self._is_cuda:
            return torch.zeros(size, dtype=torch.int32)
        if self._used + size > len(self._pinned):
            length = max(2 * len(self._pinned), self._used + size, 1 << 16)
            self._pinned = torch.empty(length, dtype=torch.int32, pin_memory=True)
            self._used = 0
        self._used += size
        return self._pinned[self._used - size : self._used]


def layout(lengths: Sequence[int]) -> tuple[list[slice], int]:
    """Where arrays of these lengths lie in one buffer, aligned, and the length of all."""
    places, start = [], 0
    for length in lengths:
        places.append(slice(start, start + length))
        start += -(-length // ALIGNED) * ALIGNED
    return places, places[-1].stop if places else 0
