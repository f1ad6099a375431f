"""The common part of the CUDA backends: plans, uploads, launches and merges a step.

`PagedBackend` plans any step; `GraphBackend` steps of one shape in buffers that never move, so that
`attend` can be captured in a CUDA graph. A subclass of `PagedBackend` provides the kernels. All
other code runs on the CPU as well.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from radixserve.attention.base import (
    AttentionBackend,
    AttentionFeatures,
    AttentionMetadata,
    ForwardBatch,
    WindowKV,
)
from radixserve.attention.cuda.cascade import CascadeCost, NodeFinder
from radixserve.attention.cuda.graph_plan import (
    GraphLevel,
    GraphShape,
    plan_graph,
    plan_level,
)
from radixserve.attention.cuda.metadata import GraphBuffers, LaunchMetadata, PlanUploader
from radixserve.attention.cuda.plan import CudaAttentionPlan, choose_kernel_page_size, plan_rows
from radixserve_kernels.gpu_ops import add_sinks


class Launch(Protocol):
    """A kernel with its metadata, run once a layer."""

    def plan(self, metadata: LaunchMetadata) -> None:
        """Take other metadata; in a graph of the same shape, in the same buffers."""
        ...

    def run(
        self,
        q: Tensor,
        layer: int,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
        features: AttentionFeatures,
    ) -> None:
        """Attend with the launch's queries q [n, Hq, D] into out [n, Hq, D] and lse [n, Hq]
        float32, the base-2 logarithm of the sum of exponentiated scores; without sinks."""
        ...


class LaunchSlice(NamedTuple):
    launch: Launch
    tokens: slice  # of the plan's order


class PlannedBackend(AttentionBackend):
    """`attend` over planned launches."""

    scales_last = True

    unique: Sequence[LaunchSlice] = ()
    shared: Sequence[LaunchSlice] = ()
    _order: Tensor | None = None  # [T] int64: which token lies where; None: all in place

    @abstractmethod
    def merge(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        """out, lse become those over both sets of keys. [n, Hq, D], [n, Hq] float32, no gaps."""

    def _attend(self, q: Tensor, layer: int, scale: float, features: AttentionFeatures) -> Tensor:
        assert self.unique, "attend before plan"
        order = self._order
        queries = q if order is None else q.index_select(0, order)
        out = q.new_empty(q.shape)
        assert not (self.shared and features.span != (0, 0)), "shared pages have no window"
        needs_lse = self.shared or features.sinks is not None
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if needs_lse else None
        for launch, tokens in self.unique:
            state = None if lse is None else lse[tokens]
            launch.run(queries[tokens], layer, scale, out[tokens], state, features)
        for launch, tokens in self.shared:
            assert lse is not None
            other, other_lse = torch.empty_like(out[tokens]), torch.empty_like(lse[tokens])
            launch.run(queries[tokens], layer, scale, other, other_lse, features)
            self.merge(out[tokens], lse[tokens], other, other_lse)
        if features.sinks is not None and lse is not None:
            add_sinks(out, lse, features.sinks)
        return out if order is None else torch.empty_like(out).index_copy_(0, order, out)

    def _install(
        self, plan: CudaAttentionPlan, launches: Sequence[Launch], batch: ForwardBatch
    ) -> None:
        placed = [
            LaunchSlice(launch, slice(launch_plan.first, launch_plan.end))
            for launch, launch_plan in zip(launches, plan.launches, strict=True)
        ]
        self.unique, self.shared = placed[: len(plan.unique)], placed[len(plan.unique) :]
        self._batch = batch


class PagedBackend(PlannedBackend):
    """See `AttentionBackend`. Plans any step.

    `shares`: whether rows attend together to pages that they have in common, where that pays
    (cascade.py). `kernel_page_size`: tokens of a page as the kernels read it.
    """

    can_capture = True

    def __init__(
        self,
        kv: Tensor,
        num_heads: int,
        windows: WindowKV | None = None,
        dtype: torch.dtype | None = None,
        *,
        shares: bool,
        kernel_page_size: int | None,
    ) -> None:
        super().__init__(kv, num_heads, windows, dtype)
        self.kernel_page_size = choose_kernel_page_size(self.page_size, kernel_page_size)
        kernel_pages = self.page_size // self.kernel_page_size
        token_bytes = 2 * kv.shape[4] * kv.shape[5] * kv.element_size()
        cost = CascadeCost.of_token(token_bytes) if shares else None
        self.nodes = NodeFinder(self.page_size, cost)
        self.uploader = PlanUploader(kv.device, kernel_pages)
        self._page_buffers: dict[tuple[int, bool], Tensor] = {}
        self.planned_level: GraphLevel | None = None  # what all graphs' common memory holds

    @abstractmethod
    def make_launch(self, metadata: LaunchMetadata, buffers: GraphBuffers | None = None) -> Launch:
        """For the current plan; an earlier one with that wrapper key is not run any more.

        With `buffers` for a graph: the metadata has the sizes that all later plans will have.
        """

    def plan(self, batch: ForwardBatch) -> None:
        nodes = self.nodes.find(batch.host)
        plan = plan_rows(batch.host, self.page_size, nodes, self.kernel_page_size)
        self.uploader.begin()
        launches = [
            self.uploader.launch(launch_plan, key, batch, is_merged=bool(plan.shared))
            for launch_plan, key in zip(plan.launches, plan.wrapper_keys, strict=True)
        ]
        self._order = None
        if plan.order is not None:
            self._order = self.uploader.upload([plan.order.astype(np.int32)])[1][0].long()
        made = [self.make_launch(metadata) for metadata in launches]
        self.uploader.end()
        self._install(plan, made, batch)

    def shared_levels(self, batch: ForwardBatch) -> int:
        """1 where a level pays for the rows as they lie, else 0."""
        return int(self.nodes.pays_in_place(batch.host))

    def make_graph_backend(
        self, max_rows: int, max_pages: int, num_levels: int = 0
    ) -> GraphBackend:
        """See `AttentionBackend`. With num_levels=1 it reads one level of shared pages together,
        where it finds any that pay; which costs a graph two launches more."""
        if num_levels not in (0, 1):
            raise ValueError(f"a graph has 0 or 1 shared levels, not {num_levels}")
        max_pages *= self.page_size // self.kernel_page_size
        return GraphBackend(self, GraphShape.of_rows(max_rows, max_pages, num_levels))

    def graph_buffers(self, number: int, num_requests: int, max_pages: int) -> GraphBuffers:
        """Of a graph's launch `at`; all graphs share the memory of its page ids."""
        in_windows = None if self.windows is None else self._page_buffer(number, True, max_pages)
        pages = self._page_buffer(number, False, max_pages)
        return GraphBuffers.empty(num_requests, pages, in_windows)

    def _page_buffer(self, number: int, is_windows: bool, size: int) -> Tensor:
        buffer = self._page_buffers.get((number, is_windows))
        if buffer is None or len(buffer) < size:
            buffer = torch.zeros(size, dtype=torch.int32, device=self.kv.device)
            self._page_buffers[number, is_windows] = buffer
        return buffer[:size]


