"""The `flashinfer` backend: FlashInfer's paged kernels over the pool, for CUDA.

Rows of one token run in the decode kernel, others in the fa2 prefill kernel, shared pages in the
prefill kernel without a mask; planning and merging are paged.py's. fa2 everywhere: fa3 neither
packs the query heads of a K/V head into one tile nor splits keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixserve.attention.cuda.flashinfer_calls import (
    DecodeCalls,
    GraphBuffers,
    HeadShape,
    Library,
    PrefillCalls,
    compile_modules,
    import_error,
    load_library,
    unsupported_reason,
)
from radixserve.attention.cuda.launches import Launch, PartBuffers, StagedPart
from radixserve.attention.cuda.paged import PagedBackend
from radixserve.attention.cuda.parts import choose_kernel_page_size
from radixserve.errors import ModelNotSupported

WORKSPACE_BYTES = 256 << 20  # where keys are split: partial results of all parts, one after another
GRAPH_INT_BYTES = 1 << 20  # for plans of graphs, some bytes a row; wrappers make themselves 8 MiB
LARGEST_TILE = 128  # queries x query heads of a K/V head in one tile of the prefill kernel
SMALLEST_TILE = 16
BLOCKS_PER_SM = 2  # that the prefill kernel's planner counts with
DECODE_BLOCKS_PER_SM = 8  # of the decode kernel on CUDA cores, heads of 128
CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8)  # query heads of a K/V head that kernel is compiled for
MERGE_THREADS = 1024  # of a block, which merges all heads of a token


class FlashInferBackend(PagedBackend):
    """See `AttentionBackend`. Borrows kv [L, 2, num_pages, P, Hkv, D], float16 or bfloat16.

    `shares`, `kernel_page_size`: see `PagedBackend`. `library` takes FlashInfer's place, for tests.
    Raises ModelNotSupported, with the reason, for heads that FlashInfer does not serve.
    """

    def __init__(
        self,
        kv: Tensor,
        num_heads: int,
        *,
        shares: bool = True,
        kernel_page_size: int | None = None,
        library: Library | None = None,
    ) -> None:
        num_kv_heads, head_dim = kv.shape[-2:]
        reason = unsupported_reason(kv.dtype, head_dim)
        if reason or (library is None and (reason := import_error())):
            raise ModelNotSupported(f"the flashinfer backend cannot be used: {reason}")
        kernel_page_size = choose_kernel_page_size(kv.shape[3], kernel_page_size)
        heads = HeadShape(num_heads, num_kv_heads, head_dim, kernel_page_size, kv.dtype)
        kernels = FlashInferKernels(kv, heads, library or load_library())
        super().__init__(
            kv,
            num_heads,
            kernels,
            shares=shares and can_merge(heads),
            kernel_page_size=kernel_page_size,
        )


class FlashInferKernels:
    """See `PagedKernels`. One float workspace for all wrappers: what a run leaves there is read by
    that run alone. Where plans are left on the device is each wrapper's own, as several live in a
    step; graphs share it by wrapper key, as one of them is at work at a time.
    """

    name = "flashinfer"

    def __init__(self, kv: Tensor, heads: HeadShape, library: Library) -> None:
        self._library, self._heads = library, heads
        self._num_sms = count_sms(kv.device)
        num_bytes = max(WORKSPACE_BYTES, workspace_bytes(heads, self._num_sms))
        self._workspace = torch.zeros(
            num_bytes if kv.is_cuda else 0, dtype=torch.uint8, device=kv.device
        )
        shape = (-1, heads.page_size, heads.num_kv_heads, heads.head_dim)
        self._pages = [(layer[0].view(shape), layer[1].view(shape)) for layer in kv.unbind(0)]
        self._decode: DecodeCalls | None = None
        self._prefill: dict[str, PrefillCalls] = {}  # by wrapper key
        self._int_workspaces: dict[str, Tensor] = {}  # of graphs, by wrapper key

    def prepare(self) -> None:
        if not self._workspace.is_cuda:
            return
        try:
            compile_modules(self._heads)
        except Exception as error:
            raise ModelNotSupported(
                f"FlashInfer's kernels cannot be compiled: {error}; nvcc has to be found below "
                'CUDA_HOME and ninja in PATH; attention_backend="triton" does without them'
            ) from error

    def launch(self, staged: StagedPart, wrapper_key: str) -> Launch:
        calls: DecodeCalls | PrefillCalls
        if staged.part.is_decode and not self._wants_tensor_cores(staged.part.num_requests):
            if self._decode is None:
                self._decode = DecodeCalls(self._library, self._workspace, self._heads)
            calls = self._decode
        else:
            if wrapper_key not in self._prefill:
                self._prefill[wrapper_key] = PrefillCalls(
                    self._library, self._workspace, self._heads
                )
            calls = self._prefill[wrapper_key]
        calls.plan(staged)
        return FlashInferLaunch(calls, self._pages)

    def fixed(self, staged: StagedPart, wrapper_key: str, buffers: PartBuffers) -> FlashInferLaunch:
        part = staged.part
        workspace = self._workspace_for(part.num_requests, part.end - part.first)
        if wrapper_key not in self._int_workspaces:
            self._int_workspaces[wrapper_key] = torch.empty(
                GRAPH_INT_BYTES, dtype=torch.uint8, device=workspace.device
            )
        fixed = GraphBuffers(buffers, self._int_workspaces[wrapper_key])
        calls: DecodeCalls | PrefillCalls
        if part.is_decode:
            calls = DecodeCalls(
                self._library,
                workspace,
                self._heads,
                fixed=fixed,
                use_tensor_cores=self._wants_tensor_cores(part.num_requests),
            )
        else:
            calls = PrefillCalls(self._library, workspace, self._heads, fixed=fixed)
        calls.plan(staged)
        return FlashInferLaunch(calls, self._pages)

    def merge(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        self._library.merge_state_in_place(out, lse, other, other_lse)

    def _wants_tensor_cores(self, num_rows: int) -> bool:
        return wants_tensor_cores(num_rows, self._heads, self._num_sms)

    def _workspace_for(self, num_requests: int, num_tokens: int) -> Tensor:
        """The common one, or a larger one that is common from now on: graphs keep theirs."""
        wanted = graph_workspace_bytes(self._heads, self._num_sms, num_requests, num_tokens)
        if self._workspace.is_cuda and wanted > len(self._workspace):
            self._workspace = self._workspace.new_zeros(wanted)
        return self._workspace


@dataclass(frozen=True, slots=True)
class FlashInferLaunch:
    """See `GraphLaunch`."""

    calls: DecodeCalls | PrefillCalls
    pages: list[tuple[Tensor, Tensor]]  # of each layer: K and V [num_pages, page_size, Hkv, D]

    def run(self, q: Tensor, layer: int, scale: float, out: Tensor, lse: Tensor | None) -> None:
        self.calls.run(q, self.pages[layer], scale, out, lse)

    def update(self, staged: StagedPart) -> None:
        self.calls.plan(staged)


def wants_tensor_cores(num_rows: int, heads: HeadShape, num_sms: int) -> bool:
    """Whether rows of one token are better off in the kernel that uses tensor cores.

    That kernel reads a K/V head once for all its query heads, but splits keys only while
    num_rows * Hkv tiles do not fill two blocks a multiprocessor: from there on rows of unequal
    length leave it waiting for the longest. The one on CUDA cores splits up to DECODE_BLOCKS_PER_SM
    and multiplies for each query head anew, which is too much from 8 query heads on. Where neither
    splits, tensor cores. To be measured.
    """
    group = heads.num_heads // heads.num_kv_heads
    if group not in CUDA_CORE_GROUPS or group >= 8:
        return True
    if group < 4:
        return False
    num_blocks = num_rows * heads.num_kv_heads
    return num_blocks <= BLOCKS_PER_SM * num_sms or num_blocks >= DECODE_BLOCKS_PER_SM * num_sms


def workspace_bytes(heads: HeadShape, num_sms: int) -> int:
    """Partial results of a step outside of graphs: it splits keys only while its tiles are no more
    than two a multiprocessor, over all K/V heads."""
    num_tiles = BLOCKS_PER_SM * num_sms // heads.num_kv_heads + 1
    return _tile_bytes(heads, num_tiles, LARGEST_TILE)


def graph_workspace_bytes(
    heads: HeadShape, num_sms: int, num_requests: int, num_tokens: int
) -> int:
    """Of a graph, which always splits: for the most tiles that its shape allows."""
    group = heads.num_heads // heads.num_kv_heads
    longest = (num_tokens - num_requests + 1) * group
    tile = SMALLEST_TILE if longest <= SMALLEST_TILE else LARGEST_TILE if longest > 64 else 64
    num_tiles = -(-num_tokens * group // tile) + num_requests
    at_least = BLOCKS_PER_SM * num_sms // heads.num_kv_heads + 1
    return _tile_bytes(heads, max(num_tiles, at_least), tile)


def _tile_bytes(heads: HeadShape, num_tiles: int, tile: int) -> int:
    """float32 results and log-sums of a tile for every K/V head; heads.num_heads as the planner has
    it, which counts a tile once for each query head. And a page of rounding."""
    return heads.num_heads * num_tiles * tile * (heads.head_dim + 1) * 4 + 4096


def can_merge(heads: HeadShape) -> bool:
    """Whether FlashInfer's merge takes so many heads: one block has all of a token's."""
    values = max(16 // heads.dtype.itemsize, heads.head_dim // 32)  # that a thread reads
    return heads.num_heads * (heads.head_dim // values) <= MERGE_THREADS


def count_sms(device: torch.device) -> int:
    """Multiprocessors; on the CPU, where nothing hangs on it, those of an H200."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
