"""Every call into FlashInfer: the names that are used, and two classes around its wrappers.

The tests hold the arguments against the signatures of the installed package. Importing this module
needs no FlashInfer.

`plan` of either class takes pinned int32 arrays on the host (indptr, last_page_len, lengths) and
page ids on the device, and does not wait for the device. FlashInfer copies the plan from its own
pinned memory: the next plan must wait until this copy is done.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from radixserve.attention.base import PLAIN, AttentionFeatures, AttentionVariant
from radixserve.attention.cuda.metadata import GraphBuffers, LaunchMetadata

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
PLAIN_VARIANT = AttentionVariant()


class Library(NamedTuple):
    """FlashInfer's names that are used."""

    decode_wrapper: Callable[..., Any]
    prefill_wrapper: Callable[..., Any]
    fast_decode_plan: Callable[..., Any]
    merge_state_in_place: Callable[..., Any]


def load_library() -> Library:
    """Raises whatever importing FlashInfer raises where it is not installed or broken."""
    from flashinfer.cascade import merge_state_in_place
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

    return Library(
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
        fast_decode_plan,
        merge_state_in_place,
    )


def flashinfer_unsupported_reason(dtype: torch.dtype, head_dim: int | None = None) -> str:
    """Why FlashInfer does not serve heads like these; "" if it does."""
    if dtype not in DTYPES:
        return f"FlashInfer takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_dim is not None and head_dim not in HEAD_DIMS:
        return f"FlashInfer takes heads of {', '.join(map(str, HEAD_DIMS))}, not of {head_dim}"
    return ""


def import_error() -> str:
    """Why FlashInfer cannot be imported; "" if it can. Imports it."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install radixserve[cuda])"
    try:
        load_library()
    except Exception as error:
        return f"importing FlashInfer failed: {type(error).__name__}: {error}"
    return ""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The arguments that all plans of a pool have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # as the kernels read the pool
    dtype: torch.dtype  # of queries
    kv_dtype: torch.dtype

    def as_arguments(self, variant: AttentionVariant) -> dict[str, Any]:
        """For both wrappers' plans. The scale of the scores is given to `run`, which multiplies
        sm_scale by it: soft caps are of scaled scores. A query at position p sees the keys from
        p - window_left on; -1: all."""
        return {
            "num_qo_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "page_size": self.page_size,
            "pos_encoding_mode": "NONE",
            "q_data_type": self.dtype,
            "kv_data_type": self.kv_dtype,
            "sm_scale": 1.0,
            "window_left": variant.sliding_window - 1,
            "logits_soft_cap": variant.logits_soft_cap,
        }


class PagedCalls(ABC):
    """See `Launch`: a wrapper of FlashInfer's, planned for one launch after another, and for layers
    of one variant."""

    def __init__(
        self,
        library: Library,
        heads: HeadShape,
        pages: list[tuple[Tensor, Tensor]],  # each layer's K and V [num_pages, page_size, Hkv, D]
        graph: tuple[GraphBuffers, Tensor] | None,
        variant: AttentionVariant,
        *,
        in_windows: bool,
    ) -> None:
        """`graph`: for a CUDA graph the buffers, of the sizes that all plans have, and an int
        workspace, uint8, where a plan is left on the device until the next one. `in_windows`:
        whether the variant's layers have window pages."""
        self._library, self._heads, self._pages = library, heads, pages
        self._is_graph = graph is not None
        self._variant, self._is_plain = variant, variant == PLAIN_VARIANT
        self._arguments = heads.as_arguments(variant)
        self._in_windows = in_windows
        self._graph_pages: Tensor | None = None  # [max_pages] that the variant's layers read
        if graph is not None:
            buffers = graph[0]
            self._graph_pages = buffers.window_kv_indices if in_windows else buffers.kv_indices
        self._wrapper: Any = None

    @abstractmethod
    def plan(self, metadata: LaunchMetadata) -> None:
        """The first one compiles or loads the kernels."""

    def _kv_indices(self, metadata: LaunchMetadata) -> Tensor:
        """[num_pages] on the device, of the variant's layers; in a graph they lie in its buffer."""
        if not self._in_windows:
            return metadata.kv_indices
        if metadata.window_kv_indices is not None:
            return metadata.window_kv_indices
        assert self._graph_pages is not None, "window pages are not known"
        return self._graph_pages[: len(metadata.kv_indices)]  # a graph is made before they are

    def run(
        self,
        q: Tensor,
        layer: int,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
        features: AttentionFeatures,
    ) -> None:
        is_planned = self._is_plain if features is PLAIN else features.variant == self._variant
        assert is_planned, f"planned for {self._variant}, not for {features.variant}"
        pages = self._pages[layer]
        self._wrapper.run(q, pages, q_scale=scale, out=out, lse=lse, return_lse=lse is not None)