class GraphBackend(PlannedBackend):
    """See `AttentionBackend`; made by `PagedBackend.make_graph_backend`.

    `plan` belongs outside of the graph and before each replay; `attend` with q [max_rows, Hq, D]
    inside: what it launches is the same for every plan, and reads the same memory. Rows beyond the
    batch's get any result. Rows are not put in another order: those that share pages must lie next
    to each other to be read together. The launch over shared pages is planned again only when they
    change, or another graph was planned in the same buffers.
    """

    def __init__(self, eager: PagedBackend, shape: GraphShape) -> None:
        super().__init__(eager.kv, eager.num_heads, eager.windows, eager.dtype)
        self.features = eager.features
        self.name, self.shape, self._eager = eager.name, shape, eager
        sizes = [shape.num_rows, shape.num_groups] if shape.num_groups else [shape.num_rows]
        self.buffers = [
            eager.graph_buffers(number, n, shape.max_pages) for number, n in enumerate(sizes)
        ]  # of each launch
        self._level: GraphLevel | None = None  # of the last plan
        self._launches: list[Launch] = []
        self.plan(_one_row(self.page_size, eager.kv.device))

    @property
    def num_levels(self) -> int:
        return len(self.buffers) - 1

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether `plan` takes it."""
        num_rows = len(batch.host.start)
        missing = self.shape.num_rows - num_rows
        factor = self.page_size // self._eager.kernel_page_size
        num_pages = int(batch.host.kv_indptr[-1]) * factor + missing
        is_decode = batch.num_tokens == num_rows
        return is_decode and missing >= 0 and num_pages <= self.shape.max_pages

    def merge(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        self._eager.merge(out, lse, other, other_lse)

    def plan(self, batch: ForwardBatch) -> None:
        eager, host, kernel_page_size = self._eager, batch.host, self._eager.kernel_page_size
        nodes = eager.nodes.find(host, self.num_levels)
        level, planned = self._level, eager.planned_level
        if level is None or level.nodes is not nodes:
            level = plan_level(host, self.page_size, nodes, kernel_page_size, self.shape)
        plan = plan_graph(host, self.page_size, level, kernel_page_size, self.shape)
        if self.num_levels:
            eager.planned_level = None
            if level is planned:  # all of it lies on the device
                plan = replace(plan, shared=())
        eager.uploader.begin()
        made = [
            eager.uploader.launch(
                launch_plan, key, batch, is_merged=self.num_levels > 0, buffers=buffers
            )
            for launch_plan, key, buffers in zip(
                plan.launches, plan.wrapper_keys, self.buffers, strict=False
            )
        ]
        if self._launches:
            for launch, metadata in zip(self._launches, made, strict=False):
                launch.plan(metadata)
            self._batch = batch
        else:
            self._launches = [
                eager.make_launch(metadata, buffers)
                for metadata, buffers in zip(made, self.buffers, strict=True)
            ]
            self._install(plan, self._launches, batch)
        eager.uploader.end()
        self._level = level
        if self.num_levels:
            eager.planned_level = level


def _one_row(page_size: int, device: torch.device) -> ForwardBatch:
    """A row of one token on page 0, to make a graph's launches with."""
    seq_lens, bounds = np.ones(1, np.int64), np.arange(2)
    host = AttentionMetadata(
        np.zeros(1, np.int64), bounds, bounds, seq_lens, [np.zeros(1, np.int32)]
    )
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return ForwardBatch(zero, zero, zero, zero, host, page_size)
