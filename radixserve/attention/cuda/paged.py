"""What the CUDA backends have in common: a plan of parts, each run by one kernel, and merged.

`PagedBackend` plans any step; `GraphBackend` steps of one shape in buffers that never move,
so that `attend` can be captured in a CUDA graph. Which kernels run the parts is `PagedKernels`'
business. Everything but these kernels runs on the CPU as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch, HostIndex
from radixserve.attention.cuda.launches import (
    GraphLaunch,
    Launch,
    PagedKernels,
    PartBuffers,
    stage_parts,
    wrapper_keys,
)
from radixserve.attention.cuda.paged_plan import (
    GraphShape,
    PagedPlan,
    num_groups_for,
    plan_graph,
    plan_rows,
)
from radixserve.attention.cuda.parts import choose_kernel_page_size
from radixserve.attention.cuda.plan_upload import PlanUpload, layout
from radixserve.attention.cuda.sharing import MAX_LEVELS, NodeFinder


class LaunchSlice(NamedTuple):
    launch: Launch
    tokens: slice  # of the plan's order


class PagedAttention(AttentionBackend):
    """`attend` and `run` of the two classes below, over a plan that they make."""

    def __init__(
        self, kv: Tensor, num_heads: int, kernels: PagedKernels, kernel_page_size: int
    ) -> None:
        super().__init__(kv, num_heads)
        self.name = kernels.name
        self._kernels, self._kernel_page_size = kernels, kernel_page_size
        self._unique: tuple[LaunchSlice, ...] = ()
        self._shared: tuple[LaunchSlice, ...] = ()
        self._order: Tensor | None = None  # [T] int64: which token lies where; None: all in place

    def attend(self, q: Tensor, layer: int, scale: float | None = None) -> Tensor:
        assert self._unique, "attend before plan"
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        order = self._order
        queries = q if order is None else q.index_select(0, order)
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if self._shared else None
        for launch, at in self._unique:
            launch.run(queries[at], layer, scale, out[at], None if lse is None else lse[at])
        for launch, at in self._shared:
            assert lse is not None
            other, other_lse = torch.empty_like(out[at]), torch.empty_like(lse[at])
            launch.run(queries[at], layer, scale, other, other_lse)
            self._kernels.merge(out[at], lse[at], other, other_lse)
        return out if order is None else torch.empty_like(out).index_copy_(0, order, out)

    def _install(self, plan: PagedPlan, launches: Sequence[Launch], batch: ForwardBatch) -> None:
        placed = tuple(
            LaunchSlice(launch, slice(part.first, part.end))
            for launch, part in zip(launches, (*plan.unique, *plan.shared), strict=True)
        )
        self._unique, self._shared = placed[: len(plan.unique)], placed[len(plan.unique) :]
        self._slot_mapping = batch.slot_mapping


class PagedBackend(PagedAttention):
    """See `AttentionBackend`. Plans any step.

    `shares`: whether rows attend together to pages that they have in common, where that pays
    (sharing.py). `kernel_page_size`: tokens of a page as the kernels read it.
    """

    can_capture = True

    def __init__(
        self,
        kv: Tensor,
        num_heads: int,
        kernels: PagedKernels,
        *,
        shares: bool = True,
        kernel_page_size: int | None = None,
    ) -> None:
        super().__init__(
            kv, num_heads, kernels, choose_kernel_page_size(kv.shape[3], kernel_page_size)
        )
        token_bytes = 2 * kv.shape[4] * kv.shape[5] * kv.element_size()
        self._nodes = NodeFinder(self.page_size, token_bytes, shares=shares)
        self._staging = PlanUpload(kv.device)
        self._page_buffers: dict[int, Tensor] = {}

    def prepare(self) -> None:
        """Compile what will be needed; once, before the first step."""
        self._kernels.prepare()

    def plan(self, batch: ForwardBatch) -> None:
        host = batch.host
        nodes = self._nodes.find(host, MAX_LEVELS)
        plan = plan_rows(host, self.page_size, nodes, self._kernel_page_size)
        self._staging.begin()
        staged = stage_parts(plan, batch, self._staging)
        self._order = None
        if plan.order is not None:
            order = self._staging.upload([plan.order.astype(np.int32)])[0]
            self._order = order.device.long()
        launches = [
            self._kernels.launch(one, wrapper_key)
            for one, wrapper_key in zip(staged, wrapper_keys(plan), strict=True)
        ]
        self._staging.end()
        self._install(plan, launches, batch)

    def shared_levels(self, batch: ForwardBatch) -> int:
        """Shared levels of the graph to replay for these rows of one token: 1 where it pays for
        them as they lie, else 0."""
        return int(self._nodes.pays_in_place(batch.host))

    def capture_backend(self, max_rows: int, max_pages: int, num_levels: int = 0) -> GraphBackend:
        """A backend for at most `max_rows` rows of one token and `max_pages` pages of all together.

        With num_levels=1 it reads one level of shared pages together, where it finds any that
        pay; which costs a graph two launches more. Ask for the largest first: smaller ones use its
        memory, so that only one of them can be at work at a time.
        """
        if num_levels not in (0, 1):
            raise ValueError(f"a graph has 0 or 1 shared levels, not {num_levels}")
        num_groups = num_groups_for(max_rows) if num_levels else 0
        shape = GraphShape(
            max_rows, max_pages * (self.page_size // self._kernel_page_size), num_groups
        )
        page_buffers = [self._page_buffer(at, shape.max_pages) for at in range(1 + num_levels)]
        common = self._kernels, self._kernel_page_size, self._staging, self._nodes
        return GraphBackend(self.kv, self.num_heads, *common, shape, page_buffers)

    def _page_buffer(self, at: int, size: int) -> Tensor:
        """[size] int32 for the kv_indices of part `at`; graphs share it."""
        if at not in self._page_buffers or len(self._page_buffers[at]) < size:
            self._page_buffers[at] = torch.zeros(size, dtype=torch.int32, device=self.kv.device)
        return self._page_buffers[at][:size]


class GraphBackend(PagedAttention):
    """See `AttentionBackend`; made by `PagedBackend.capture_backend`.

    `plan` belongs outside of the graph and before each replay; `attend` with q [max_rows, Hq, D]
    inside: what it launches is the same for every plan, and reads the same memory. Rows beyond the
    batch's get any result. Rows are not put in another order: those that share pages must lie next
    to each other to be read together.
    """

    def __init__(
        self,
        kv: Tensor,
        num_heads: int,
        kernels: PagedKernels,
        kernel_page_size: int,
        staging: PlanUpload,
        nodes: NodeFinder,
        shape: GraphShape,
        page_buffers: Sequence[Tensor],
    ) -> None:
        super().__init__(kv, num_heads, kernels, kernel_page_size)
        self.shape = shape
        self._staging, self._nodes = staging, nodes
        sizes = [shape.num_rows, shape.num_groups][: len(page_buffers)]
        places, total = layout([length for n in sizes for length in (n + 1, n + 1, n, n)])
        self._memory = torch.zeros(total, dtype=torch.int32, device=kv.device)
        views = [self._memory[place] for place in places]
        self._buffers = [
            PartBuffers(views[4 * at], views[4 * at + 1], views[4 * at + 2], room)
            for at, room in enumerate(page_buffers)
        ]
        self._launches: list[GraphLaunch] = []
        self.plan(_one_row(self.page_size, kv.device))

    @property
    def num_levels(self) -> int:
        return len(self._buffers) - 1

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether `plan` takes it."""
        num_rows = len(batch.host.start)
        missing = self.shape.num_rows - num_rows
        num_pages = (
            int(batch.host.kv_indptr[-1]) * (self.page_size // self._kernel_page_size) + missing
        )
        is_decode = batch.num_tokens == num_rows
        return is_decode and missing >= 0 and num_pages <= self.shape.max_pages

    def plan(self, batch: ForwardBatch) -> None:
        nodes = self._nodes.find(batch.host, 1) if self.num_levels else []
        plan = plan_graph(batch.host, self.page_size, nodes, self._kernel_page_size, self.shape)
        self._staging.begin()
        staged = []
        for one, buffers in zip(
            stage_parts(plan, batch, self._staging, self._memory), self._buffers, strict=True
        ):
            room = buffers.kv_indices[: one.part.num_pages]
            staged.append(one._replace(kv_indices=room.copy_(one.kv_indices)))
        if self._launches:
            for launch, one in zip(self._launches, staged, strict=True):
                launch.update(one)
        else:
            self._launches = [
                self._kernels.fixed(one, wrapper_key, buffers)
                for one, wrapper_key, buffers in zip(
                    staged, wrapper_keys(plan), self._buffers, strict=True
                )
            ]
        self._staging.end()
        self._install(plan, self._launches, batch)


def _one_row(page_size: int, device: torch.device) -> ForwardBatch:
    """A row of one token on page 0, to make a graph's launches with."""
    one, bounds = np.ones(1, np.int64), np.arange(2)
    host = HostIndex(np.zeros(1, np.int64), bounds, bounds, one, [np.zeros(1, np.int32)])
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return ForwardBatch(zero, zero, zero, zero, host, page_size)
