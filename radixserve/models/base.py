"""The interface of models: `ModelInfo` and `LanguageModel`."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from radixserve.attention.base import (
    AttentionBackend,
    AttentionFeatures,
    AttentionVariant,
    ForwardBatch,
    LayerKV,
)
from radixserve.errors import ModelNotSupported
from radixserve.sampling_defaults import NO_SAMPLING, ModelSampling
from radixserve_kernels.quantized import BITS, FORMS
from radixserve_kernels.stored_kv import stored_width


class StateShape(NamedTuple):
    """A state that a recurrent layer keeps of each sequence."""

    layer: int
    kind: str  # "conv" or "recurrent"
    number: int  # among those of its kind in the layer
    shape: tuple[int, ...]
    dtype: torch.dtype


class KVShape(NamedTuple):
    """The heads of K and V in a layer."""

    num_heads: int
    dim: int


_OF_WEIGHTS = (
    *("eos_ids", "sampling", "num_parameters", "weight_forms", "kv_dtype", "inexact"),
)  # fields of a ModelInfo that another checkpoint of the same model may have otherwise


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
    eos_ids: tuple[int, ...]  # ascending; of generation_config.json, config.json, the tokenizer
    dtype: torch.dtype
    num_parameters: int  # tied ones once
    sampling: ModelSampling = NO_SAMPLING
    # (form, parameters in it) of quantized weights; the others are in dtype
    weight_forms: tuple[tuple[str, int], ...] = ()
    attention_features: tuple[str, ...] = ()  # fields of AttentionFeatures that any layer uses
    attention_variants: tuple[AttentionVariant, ...] = ()  # the distinct ones of its layers

    num_kv_layers: int | None = None  # layers that store K and V; None: all
    kv_shapes: tuple[KVShape, ...] = ()  # of each of them, where they differ: num_kv_heads and
    # head_dim are then the largest. Empty: all have num_kv_heads of head_dim
    window_layers: tuple[int, ...] = ()  # of those the ones that see a window or chunk of positions
    window_size: int = 0  # positions, where such a layer sees most
    uncut_rows: int = 0  # most rows of a picture that see each other, so that one step computes
    # them; 0: a step may end between any
    states: tuple[StateShape, ...] = ()  # of recurrent layers
    kv_dtype: torch.dtype | None = None  # of stored K and V; None: dtype
    inexact: str = ""  # on the CPU: why a token's bits may depend on other tokens of a step

    def is_like(self, other: ModelInfo) -> bool:
        """Whether `other` is a model with the same K/V, tokens and layers, whatever its weights."""
        own = {name: getattr(self, name) for name in _OF_WEIGHTS}
        return replace(other, **own) == self

    @property
    def kv_layers(self) -> int:
        return self.num_layers if self.num_kv_layers is None else self.num_kv_layers

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states, independent of its length."""
        return sum(math.prod(state.shape) * state.dtype.itemsize for state in self.states)

    @property
    def state_tokens(self) -> float:
        """Tokens whose K/V takes the memory of one sequence's recurrent states."""
        return self.state_bytes / self.kv_bytes_per_token if self.states else 0.0

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
    def shapes_of_kv(self) -> tuple[KVShape, ...]:
        """Of each layer that stores K and V."""
        return self.kv_shapes or (KVShape(self.num_kv_heads, self.head_dim),) * self.kv_layers

    @property
    def kv_bytes_per_token(self) -> int:
        """The sum of what each layer stores of a token."""
        return sum(map(self._kv_bytes, self.shapes_of_kv))

    @property
    def window_bytes_per_token(self) -> int:
        """The part of `kv_bytes_per_token` in `window_layers`."""
        shapes = self.shapes_of_kv
        return sum(self._kv_bytes(shapes[layer]) for layer in self.window_layers)

    @property
    def stored_kv_dtype(self) -> torch.dtype:
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    def _kv_bytes(self, shape: KVShape) -> int:
        """Of a token in a layer."""
        dtype = self.stored_kv_dtype
        return 2 * shape.num_heads * stored_width(shape.dim, dtype) * dtype.itemsize


def layer_windows(features: Iterable[AttentionFeatures]) -> dict[str, Any]:
    """`window_layers` and `window_size` of a ModelInfo whose layers have these features."""
    spans = [min(filter(None, layer_features.span), default=0) for layer_features in features]
    layers = tuple(number for number, span in enumerate(spans) if span)
    return {"window_layers": layers, "window_size": max(spans, default=0)}


