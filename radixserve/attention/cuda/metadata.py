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
from radixserve.attention.base import ForwardBatch
from radixserve.attention.cuda.plan import LaunchPlan, PagedPlan, PageRanges
from radixserve_kernels import gpu_ops

ALIGNED = 4  # int32 values: kernels are specialised on whether an address is a multiple of 16 bytes


class LaunchArrays(NamedTuple):
    """A launch's index arrays on one side, int32; see `LaunchPlan`."""

    qo_indptr: Tensor  # [n + 1]
    kv_indptr: Tensor  # [n + 1]
    last_page_len: Tensor  # [n]
    kv_lens: Tensor  # [n]


@dataclass(frozen=True, slots=True)
class LaunchMetadata:
    """A launch with its arrays on both sides: all that a kernel needs to know of it."""

    plan: LaunchPlan
    host: LaunchArrays  # pinned where the device is CUDA; valid until the next plan
    device: LaunchArrays
    kv_indices: Tensor  # [num_pages] int32 on the device
    wrapper_key: str  # no two launches of a plan have the same
    is_merged: bool  # with another launch of the plan, by its lse


class PlanUploader:
    """For one stream. `begin`, any number of uploads, `end`; then kernels that read them.

    Between `end` and the next `begin` the device may still be copying from pinned memory, this one
    and that of any library that planned in between: `begin` waits until it has. Under overlap that
    copy belongs to the step before last, so that the wait is over at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
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

    def launches(
        self, plan: PagedPlan, batch: ForwardBatch, into: Tensor | None = None
    ) -> list[LaunchMetadata]:
        """The plan's launches, unique ones first; page ids of whole rows are the batch's own.

        `into`: see `upload`; for all arrays but the page ids.
        """
        small = [
            array
            for one in plan.launches
            for array in (one.qo_indptr, one.kv_indptr, one.last_page_len, one.kv_lens)
        ]
        host, device = self.upload(small, into)
        pages: list[IntArray] = []
        for one in plan.launches:
            if isinstance(one.kv_indices, PageRanges):  # small numbers in place of all page ids
                pages += [array.astype(np.int32) for array in one.kv_indices]
            elif not isinstance(one.kv_indices, slice):
                pages.append(one.kv_indices)
        uploaded = iter(self.upload(pages)[1] if pages else [])
        made = []
        for at, (one, key) in enumerate(zip(plan.launches, plan.wrapper_keys, strict=True)):
            if isinstance(one.kv_indices, slice):
                kv_indices = batch.kv_indices[one.kv_indices]
            else:
                kv_indices = next(uploaded)
            if isinstance(one.kv_indices, PageRanges):
                kv_indices = gpu_ops.copy_ranges(
                    batch.kv_indices,
                    *(kv_indices, next(uploaded), device[4 * at + 1]),
                    torch.empty(one.num_pages, dtype=torch.int32, device=self._device),
                    int(one.kv_indices.lengths.max()),
                )
            on_host, on_device = (LaunchArrays(*side[4 * at :][:4]) for side in (host, device))
            is_merged = bool(plan.shared)
            made.append(LaunchMetadata(one, on_host, on_device, kv_indices, key, is_merged))
        return made

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
    padded = np.array([-(-length // ALIGNED) * ALIGNED for length in lengths], np.int64)
    ends = np.cumsum(padded)
    starts = (ends - padded).tolist()
    places = [slice(a, a + length) for a, length in zip(starts, lengths, strict=True)]
    return places, int(ends[-1]) if len(ends) else 0
