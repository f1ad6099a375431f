"""The `triton` backend: paged attention from our own Triton kernels, for CUDA without FlashInfer.

Rows of one token run in the decode kernel, which splits their keys, others in the extend kernel,
shared pages in that one without a mask; planning and merging are backend.py's. On CPU tensors the
kernels' torch references compute the same, slowly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixserve.attention.base import AttentionFeatures, WindowKV, is_attention_dtype
from radixserve.attention.cuda.backend import PagedBackend
from radixserve.attention.cuda.metadata import GraphBuffers, LaunchArrays, LaunchMetadata
from radixserve.attention.cuda.plan import LaunchPlan
from radixserve.errors import ModelNotSupported
from radixserve_kernels import gpu_ops
from radixserve_kernels.stored_kv import KV_DTYPES

TILE_QUERIES = 64  # queries x query heads of a K/V head that one program of `extend` works on
H200_SMS = 132


class TritonBackend(PagedBackend):
    """See `AttentionBackend`; float32, bfloat16 or float16, K and V in any of stored_kv.py.

    `shares`, `kernel_page_size`: see `PagedBackend`; layers with windows or chunks need a backend
    that does not share. is_exact: a row's bits do not depend on the other rows of its step: no
    pages are shared, and keys are split at the same positions for all rows. Raises
    ModelNotSupported for other dtypes.
    """

    name = "triton"
    device_types = frozenset(("cuda", "cpu"))
    auto_device_types = frozenset(("cuda",))
    package = "triton"
    options = frozenset(("is_exact",))
    features = frozenset(("sliding_window", "attention_chunk_size", "logits_soft_cap", "sinks"))
    has_window_pages = True
    kv_dtypes = frozenset(KV_DTYPES.values())

    def __init__(
        self,
        kv: Tensor,
        num_heads: int,
        windows: WindowKV | None = None,
        dtype: torch.dtype | None = None,
        *,
        shares: bool = True,
        is_exact: bool = False,
        kernel_page_size: int | None = None,
    ) -> None:
        asked = kv.dtype if dtype is None else dtype
        if not is_attention_dtype(asked) and asked != torch.float16:
            raise ModelNotSupported(
                f"the triton backend takes float32, bfloat16 or float16, not {asked}"
            )
        shares = shares and not is_exact
        common = kv, num_heads, windows, dtype
        super().__init__(*common, shares=shares, kernel_page_size=kernel_page_size)
        self._is_exact = is_exact
        self._num_sms = H200_SMS
        if kv.is_cuda:
            properties = torch.cuda.get_device_properties(kv.device)
            self._num_sms = properties.multi_processor_count

    @classmethod
    def unsupported_reason(
        cls, dtype: torch.dtype, device: torch.device, head_dim: int | None = None
    ) -> str:
        del dtype, head_dim
        return gpu_ops.triton_unsupported_reason() if device.type == "cuda" else ""

    @classmethod
    def about(cls, device_type: str) -> str:
        if device_type == "cuda":
            return "kernels of our own, compiled by Triton"
        return "its kernels' references in PyTorch, only where it is asked for: slow, for tests"

    def prepare(self, features: frozenset[str] = frozenset()) -> None:
        if self.kv.is_cuda:
            slots = self.slots[0]
            gpu_ops.compile_attention(
                *(*slots, self.num_heads, self.kernel_page_size, features, self.dtype),
                is_exact=self._is_exact,
            )

    def make_launch(
        self, metadata: LaunchMetadata, buffers: GraphBuffers | None = None
    ) -> TritonLaunch:
        plan, arrays = metadata.plan, metadata.device
        pages: LaunchMetadata | GraphBuffers
        if buffers is None:
            max_keys, pages = int(plan.kv_lens.max()), metadata
        else:  # of the longest request in any later plan
            pages, num_slots = buffers, self.kv.shape[2] * self.page_size
            max_keys = min(len(pages.kv_indices) * self.kernel_page_size, num_slots)
        num_splits = fixed_splits = 1
        if self._is_exact:
            num_tokens = plan.num_tokens
            num_programs = num_tokens
            if not plan.is_decode:
                num_programs = count_tiles(plan, self.num_heads // self.num_kv_heads)
            num_splits = fixed_splits = gpu_ops.choose_exact_splits(
                *(num_programs, self.num_kv_heads, max_keys, self._num_sms),
                num_tokens * self.num_heads * self.head_dim,
            )
        elif plan.is_decode:
            num_splits, fixed_splits = gpu_ops.choose_splits(
                plan.num_requests, self.num_kv_heads, max_keys, self._num_sms
            )
        else:
            num_tiles = count_tiles(plan, self.num_heads // self.num_kv_heads)
            num_splits = fixed_splits = gpu_ops.choose_num_splits(
                num_tiles, self.num_kv_heads, max_keys, self._num_sms
            )
        return TritonLaunch(
            slots=self.slots,
            arrays=arrays,
            kv_indices=pages.kv_indices,
            window_kv_indices=pages.window_kv_indices,
            window_layers=self.window_layers,
            page_size=self.kernel_page_size,
            num_splits=num_splits,
            fixed_splits=fixed_splits,
            max_q=plan.max_q,
            is_decode=plan.is_decode,
            is_causal=plan.is_causal,
            is_exact=self._is_exact,
        )

    def merge(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        gpu_ops.merge_states(out, lse, other, other_lse, out=out, lse=lse)


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """See `Launch`."""

    slots: list[tuple[Tensor, Tensor]]  # each layer's K and V [num_slots, Hkv, W]
    arrays: LaunchArrays  # on the device
    kv_indices: Tensor
    window_kv_indices: Tensor | None  # the same of window_layers
    window_layers: frozenset[int]
    page_size: int
    num_splits: int
    fixed_splits: int
    max_q: int
    is_decode: bool
    is_causal: bool
    is_exact: bool

    def plan(self, metadata: LaunchMetadata) -> None:
        """The kernels read a graph's buffers, which hold the new arrays already."""

    def run(
        self,
        q: Tensor,
        layer: int,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
        features: AttentionFeatures,
    ) -> None:
        arrays, slots = self.arrays, self.slots[layer]
        kv_indices = self.kv_indices
        if layer in self.window_layers:
            assert self.window_kv_indices is not None, "window pages are not known"
            kv_indices = self.window_kv_indices
        pages = arrays.kv_indptr, kv_indices, arrays.last_page_len
        if self.is_decode:
            gpu_ops.decode(
                q,
                *slots,
                *pages,
                self.page_size,
                scale,
                num_splits=self.num_splits,
                out=out,
                lse=lse,
                fixed_splits=self.fixed_splits,
                features=features,
                is_exact=self.is_exact,
            )
        else:
            gpu_ops.extend(
                q,
                *slots,
                arrays.qo_indptr,
                *pages,
                self.page_size,
                scale,
                causal=self.is_causal,
                max_q=self.max_q,
                num_splits=self.num_splits,
                out=out,
                lse=lse,
                features=features,
                is_exact=self.is_exact,
            )


def count_tiles(plan: LaunchPlan, group_size: int) -> int:
    """About how many programs of `extend` a launch makes for a K/V head, without splits."""
    lengths = plan.qo_indptr[1:] - plan.qo_indptr[:-1]
    return max(1, int((-(-lengths * group_size // TILE_QUERIES)).sum()))
