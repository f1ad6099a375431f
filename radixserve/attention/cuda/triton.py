"""The `triton` backend: paged attention from our own Triton kernels, for CUDA without FlashInfer.

Rows of one token run in the decode kernel, which splits their keys, others in the extend kernel,
shared pages in that one without a mask; planning and merging are paged.py's. On CPU tensors the
kernels' torch references compute the same, slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from radixserve.attention.base import check_dtype, kv_view
from radixserve.attention.cuda.launches import Launch, PartBuffers, StagedPart
from radixserve.attention.cuda.paged import PagedBackend
from radixserve.attention.cuda.parts import Part, choose_kernel_page_size
from radixserve.errors import ModelNotSupported
from radixserve_kernels import gpu_ops

TILE_QUERIES = 64  # queries x query heads of a K/V head that one program of `extend` works on
H200_SMS = 132


class TritonBackend(PagedBackend):
    """See `AttentionBackend`. Borrows kv [L, 2, num_pages, P, Hkv, D]; float32, bfloat16, float16.

    `shares`, `kernel_page_size`: see `PagedBackend`. Raises ModelNotSupported for other
    dtypes.
    """

    def __init__(
        self,
        kv: Tensor,
        num_heads: int,
        *,
        shares: bool = True,
        kernel_page_size: int | None = None,
    ) -> None:
        if not check_dtype(kv.dtype) and kv.dtype != torch.float16:
            raise ModelNotSupported(
                f"the triton backend takes float32, bfloat16 or float16, not {kv.dtype}"
            )
        kernel_page_size = choose_kernel_page_size(kv.shape[3], kernel_page_size)
        super().__init__(
            kv,
            num_heads,
            TritonKernels(kv, num_heads, kernel_page_size),
            shares=shares,
            kernel_page_size=kernel_page_size,
        )


class TritonKernels:
    """See `PagedKernels`."""

    name = "triton"

    def __init__(self, kv: Tensor, num_heads: int, page_size: int) -> None:
        self._slots = [kv_view(kv, layer) for layer in range(kv.shape[0])]
        self._num_kv_heads, self._page_size = kv.shape[4], page_size
        self._group_size = num_heads // self._num_kv_heads
        self._num_sms = H200_SMS
        if kv.is_cuda:
            properties = torch.cuda.get_device_properties(kv.device)
            self._num_sms = properties.multi_processor_count

    def prepare(self) -> None:
        """Triton compiles in seconds, at first use."""

    def launch(self, staged: StagedPart, wrapper_key: str) -> Launch:
        del wrapper_key
        arrays = Arrays(
            staged.qo_indptr.device,
            staged.kv_indptr.device,
            staged.last_page_len.device,
            staged.kv_indices,
        )
        return self._make(staged, arrays, int(staged.part.kv_lens.max()))

    def fixed(self, staged: StagedPart, wrapper_key: str, buffers: PartBuffers) -> TritonLaunch:
        del wrapper_key
        most = min(len(buffers.kv_indices) * self._page_size, len(self._slots[0][0]))
        return self._make(staged, Arrays(*buffers), most)

    def merge(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        gpu_ops.merge_states(out, lse, other, other_lse, out=out, lse=lse)

    def _make(self, staged: StagedPart, arrays: Arrays, max_keys: int) -> TritonLaunch:
        """max_keys: of the longest request, here or in any later plan."""
        part = staged.part
        if part.is_decode:
            num_splits, fixed_splits = gpu_ops.choose_splits(
                part.num_requests, self._num_kv_heads, max_keys, self._num_sms
            )
        else:
            num_splits = fixed_splits = gpu_ops.choose_num_splits(
                count_tiles(part, self._group_size), self._num_kv_heads, max_keys, self._num_sms
            )
        return TritonLaunch(
            slots=self._slots,
            arrays=arrays,
            page_size=self._page_size,
            num_splits=num_splits,
            fixed_splits=fixed_splits,
            max_q=part.max_q,
            is_decode=part.is_decode,
            is_causal=part.is_causal,
        )


class Arrays(NamedTuple):
    """A part's, int32 on the device."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor
    kv_indices: Tensor


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """See `GraphLaunch`."""

    slots: list[tuple[Tensor, Tensor]]  # of each layer: K and V [num_slots, Hkv, D]
    arrays: Arrays
    page_size: int
    num_splits: int
    fixed_splits: int
    max_q: int
    is_decode: bool
    is_causal: bool

    def run(self, q: Tensor, layer: int, scale: float, out: Tensor, lse: Tensor | None) -> None:
        k_slots, v_slots = self.slots[layer]
        arrays = self.arrays
        keys = (arrays.kv_indptr, arrays.kv_indices, arrays.last_page_len, self.page_size, scale)
        if self.is_decode:
            gpu_ops.decode(
                q,
                k_slots,
                v_slots,
                *keys,
                num_splits=self.num_splits,
                out=out,
                lse=lse,
                fixed_splits=self.fixed_splits,
            )
            return
        gpu_ops.extend(
            q,
            k_slots,
            v_slots,
            arrays.qo_indptr,
            *keys,
            causal=self.is_causal,
            max_q=self.max_q,
            num_splits=self.num_splits,
            out=out,
            lse=lse,
        )

    def update(self, staged: StagedPart) -> None:
        """The kernels read the buffers, which hold the new part already."""


def count_tiles(part: Part, group_size: int) -> int:
    """About how many programs of `extend` a part makes for a K/V head, without splits."""
    lengths = part.qo_indptr[1:] - part.qo_indptr[:-1]
    return max(1, int((-(-lengths * group_size // TILE_QUERIES)).sum()))
