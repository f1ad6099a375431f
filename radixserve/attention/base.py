"""The attention interface: `ForwardBatch` in, `AttentionBackend` computes.

Knows token slots and pages; nothing of requests, models or sampling.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.errors import ModelNotSupported
from radixserve_kernels.attention_features import PLAIN as PLAIN
from radixserve_kernels.attention_features import AttentionFeatures as AttentionFeatures
from radixserve_kernels.attention_features import AttentionVariant as AttentionVariant
from radixserve_kernels.attention_metadata import AttentionMetadata as AttentionMetadata
from radixserve_kernels.attention_metadata import IndexArray as IndexArray
from radixserve_kernels.cpu_decoder import CompiledStep
from radixserve_kernels.cpu_lora import AdapterRows as AdapterRows
from radixserve_kernels.gpu.records import StateRows as StateRows
from radixserve_kernels.gpu.records import StepLora as StepLora
from radixserve_kernels.stored_kv import stored_head_dim
from radixserve_kernels.torch_ops import store_kv


class RecurrentPiece(NamedTuple):
    """Tokens [start, end) of a step, all of one row."""

    start: int
    end: int
    kept_in: int  # the state after them goes into this one, too; -1: nowhere


class RecurrentRow(NamedTuple):
    """The state of a row of several tokens: read before them, written after them."""

    state_id: int
    is_new: bool  # its sequence begins: the state is zeros, whatever it holds
    pieces: tuple[RecurrentPiece, ...]  # its tokens, end to end


class RecurrentTokens(NamedTuple):
    """The states of the N rows of one token, which a layer computes together; int64 tensors where
    the states are, so that no layer has an index to send."""

    state_ids: Tensor  # [N] read before the token
    written_ids: Tensor | None = None  # [N] written after it; None: the same
    places: Tensor | None = None  # [N] of the tokens in the step; None: it has no others
    new_rows: Tensor | None = None  # of the N those whose sequence begins, as RecurrentRow.is_new
    kept_rows: Tensor | None = None  # [K] of the N those whose state goes into another one, too
    kept_in: Tensor | None = None  # [K] which


class RecurrentRows(NamedTuple):
    """The recurrent states of a step's rows."""

    states: Sequence[Tensor]  # each [num_states, ...], in the order of ModelInfo.states
    tokens: RecurrentTokens | None  # None: no row has one token
    rows: Sequence[RecurrentRow]  # the others
    ids: StateRows | None = None  # the same of all rows, for kernels of a device: then no tokens
    # and no rows are above


class LayersKV(NamedTuple):
    """K and V of layers whose heads have another shape than those of the first layer."""

    kv: Tensor  # [L, 2, num_pages, P, Hkv, W]
    layers: tuple[int, ...]  # [L] their numbers among the layers that store K and V, ascending


class WindowKV(NamedTuple):
    """The memory of layers with windows, where their K and V have window pages."""

    kv: Tensor  # [Lw, 2, num_window_pages + 1, P, Hkv, W]; the last page is never written: zeros
    layers: tuple[int, ...]  # [Lw] their numbers, ascending


@dataclass(frozen=True)
class WindowBatch:
    """Where a step's K and V are in window pages. Read it while the step is launched."""

    slot_mapping: Tensor  # [T] int64, as that of the batch
    page_table: NDArray[np.int32]  # [num_pages] the window page of each page; the last window page
    # for a page without one: no query sees it
    host: AttentionMetadata  # of the batch
    device_page_table: Tensor | None = None  # page_table where the device has it, int32

    @cached_property
    def kv_indices(self) -> NDArray[np.int32]:
        """[total pages] window pages in the places of the host's kv_indices."""
        return self.page_table[self.host.kv_indices]


