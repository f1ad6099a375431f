"""The interface of models: `ModelInfo` and `LanguageModel`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from radixserve.attention.base import (
    AttentionBackend,
    AttentionFeatures,
    AttentionVariant,
    ForwardBatch,
)
from radixserve_kernels.quantized import BITS, FORMS


class StateShape(NamedTuple):
    """A state that a recurrent layer keeps of each sequence."""

    layer: int
    kind: str  # "conv" or "recurrent"
    number: int  # among those of its kind in the layer
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model's sizes, in tokens, heads or features."""

    architecture: str  # as in config.json, "LlamaForCausalLM"
    is_native: bool  # runs in decoder.py or cpu_decoder.py, not through transformers' code
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int  # rows of the output head
    max_positions: int
    eos_ids: tuple[int, ...]  # ascending; of generation_config.json and config.json
    dtype: torch.dtype
    num_parameters: int  # tied ones once
    # (form, parameters in it) of quantized weights; the others are in dtype
    weight_forms: tuple[tuple[str, int], ...] = ()
    attention_features: tuple[str, ...] = ()  # fields of AttentionFeatures that any layer uses
    attention_variants: tuple[AttentionVariant, ...] = ()  # the distinct ones of its layers

    num_kv_layers: int | None = None  # layers that attend; None: all
    window_layers: tuple[int, ...] = ()  # of those the ones that see a window or chunk of positions
    window_size: int = 0  # positions, where such a layer sees most
    states: tuple[StateShape, ...] = ()  # of recurrent layers

    @property
    def kv_layers(self) -> int:
        return self.num_layers if self.num_kv_layers is None else self.num_kv_layers

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states, independent of its length."""
        return sum(math.prod(one.shape) * one.dtype.itemsize for one in self.states)

    @property
    def weight_bytes(self) -> int:
        others = self.num_parameters - sum(count for _, count in self.weight_forms)
        packed = sum(count * BITS[form] // 8 for form, count in self.weight_forms)
        return others * self.dtype.itemsize + int(packed)

    @property
    def is_quantized(self) -> bool:
        """Whether activations are rounded to 8 bits."""
        return any(form in FORMS for form, _ in self.weight_forms)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._kv_bytes(self.kv_layers)

    @property
    def window_bytes_per_token(self) -> int:
        """Those of `kv_bytes_per_token` that are of `window_layers`."""
        return self._kv_bytes(len(self.window_layers))

    def _kv_bytes(self, num_layers: int) -> int:
        return 2 * num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def layer_windows(features: Iterable[AttentionFeatures]) -> dict[str, Any]:
    """`window_layers` and `window_size` of a ModelInfo whose layers have these features."""
    spans = [min(filter(None, one.span), default=0) for one in features]
    layers = tuple(number for number, span in enumerate(spans) if span)
    return {"window_layers": layers, "window_size": max(spans, default=0)}


def distinct_variants(features: Iterable[AttentionFeatures]) -> tuple[AttentionVariant, ...]:
    """`attention_variants` of a ModelInfo whose layers have these features."""
    return tuple(dict.fromkeys(one.variant for one in features))


class LanguageModel(ABC):
    """A decoder that keeps its K and V in the attention backend it is handed.

    Holds weights only: nothing changes in it between calls.
    """

    info: ModelInfo
    can_capture: ClassVar[bool] = False  # whether a CUDA graph can be made of `forward`

    @abstractmethod
    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Logits [S, V] float32 after each of `batch.logits_indices`; `backend` is planned."""

    def forward_into(self, out: Tensor, batch: ForwardBatch, backend: AttentionBackend) -> None:
        """`forward` with its logits in `out`."""
        out.copy_(self.forward(batch, backend))

    def by_layers(self) -> LayeredModel | None:
        """Itself, if `forward` can be had in parts."""
        return None


class LayeredModel(LanguageModel):
    """A model whose `forward` can be had in parts, those with attention apart from those without.

    embed, then of each layer project, attend and finish_layer; of the last one finish. number: of
    the layer. T: any number of tokens, but for attend, which is for those of the planned batch.
    """

    @abstractmethod
    def embed(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """input_ids [T] int64; returns the first layer's input and the residual, [T, H] both."""

    @abstractmethod
    def project(
        self,
        number: int,
        x: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        slots: tuple[Tensor, Tensor],
        out: Tensor | None = None,
    ) -> Tensor:
        """Stores K and V of x [T, H]; returns the queries [T, Hq, D], in `out` if it is given.

        positions, slot_mapping [T] int64; -1: not stored. slots: the layer's K and V
        in the pool, [num_slots, Hkv, D] each.
        """

    @abstractmethod
    def attend(self, number: int, queries: Tensor, backend: AttentionBackend) -> Tensor:
        """queries [T, Hq, D]; returns [T, Hq * D]."""

    @abstractmethod
    def finish_layer(self, number: int, attended: Tensor, x: Tensor, residual: Tensor) -> Tensor:
        """From attended [T, Hq * D] and the layer's input x [T, H]: the next layer's input [T, H].
        Adds to the residual in place."""

    @abstractmethod
    def finish(
        self,
        attended: Tensor,
        x: Tensor,
        residual: Tensor,
        logits_indices: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """The last layer's `finish_layer`, and the logits [S, V] after logits_indices [S], in `out`
        if it is given."""

    def by_layers(self) -> LayeredModel:
        return self
