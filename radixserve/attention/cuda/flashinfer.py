"""The `flashinfer` backend: FlashInfer's paged kernels over the pool, for CUDA.

Rows of one token run in the decode kernel, others in the fa2 prefill kernel, shared pages in the
prefill kernel without a mask; planning and merging are backend.py's. fa3 neither packs the query
heads of a K/V head into one tile nor splits keys. It runs long queries only, on cards where it was
measured to be faster (radixserve_kernels.gpu.kernel_choice).

A plan fixes window and soft cap: each launch is planned once for every variant of the model's
layers, and a layer runs the plan of its variant. Layers with a window run in the fa2 prefill
kernel, which skips the keys before the window; the decode kernel would read and mask them all. fa3
runs plain layers only, because it was measured for these alone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from radixserve.attention.base import AttentionVariant, WindowKV
from radixserve.attention.cuda import flashinfer_calls
from radixserve.attention.cuda.backend import Launch, PagedBackend
from radixserve.attention.cuda.flashinfer_calls import (
    PLAIN_VARIANT,
    DecodeCalls,
    HeadShape,
    Library,
    PagedCalls,
    PrefillCalls,
    VariantCalls,
    compile_modules,
    load_library,
)
from radixserve.attention.cuda.metadata import GraphBuffers, LaunchMetadata
from radixserve.attention.cuda.plan import LaunchPlan
from radixserve.errors import ModelNotSupported
from radixserve_kernels.gpu.kernel_choice import KernelChoice, choice_of

WORKSPACE_BYTES = 256 << 20  # where keys are split: partial results of all launches, in turn
GRAPH_INT_BYTES = 1 << 20  # for plans of graphs, some bytes a row; wrappers make themselves 8 MiB
LARGEST_TILE = 128  # queries x query heads of a K/V head in one tile of the prefill kernel
SMALLEST_TILE = 16
LONGEST_REASON = 600  # characters of a compiler's message
FA3_TILES, FA3_QUERIES = 8, 256  # least of a launch; and on average of a request
BLOCKS_PER_SM = 2  # that the prefill kernel's planner counts with
DECODE_BLOCKS_PER_SM = 8  # of the decode kernel on CUDA cores, heads of 128
CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8)  # query heads of a K/V head that kernel is compiled for
MERGE_THREADS = 1024  # of a block, which merges all heads of a token

Planned = tuple[str, AttentionVariant]  # a wrapper key, and what its plans are for


class FlashInferBackend(PagedBackend):
    """See `AttentionBackend`; float16 or bfloat16, K and V in these or in float8_e4m3fn. A layer's
    window and soft cap must be among `variants`.

    One float workspace for all wrappers: what a run leaves there is read by that run alone. Where
    plans are left on the device is each wrapper's own, as several live in a step; graphs share it
    by wrapper key and variant, as one of them is at work at a time.

    `variants`: the distinct ones of the model's layers; () where all are plain. With a window among
    them nothing is shared. `shares`, `kernel_page_size`: see `PagedBackend`. `library` takes
    FlashInfer's place, for tests.
    Raises ModelNotSupported, with the reason, for heads that FlashInfer does not serve.
    """

    name = "flashinfer"
    device_types = frozenset(("cuda",))
    package = "flashinfer-python"
    options = frozenset(("variants",))
    features = frozenset(("sliding_window", "logits_soft_cap"))
    has_window_pages = True
    kv_dtypes = frozenset((torch.float8_e4m3fn,))

    def __init__(
        self,
        kv: Tensor,
        num_heads: int,
        windows: WindowKV | None = None,
        dtype: torch.dtype | None = None,
        *,
        variants: Sequence[AttentionVariant] = (),
        shares: bool = True,
        kernel_page_size: int | None = None,
        library: Library | None = None,
    ) -> None:
        num_kv_heads, head_dim = kv.shape[-2:]
        dtype = kv.dtype if dtype is None else dtype
        reason = flashinfer_calls.flashinfer_unsupported_reason(dtype, head_dim)
        if reason or (library is None and (reason := flashinfer_calls.import_error())):
            raise ModelNotSupported(f"the flashinfer backend cannot be used: {reason}")
        self._variants = tuple(dict.fromkeys(variants)) or (PLAIN_VARIANT,)
        has_windows = any(variant.sliding_window for variant in self._variants)
        shares = shares and not has_windows and can_merge(num_heads, head_dim, dtype)
        common = kv, num_heads, windows, dtype
        super().__init__(*common, shares=shares, kernel_page_size=kernel_page_size)
        size = self.kernel_page_size
        self._heads = heads = HeadShape(num_heads, num_kv_heads, head_dim, size, dtype, kv.dtype)
        self._library = library or load_library()
        self._num_sms = count_sms(kv.device)
        self.choice = choice_of(kv.device)
        num_bytes = max(WORKSPACE_BYTES, workspace_bytes(heads, self._num_sms))
        self._workspace = torch.zeros(
            num_bytes if kv.is_cuda else 0, dtype=torch.uint8, device=kv.device
        )
        shape = (-1, size, num_kv_heads, head_dim)
        self._pages = [(k.view(shape), v.view(shape)) for k, v in self.slots]
        self._wrappers: dict[Planned, PagedCalls] = {}  # of steps without a graph
        self._int_workspaces: dict[Planned, Tensor] = {}  # of graphs

    @classmethod
    def unsupported_reason(
        cls, dtype: torch.dtype, device: torch.device, head_dim: int | None = None
    ) -> str:
        del device
        reason = flashinfer_calls.flashinfer_unsupported_reason(dtype, head_dim)
        return reason or flashinfer_calls.import_error()

    @classmethod
    def about(cls, device_type: str) -> str:
        del device_type
        return "FlashInfer's kernels, for bfloat16 and float16"

    def prepare(self, features: frozenset[str] = frozenset()) -> None:
        del features  # the variants say more
        if not self.kv.is_cuda:
            return
        try:
            compile_modules(self._heads, self._variants, fa3=self._has_fa3)
        except Exception as error:
            reason = textwrap.shorten(str(error), LONGEST_REASON, placeholder=" ...")
            raise ModelNotSupported(
                f"FlashInfer's kernels cannot be compiled: {reason}; nvcc has to be found below "
                'CUDA_HOME and ninja in PATH; attention_backend="triton" does without them'
            ) from error

    def make_launch(self, metadata: LaunchMetadata, buffers: GraphBuffers | None = None) -> Launch:
        if len(self._variants) == 1:
            return self._planned_calls(metadata, buffers, self._variants[0])
        return VariantCalls(
            {variant: self._planned_calls(metadata, buffers, variant) for variant in self._variants}
        )

    def _planned_calls(
        self, metadata: LaunchMetadata, buffers: GraphBuffers | None, variant: AttentionVariant
    ) -> PagedCalls:
        plan, key = metadata.plan, metadata.wrapper_key
        common = self._library, self._heads, self._pages
        has_window = variant.sliding_window > 0
        in_windows = has_window and self.windows is not None
        tensor_cores = has_window or wants_tensor_cores(
            plan.num_requests, self._heads, self._num_sms, self.choice
        )
        calls: PagedCalls
        if buffers is not None:
            graph = buffers, self._int_workspace(key, variant)
            workspace = self._graph_workspace(plan.num_requests, plan.num_tokens)
            if plan.is_decode:
                calls = DecodeCalls(
                    *common,
                    workspace,
                    graph,
                    variant=variant,
                    in_windows=in_windows,
                    use_tensor_cores=tensor_cores,
                )
            else:
                calls = PrefillCalls(
                    *common, workspace, graph, variant=variant, in_windows=in_windows
                )
        else:
            is_plain = variant == PLAIN_VARIANT
            make: Callable[..., PagedCalls] = PrefillCalls
            if plan.is_decode and not tensor_cores:
                make, key = DecodeCalls, f"{key} on CUDA cores"
            elif self._has_fa3 and is_plain and not metadata.is_merged and wants_fa3(plan):
                make, key = partial(PrefillCalls, backend="fa3"), f"{key} fa3"
            if (key, variant) not in self._wrappers:
                self._wrappers[key, variant] = make(
                    *common, self._workspace, variant=variant, in_windows=in_windows
                )
            calls = self._wrappers[key, variant]
        calls.plan(metadata)
        return calls

    @property
    def _has_fa3(self) -> bool:
        """That kernel reads K and V of 8 bits for queries of 8 bits only."""
        return self.choice.fa3 and self.kv.dtype == self.dtype

    def merge(self, out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
        self._library.merge_state_in_place(out, lse, other, other_lse)

    def _int_workspace(self, wrapper_key: str, variant: AttentionVariant) -> Tensor:
        key = wrapper_key, variant
        if key not in self._int_workspaces:
            self._int_workspaces[key] = torch.empty(
                GRAPH_INT_BYTES, dtype=torch.uint8, device=self.kv.device
            )
        return self._int_workspaces[key]

    def _graph_workspace(self, num_requests: int, num_tokens: int) -> Tensor:
        """The common workspace, or a larger one that replaces it; graphs keep their old one."""
        wanted = graph_workspace_bytes(self._heads, self._num_sms, num_requests, num_tokens)
        if self._workspace.is_cuda and wanted > len(self._workspace):
            self._workspace = self._workspace.new_zeros(wanted)
        return self._workspace


def wants_fa3(plan: LaunchPlan) -> bool:
    """Whether a launch has queries enough for tiles of 128 of one head."""
    lengths = np.diff(plan.qo_indptr)
    num_tiles = int((-(-lengths // LARGEST_TILE)).sum())
    return plan.is_causal and num_tiles >= FA3_TILES and float(lengths.mean()) >= FA3_QUERIES


def wants_tensor_cores(
    num_rows: int, heads: HeadShape, num_sms: int, choice: KernelChoice | None = None
) -> bool:
    """Whether rows of one token are better off in the kernel that uses tensor cores: as measured on
    this card, or by a rule.

    That kernel reads a K/V head once for all its query heads, but splits keys only while
    num_rows * Hkv tiles do not fill two blocks a multiprocessor: from there on rows of unequal
    length leave it waiting for the longest. The one on CUDA cores splits up to DECODE_BLOCKS_PER_SM
    and multiplies for each query head anew, which is too much from 8 query heads on. Where neither
    splits, tensor cores.
    """
    group = heads.num_heads // heads.num_kv_heads
    if group not in CUDA_CORE_GROUPS or group >= 8:
        return True
    measured = None if choice is None else choice.tensor_cores(group, num_rows)
    if measured is not None:
        return measured
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
    """Partial results of a graph, which always splits: for the most tiles of its shape."""
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


def can_merge(num_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether FlashInfer's merge takes so many heads: one block has all of a token's."""
    values = max(16 // dtype.itemsize, head_dim // 32)  # that a thread reads
    return num_heads * (head_dim // values) <= MERGE_THREADS


def count_sms(device: torch.device) -> int:
    """Multiprocessors; those of an H200 on the CPU, where nothing depends on it."""
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