class DecodeCalls(PagedCalls):
    """Rows of one token; for a graph always as many rows.

    Without a graph CUDA cores only: the fast plan of the kernel for tensor cores copies
    last_page_len back from the device; PrefillCalls run that kernel, too.
    """

    def __init__(
        self,
        library: Library,
        heads: HeadShape,
        pages: list[tuple[Tensor, Tensor]],
        workspace: Tensor,
        graph: tuple[GraphBuffers, Tensor] | None = None,
        *,
        variant: AttentionVariant = PLAIN_VARIANT,
        in_windows: bool = False,
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(library, heads, pages, graph, variant, in_windows=in_windows)
        assert graph is not None or not use_tensor_cores
        self._arguments["head_dim"] = heads.head_dim
        more: dict[str, Any] = {}
        if graph is not None:
            more = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": graph[0].kv_indptr,
                "paged_kv_indices_buffer": self._graph_pages,
                "paged_kv_last_page_len_buffer": graph[0].last_page_len,
            }
        self._wrapper = library.decode_wrapper(
            workspace, "NHD", use_tensor_cores=use_tensor_cores, backend="fa2", **more
        )
        if graph is not None:
            self._wrapper.reset_workspace_buffer(workspace, graph[1])
        self._is_planned = False

    def plan(self, metadata: LaunchMetadata) -> None:
        arguments, host, pages = self._arguments, metadata.host, self._kv_indices(metadata)
        if not self._is_planned:
            self._wrapper.plan(
                host.kv_indptr,
                pages,
                host.last_page_len,
                non_blocking=True,
                **arguments,
            )
            self._is_planned = True
            return
        # In a graph the arrays lie in the wrapper's buffers already, and those given here are only
        # measured; without one they become its arrays.
        side = host if self._is_graph else metadata.device
        self._library.fast_decode_plan(
            self._wrapper,
            side.kv_indptr,
            pages,
            side.last_page_len,
            non_blocking=True,
            global_override_indptr_cpu=host.kv_indptr,
            **arguments,
        )


class PrefillCalls(PagedCalls):
    """Rows of any number of tokens, or groups of them over shared pages.

    For a graph the first plan must be of as many tokens as any later one.
    """

    def __init__(
        self,
        library: Library,
        heads: HeadShape,
        pages: list[tuple[Tensor, Tensor]],
        workspace: Tensor,
        graph: tuple[GraphBuffers, Tensor] | None = None,
        *,
        variant: AttentionVariant = PLAIN_VARIANT,
        in_windows: bool = False,
        backend: str = "fa2",
    ) -> None:
        super().__init__(library, heads, pages, graph, variant, in_windows=in_windows)
        more: dict[str, Any] = {}
        if graph is not None:
            more = {
                "use_cuda_graph": True,
                "qo_indptr_buf": graph[0].qo_indptr,
                "paged_kv_indptr_buf": graph[0].kv_indptr,
                "paged_kv_indices_buf": self._graph_pages,
                "paged_kv_last_page_len_buf": graph[0].last_page_len,
            }
        self._wrapper = library.prefill_wrapper(workspace, "NHD", backend=backend, **more)
        if graph is not None:
            self._wrapper.reset_workspace_buffer(workspace, graph[1])

    def plan(self, metadata: LaunchMetadata) -> None:
        plan, host = metadata.plan, metadata.host
        self._wrapper.plan(
            host.qo_indptr,
            host.kv_indptr,
            self._kv_indices(metadata),
            host.last_page_len,
            head_dim_qk=self._heads.head_dim,
            head_dim_vo=self._heads.head_dim,
            causal=plan.is_causal and plan.max_q > 1,
            non_blocking=True,
            seq_lens=host.kv_lens,
            max_token_per_sequence=plan.max_q,
            **self._arguments,
        )


class VariantCalls:
    """See `Launch`: one planned wrapper for each variant of the model's layers."""

    def __init__(self, calls: Mapping[AttentionVariant, PagedCalls]) -> None:
        self._calls = calls

    def plan(self, metadata: LaunchMetadata) -> None:
        for calls in self._calls.values():
            calls.plan(metadata)

    def run(
        self,
        q: Tensor,
        layer: int,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
        features: AttentionFeatures,
    ) -> None:
        variant = features.variant
        assert variant in self._calls, f"planned for {list(self._calls)}, not for {variant}"
        self._calls[variant].run(q, layer, scale, out, lse, features)


def compile_modules(
    heads: HeadShape,
    variants: Sequence[AttentionVariant] = (PLAIN_VARIANT,),
    *,
    fa3: bool = False,
) -> None:
    """Compile all kernels that these heads need, side by side: about a minute on 16 cores where
    they are not in FlashInfer's cache. Without this the first plans and runs do it one by one.

    A module is of heads and of whether there is a window and a cap, not of which: those of the
    prefill kernel for every variant, of the decode kernel for those without a window, of fa3 for
    plain layers.
    """
    from flashinfer.jit.attention import gen_batch_decode_module, gen_batch_prefill_module
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.core import build_jit_specs

    dtype, dim = heads.dtype, heads.head_dim
    no_position_encoding = 0
    common = (dtype, heads.kv_dtype, dtype, torch.int32, dim, dim, no_position_encoding)
    flags = dict.fromkeys(
        (module_flags.sliding_window > 0, module_flags.logits_soft_cap > 0)
        for module_flags in variants
    )
    fa3 = fa3 and PLAIN_VARIANT in variants
    build_jit_specs(
        [
            *(
                gen_batch_decode_module(*common, *module_flags)
                for module_flags in flags
                if not module_flags[0]
            ),
            *(
                gen_batch_prefill_module("fa2", *common, *module_flags, False)
                for module_flags in flags
            ),
            gen_cascade_module(),
            *([gen_batch_prefill_module("fa3", *common, False, False, False)] if fa3 else []),
        ]
    )
