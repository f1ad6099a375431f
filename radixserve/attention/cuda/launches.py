"""Parts with their arrays on the device, and what kernels make of them: `PagedKernels`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from radixserve.attention.base import ForwardBatch
from radixserve.attention.cuda.paged_plan import PagedPlan
from radixserve.attention.cuda.parts import Part
from radixserve.attention.cuda.plan_upload import PlanUpload, Staged


class StagedPart(NamedTuple):
    """A part and its arrays on both sides."""

    part: Part
    qo_indptr: Staged
    kv_indptr: Staged
    last_page_len: Staged
    kv_lens: Staged
    kv_indices: Tensor  # int32 on the device


class PartBuffers(NamedTuple):
    """Device memory of a fixed part, int32. It holds the part's arrays before it is updated."""

    qo_indptr: Tensor  # [n + 1]
    kv_indptr: Tensor  # [n + 1]
    last_page_len: Tensor  # [n]
    kv_indices: Tensor  # [max_pages]


class Launch(Protocol):
    """A part, ready to be run in every layer."""

    def run(self, q: Tensor, layer: int, scale: float, out: Tensor, lse: Tensor | None) -> None:
        """Attend with the part's queries q [n, Hq, D] into out [n, Hq, D] and lse [n, Hq] float32,
        the base-2 logarithm of the sum of exponentiated scores."""
        ...


class GraphLaunch(Launch, Protocol):
    def update(self, staged: StagedPart) -> None:
        """Another part of the same shape, in the same buffers."""
        ...


class PagedKernels(Protocol):
    """A family of kernels over one pool. `wrapper_key`: no two parts of a plan have the same."""

    name: str

    def prepare(self) -> None:
        """Compile what will be needed."""
        ...

    def launch(self, staged: StagedPart, wrapper_key: str) -> Launch:
        """For the current plan; an earlier one with that wrapper_key is not run any more."""
        ...

    def fixed(self, staged: StagedPart, wrapper_key: str, buffers: PartBuffers) -> GraphLaunch:
        """For a graph; the part has the sizes that all later ones will have."""
        ...

    def merge(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        """out, lse become those over both sets of keys. [n, Hq, D], [n, Hq] float32, no gaps."""
        ...


def wrapper_keys(plan: PagedPlan) -> list[str]:
    """A name for each part, the same for parts of one kind in every plan."""
    own = ["decode" if part.is_decode else "extend" for part in plan.unique]
    return own + [f"level {at}" for at in range(len(plan.shared))]


def stage_parts(
    plan: PagedPlan, batch: ForwardBatch, staging: PlanUpload, into: Tensor | None = None
) -> list[StagedPart]:
    """The parts' arrays on the device, the small ones in `into`; page ids of whole rows are the
    batch's own."""
    parts = (*plan.unique, *plan.shared)
    small = [
        array
        for part in parts
        for array in (part.qo_indptr, part.kv_indptr, part.last_page_len, part.kv_lens)
    ]
    arrays = staging.upload(small, into)
    pages = [part.kv_indices for part in parts if not isinstance(part.kv_indices, slice)]
    uploaded = iter(staging.upload(pages) if pages else [])
    of_batch = batch.kv_indices if len(pages) < len(parts) else None
    staged = []
    for at, part in enumerate(parts):
        if isinstance(part.kv_indices, slice):
            assert of_batch is not None
            kv_indices = of_batch[part.kv_indices]
        else:
            kv_indices = next(uploaded).device
        qo_indptr, kv_indptr, last_page_len, kv_lens = arrays[4 * at : 4 * at + 4]
        staged.append(StagedPart(part, qo_indptr, kv_indptr, last_page_len, kv_lens, kv_indices))
    return staged