class GivenRows(NamedTuple):
    """Tokens whose embeddings are given: rows of pictures."""

    places: IndexArray  # [n] of the tokens in the step, distinct
    embeddings: Tensor  # [n, 1 + L, H] in host memory: as the first layer takes them, and what is
    # added after each of the first L layers
    rope_positions: IndexArray | None = None  # [T, D/2] of all tokens of the step: the position
    # that turns each pair of a head; None: it is that of `ForwardBatch.positions`
    last_seen: IndexArray | None = None  # [T] of all tokens of the step: the last position that
    # each sees in layers with `bidirectional`, ascending in a row; None: its own


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's rows, concatenated: T new tokens of R sequences.

    The names qo_indptr, kv_indptr, kv_indices and last_page_len mean what they mean in FlashInfer.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slot_mapping: Tensor  # [T] int64, page_id * page_size + offset of each new token
    logits_indices: Tensor  # [S] int64, ascending: the tokens after which logits are computed
    host: AttentionMetadata
    page_size: int
    device_kv_indices: Tensor | None = None  # [total pages] int32, where the device has them
    recurrent: RecurrentRows | None = None  # of a model with recurrent layers
    window: WindowBatch | None = None  # of layers that have window pages
    adapters: Sequence[AdapterRows[Any]] = ()  # of the rows that have one
    lora: StepLora | None = None  # the same where the device has it
    given: GivenRows | None = None  # what `input_ids` has in their places is not read

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    def to(self, device: torch.device) -> ForwardBatch:
        """The same with its four index tensors on `device`, one copy each."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            positions=self.positions.to(device),
            slot_mapping=self.slot_mapping.to(device),
            logits_indices=self.logits_indices.to(device),
        )

    @property
    def kv_indices(self) -> Tensor:
        """[total pages] int32 on the device; a copy of host.kv_indices if there are none yet."""
        if self.device_kv_indices is not None:
            return self.device_kv_indices
        return torch.from_numpy(self.host.kv_indices).to(self.input_ids.device)


class LayerKV(NamedTuple):
    """Where a step's new K and V go in one layer."""

    k_slots: Tensor  # [num_slots, Hkv, W] as `to_stored` of stored_kv.py has them
    v_slots: Tensor
    slot_mapping: Tensor  # [T] int64; -1 of padding, which is not stored
    scales_last: bool = False  # of int8: where a token's scales lie, as in `to_stored`


class BackendOptions(TypedDict, total=False):
    """Arguments that only some backends take: see `AttentionBackend.options`."""

    others: Sequence[LayersKV]  # layers whose heads have other shapes
    variants: Sequence[AttentionVariant]  # the distinct ones of the layers; (): all are plain
    is_exact: bool  # no bit of a row's result depends on the other rows of its step


