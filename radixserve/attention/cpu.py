"""The `cpu` backend: paged attention by compiled kernels, all rows of a step in one call.

`plan` turns the step's rows into jobs: nodes of pages that rows share first, level by level, then
each row's own part. A job's keys are read once for all its queries and query heads. Compiled code
finds the same nodes as cascade.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from radixserve.attention.base import (
    AttentionBackend,
    AttentionFeatures,
    ForwardBatch,
    LayersKV,
    WindowKV,
)
from radixserve.errors import ModelNotSupported
from radixserve_kernels import cpu_ops
from radixserve_kernels.attention_metadata import AttentionMetadata
from radixserve_kernels.cpu_attention import CpuAttentionPlan, PagedAttention
from radixserve_kernels.cpu_decoder import CompiledStep, DecoderKV

# Tokens of K and V whose reading costs a row as much as one more level. Measured: reading together
# is as fast as apart at 16 to 32 shared tokens, for 2 to 32 rows, heads of 64 and 128 and both
# types.
MERGE_TOKENS = 24


class CpuBackend(AttentionBackend):
    """See `AttentionBackend`; float32 or bfloat16, K and V in these, in bfloat16 or int8.

    `shares`: whether rows attend together to pages that they have in common, where that pays.
    `is_exact`: no bit of a row's result depends on that, nor on the other rows of the step.
    Raises ModelNotSupported, with the reason, where the kernels are unavailable.
    """

    name = "cpu"
    device_types = frozenset(("cpu",))
    options = frozenset(("others", "is_exact"))
    has_compiled_step = True
    features = frozenset(
        ("sliding_window", "attention_chunk_size", "logits_soft_cap", "sinks", "bidirectional"),
    )
    has_window_pages = True
    kv_dtypes = frozenset((torch.bfloat16, torch.int8))

    def __init__(
        self,
        kv: Tensor,
        num_heads: int,
        windows: WindowKV | None = None,
        dtype: torch.dtype | None = None,
        others: Sequence[LayersKV] = (),
        *,
        shares: bool = True,
        is_exact: bool = True,
    ) -> None:
        if reason := cpu_ops.unsupported_reason(kv.dtype if dtype is None else dtype):
            raise ModelNotSupported(f"the cpu backend cannot be used: {reason}")
        super().__init__(kv, num_heads, windows, dtype, others)
        self._compiled_kv = DecoderKV(
            [(k, v, layer in self.window_layers) for layer, (k, v) in enumerate(self.slots)],
            self.dtype,
        )
        self._compiled_step: CompiledStep | None = None  # the same of all steps
        self._attention = PagedAttention(self.dtype)
        self._sharing = {"shares": shares, "is_exact": is_exact}
        self._planned: CpuAttentionPlan | None = None

    @classmethod
    def unsupported_reason(
        cls, dtype: torch.dtype, device: torch.device, head_dim: int | None = None
    ) -> str:
        del device, head_dim
        return cpu_ops.unsupported_reason(dtype)

    @classmethod
    def about(cls, device_type: str) -> str:
        del device_type
        return f"compiled for this processor; {cpu_ops.describe()}"

    def plan(self, batch: ForwardBatch) -> None:
        if self._planned is None:
            heads = (self.num_heads, self.num_kv_heads, self.head_dim)
            self._planned = plan_step(batch.host, self.page_size, heads, **self._sharing)
            self._compiled_step = CompiledStep(self._planned, self._compiled_kv)
        given = batch.given
        self._planned.reset(batch.host, None if given is None else given.last_seen)
        self._batch = batch

    @property
    def planned(self) -> CpuAttentionPlan:
        """The current plan."""
        assert self._planned is not None, "no step is planned"
        return self._planned

    def compiled_step(self) -> CompiledStep:
        assert self._compiled_step is not None, "no step is planned"
        return self._compiled_step

    def _attend(self, q: Tensor, layer: int, scale: float, features: AttentionFeatures) -> Tensor:
        k, v = self.slots[layer]
        page_ids = None
        if layer in self.window_layers:
            assert self._batch is not None
            assert self._batch.window is not None
            page_ids = self._batch.window.kv_indices
        return self._attention.run(self.planned, q, k, v, scale, features, page_ids)


def plan_step(
    host: AttentionMetadata,
    page_size: int,
    heads: tuple[int, int, int],
    *,
    shares: bool,
    is_exact: bool = True,
) -> CpuAttentionPlan:
    """Jobs: one for each shared node, level by level, then one for each row in the last level."""
    return CpuAttentionPlan(
        host, page_size, heads, MERGE_TOKENS if shares else None, is_exact=is_exact
    )