def distinct_variants(features: Iterable[AttentionFeatures]) -> tuple[AttentionVariant, ...]:
    """`attention_variants` of a ModelInfo whose layers have these features."""
    return tuple(dict.fromkeys(layer_features.variant for layer_features in features))


class LanguageModel(ABC):
    """A decoder that keeps its K and V in the pool of an attention backend, see `AttentionBackend`.

    Holds weights only: nothing but `take_weights` changes it.
    """

    info: ModelInfo
    is_compiled: ClassVar[bool] = False  # whether `forward` has no operation of PyTorch
    can_capture: ClassVar[bool] = False  # whether a CUDA graph can be made of `forward`
    reads_state_rows: ClassVar[bool] = False  # recurrent layers read `RecurrentRows.ids`
    # Why it cannot compute `ForwardBatch.given`; "": it can.
    no_pictures: ClassVar[str] = "pictures beside a text model in transformers' code are not built"

    @abstractmethod
    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Logits [S, V] float32 after each of `batch.logits_indices`; `backend` is planned."""

    def forward_into(self, out: Tensor, batch: ForwardBatch, backend: AttentionBackend) -> None:
        """`forward` with its logits in `out`."""
        out.copy_(self.forward(batch, backend))

    def pack_adapter(self, modules: Mapping[str, Any]) -> Any:
        """A LoRA adapter ready to compute, the `weights` of `AdapterRows`, from its `LoraModule`s
        by name. It has `num_bytes`. May be called from any thread. Raises ModelNotSupported."""
        del modules
        raise ModelNotSupported(
            f"adapters run in the native decoder; {self.info.architecture} runs in transformers' "
            "code here"
        )

    def take_weights(self, other: LanguageModel) -> None:
        """Compute with the weights of `other`, a model of the same class and sizes, which is not
        used any more."""
        vars(self).update(vars(other))

    def read_again(self, source: Any) -> bool:
        """Compute with the weights that a `ModelSource` of this model was given: in the memory of
        the present ones, so that no second copy of all exists. Returns False, and nothing has
        changed, where this model cannot. Raises ModelNotSupported before anything changes for
        tensors that do not fit."""
        del source
        return False

    def is_same_shape(self, source: Any) -> bool:
        """Whether a `ModelSource` is of a model of the same tensors, and this one can
        `read_again`."""
        del source
        return False

    def by_layers(self) -> LayeredModel | None:
        """The model itself if it is a `LayeredModel`, else None."""
        return None


class LayeredModel(LanguageModel):
    """A model whose `forward` can be called in parts. `mix` is what looks beyond a token: attention
    and recurrences.

    embed, then of each layer project, mix and finish_layer; of the last one finish. number: of the
    layer. T: any number of tokens, but for mix, which is for those of the planned batch.
    """

    @abstractmethod
    def kv_layer(self, number: int) -> int | None:
        """The number of the layer among those that store K and V; None: it stores none."""

    @abstractmethod
    def projected_shapes(self, number: int) -> tuple[tuple[int, ...], ...]:
        """What `project` returns of a token: the shapes of its tensors but their first axis."""

    @abstractmethod
    def mixed_size(self, number: int) -> int:
        """Features of a token in what `mix` returns."""

    @abstractmethod
    def embed(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """input_ids [T] int64; returns the first layer's input and the residual, [T, H] both."""

    @abstractmethod
    def project(
        self,
        number: int,
        x: Tensor,
        positions: Tensor,
        kv: LayerKV | None,
        out: Sequence[Tensor] = (),
    ) -> Sequence[Tensor]:
        """Stores K and V of x [T, H]; returns what `mix` reads, in `out` if it is given: of a layer
        with attention first the queries [T, Hq, D], then what its gate or its recurrence reads.

        positions [T] int64; kv: `AttentionBackend.layer_kv` of a layer that stores some.
        """

    @abstractmethod
    def mix(
        self,
        number: int,
        projected: Sequence[Tensor],
        batch: ForwardBatch,
        backend: AttentionBackend,
    ) -> Tensor:
        """[T, mixed_size]: attention, and what a recurrence gives. Reads and writes states."""

    @abstractmethod
    def finish_layer(self, number: int, mixed: Tensor, x: Tensor, residual: Tensor) -> Tensor:
        """From what `mix` gave and the layer's input x [T, H]: the next layer's input [T, H].
        Adds to the residual in place."""

    @abstractmethod
    def finish(
        self,
        mixed: Tensor,
        x: Tensor,
        residual: Tensor,
        logits_indices: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """The last layer's `finish_layer`, and the logits [S, V] after logits_indices [S], in `out`
        if it is given."""

    def by_layers(self) -> LayeredModel:
        return self