class AttentionBackend(ABC):
    """Paged causal attention over the K and V of one pool, whose tensor it borrows.

    A step is `plan`, by the runner, then the forward pass of a model. For each layer, in order, the
    model writes K and V of the new tokens to the slots that `layer_kv` names, by `store` or by a
    kernel of its own, and then calls `attend`. Compiled code that computes all layers in one call
    takes `compiled_step` instead. Nothing else writes to the pool between `plan` and the last
    `attend`.

    The members below are all that a backend offers, with defaults for what it lacks; `choice.py`
    and the runners read them and name no backend. One thread; one plan at a time.

    Cost: `plan` is the only place for work that grows with the number of rows in Python or numpy;
    `attend` may take a number of tensor operations that grows with the K and V read, not with rows.
    """

    name: str  # as EngineConfig.attention_backend has it
    device_types: ClassVar[frozenset[str] | None] = None  # where it runs; None: everywhere
    auto_device_types: ClassVar[frozenset[str] | None] = None  # where "auto" may choose it
    package: ClassVar[str | None] = None  # on PyPI, which only this backend needs
    is_slow: ClassVar[bool] = False  # "auto" warns when it has no other choice
    options: ClassVar[frozenset[str]] = frozenset()  # those of BackendOptions that it takes
    has_compiled_step: ClassVar[bool] = False  # whether `compiled_step` returns one
    can_capture: ClassVar[bool] = False  # whether `make_graph_backend` can be called
    features: frozenset[str] = frozenset()  # of AttentionFeatures, those it computes
    has_window_pages: ClassVar[bool] = False  # whether it takes a WindowKV
    kv_dtypes: ClassVar[frozenset[torch.dtype]] = frozenset()  # of stored K and V, beside that of
    # queries
    scales_last: ClassVar[bool] = False  # of int8: where a token's scales lie, as in `to_stored`

    def __init__(
        self,
        kv: Tensor,
        num_heads: int,
        windows: WindowKV | None = None,
        dtype: torch.dtype | None = None,
        others: Sequence[LayersKV] = (),
    ) -> None:
        """kv [L, 2, num_pages, P, Hkv, W] of all layers but those in `windows` and `others`; dtype:
        of queries and of what `attend` returns, None: that of kv. See stored_kv.py for other dtypes
        of kv.

        Raises ModelNotSupported unless Hkv divides Hq.
        """
        apart: list[LayersKV | WindowKV] = list(others)
        if windows is not None:
            apart.append(windows)
        self.page_size = kv.shape[3]
        shapes = [tensor.shape[4:] for tensor in (kv, *(layers.kv for layers in apart))]
        self.num_kv_heads = max(count for count, _ in shapes)
        self.head_dim = stored_head_dim(max(width for _, width in shapes), kv.dtype)
        self.dtype = kv.dtype if dtype is None else dtype
        for num_kv_heads, _ in shapes:
            if num_heads % num_kv_heads:
                raise ModelNotSupported(
                    f"{num_heads} query heads cannot share {num_kv_heads} key heads evenly"
                )
        self.kv, self.num_heads = kv, num_heads
        self.slots = _slots_of_layers(kv, apart)  # of each layer K and V, [num_slots, Hkv, W]
        self.windows = windows
        self.window_layers = frozenset(() if windows is None else windows.layers)
        self._batch: ForwardBatch | None = None  # the planned one

    @classmethod
    def unsupported_reason(
        cls, dtype: torch.dtype, device: torch.device, head_dim: int | None = None
    ) -> str:
        """The reason why it cannot compute there, on one of its `device_types`; "" if it can.
        `dtype`: of queries. `head_dim`: None where it is not known yet."""
        del dtype, device, head_dim
        return ""

    @classmethod
    def about(cls, device_type: str) -> str:
        """What computes on a device of that type, in a line, where the backend can be used."""
        del device_type
        return cls.name

    def prepare(self, features: frozenset[str] = frozenset()) -> None:
        """Compile the kernels; once, before the first step. `features`: those that any layer uses.

        Raises ModelNotSupported where that fails.
        """
        del features

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> None:
        """Prepare for `batch`; called once per step, before the forward pass."""

    def layer_kv(self, layer: int) -> LayerKV:
        """Where K and V of the planned batch's new tokens go in a layer."""
        batch = self._batch
        assert batch is not None, "no step is planned"
        slot_mapping = batch.slot_mapping
        if layer in self.window_layers:
            assert batch.window is not None, "window pages are not known"
            slot_mapping = batch.window.slot_mapping
        return LayerKV(*self.slots[layer], slot_mapping, self.scales_last)

    def store(self, k: Tensor, v: Tensor, layer: int) -> None:
        """Write k, v [T, Hkv, D] of the new tokens."""
        k_slots, v_slots, slot_mapping, scales_last = self.layer_kv(layer)
        store_kv(k, v, k_slots, v_slots, slot_mapping, scales_last=scales_last)

    def compiled_step(self) -> CompiledStep | None:
        """The planned step for compiled code that stores and attends itself, in all layers; None:
        this backend has none."""
        return None

    def attend(
        self,
        q: Tensor,
        layer: int,
        scale: float | None = None,
        features: AttentionFeatures = PLAIN,
    ) -> Tensor:
        """Attend causally by position; K and V of the new tokens are in their slots already.

        q [T, Hq, D]; returns [T, Hq, D]. `scale` multiplies the scores and is 1 / sqrt(D) when
        None. Once a layer, in any order of layers; layers may differ in their features. Raises
        ModelNotSupported for a feature that is not among the backend's own.
        """
        if features is not PLAIN and (reason := missing_features(self.features, features.names)):
            raise ModelNotSupported(f"the {self.name} backend cannot be used: {reason}")
        scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        return self._attend(q, layer, scale, features)

    @abstractmethod
    def _attend(self, q: Tensor, layer: int, scale: float, features: AttentionFeatures) -> Tensor:
        """`attend`, with everything given and checked."""

    def shared_levels(self, batch: ForwardBatch) -> int:
        """Levels of shared pages that the graph to replay for `batch`, rows of one token, reads
        together: the `num_levels` of `make_graph_backend`."""
        del batch
        return 0

    def make_graph_backend(
        self, max_rows: int, max_pages: int, num_levels: int = 0
    ) -> AttentionBackend:
        """A backend whose `attend` can be captured in a CUDA graph; `plan` is called before each
        replay. It takes at most `max_rows` rows of one token and `max_pages` pages of all together.

        Ask for the largest first: smaller ones use its memory, so that one is at work at a time.
        """
        raise NotImplementedError(f"the {self.name} backend cannot be captured")


def missing_features(offered: frozenset[str], needed: frozenset[str]) -> str:
    """Why a backend that offers some features cannot run a model that needs some; "" if it can."""
    missing = sorted(needed - offered)
    return f"it has no {', '.join(missing)}" if missing else ""


def _slots_of_layers(
    kv: Tensor, apart: Sequence[LayersKV | WindowKV]
) -> list[tuple[Tensor, Tensor]]:
    """Of each layer K and V by slot, each [num_slots, Hkv, W]."""
    slots = [kv_view(kv, layer) for layer in range(len(kv))]
    places = sorted(
        (layer, number, index)
        for number, layers in enumerate(apart)
        for index, layer in enumerate(layers.layers)
    )
    for layer, number, index in places:
        slots.insert(layer, kv_view(apart[number].kv, index))
    return slots


def kv_view(kv: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """A layer's K and V by slot, each [num_slots, Hkv, W], of kv [L, 2, num_pages, P, Hkv, W]."""
    shape = (-1, *kv.shape[-2:])
    return kv[layer, 0].view(shape), kv[layer, 1].view(shape)


def is_attention_dtype(dtype: torch.dtype) -> bool:
    """Whether every backend but FlashInfer computes in this dtype."""
    return dtype in (torch.float32, torch.bfloat16)
