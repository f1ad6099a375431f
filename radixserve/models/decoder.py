"""The native decoder on any device and attention backend, whole or as one of several ranks.

It uses few kernels; CPU tensors run their torch references. Nothing in `forward` waits for the
device, depends on the values of a tensor, or has a shape that does, so that a CUDA graph can
capture it. The batch and the backend know which tokens form a sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch, GivenRows, LayerKV
from radixserve.errors import InvalidRequest, ModelNotSupported
from radixserve.models.base import LanguageModel, LayeredModel, ModelInfo, StateShape
from radixserve.models.decoder_shape import (
    check_decoder,
    compiled_parts,
    decoder_shape,
    not_native_reason,
)
from radixserve.models.decoder_tensors import (
    DecoderTensors,
    LayerTensors,
    check_tensors,
    read_decoder,
)
from radixserve.models.device_layer import DeviceLayer, pack_layer
from radixserve.models.device_lora import DeviceLora, entry_of, lora_of
from radixserve.models.in_place import copy_weights
from radixserve.models.lora import LoraModule, lora_layers
from radixserve.models.parallel import TPGroup, check_split, shard_head, shard_layer, shard_shape
from radixserve.models.source import ModelSource
from radixserve_kernels.delta_net import DeltaNet
from radixserve_kernels.experts import GroupedExperts
from radixserve_kernels.gpu.records import LoraRows
from radixserve_kernels.gpu_ops import (
    act_and_mul,
    add_lora,
    add_rms_norm,
    recurrence,
    rms_norm,
    rope_and_store,
    short_conv,
    sigmoid_gate,
    squared_relu,
)
from radixserve_kernels.linear import Linear
from radixserve_kernels.quantized import AnyWeight, dense

logger = logging.getLogger("radixserve")

TABLE_BYTES = 256 << 20  # of rotations, unless more positions are asked for


class Turns(NamedTuple):
    """How a step's tokens are turned: each by a row of the tables."""

    positions: Tensor  # [T] int64, the rows
    tables: tuple[Tensor, ...]  # of each rotary [n, D] float32


class Decoder(LayeredModel):
    """See `LayeredModel`. Made by `load_decoder`. One of several ranks has an `info` of its own.

    Its kernels store K and V, of as many heads as `info` has, where the backend's `layer_kv` says.
    """

    can_capture = True
    reads_state_rows = True
    no_pictures = ""

    def __init__(
        self,
        tensors: DecoderTensors,  # the rank's; layers are DeviceLayer
        tables: tuple[Tensor, ...],  # of each rotary [max positions, D] float32
        group: TPGroup | None,
        *,
        is_exact: bool = False,
        compiles: bool = True,
    ) -> None:
        self.info: ModelInfo = tensors.info
        self._shape, self._group = tensors.shape, group
        self._embedding, self._norm = dense(tensors.embedding), tensors.norm
        head = dense(tensors.lm_head)  # H -> V, or the rank's part of V
        self._make_linear = partial(Linear, is_exact=is_exact, compiles=compiles)
        self._lm_head = self._make_linear(head)
        self._layers: tuple[DeviceLayer, ...] = tensors.layers
        self.tables = tables
        self._kv_layers = _numbered([layer.attends for layer in self._layers])
        self._first_states = _first_states(tensors.info.states)  # of each layer that has some

    def take_weights(self, other: LanguageModel) -> None:
        """See `LanguageModel`. On a device in the memory that they have, where graphs read them."""
        if self._embedding.device.type == "cpu":
            super().take_weights(other)
        else:
            copy_weights(self, other)
            self.info = other.info

    def is_same_shape(self, source: ModelSource) -> bool:
        is_native = not not_native_reason(source.config)
        return self._group is None and is_native and decoder_shape(source.config) == self._shape

    def read_again(self, source: ModelSource) -> bool:
        """See `LanguageModel.read_again`. Graphs read the weights where they are."""
        dtype, given = self.info.dtype, source.given or {}
        has_floats = all(tensor.element_size() > 1 for tensor in given.values())
        if self._group is not None or not self._lm_head.can_be_copied or not has_floats:
            return False
        check_tensors(source, dtype)
        layers = iter(self._layers)

        def take_layer(tensors: LayerTensors) -> None:
            copy_weights(next(layers), pack_layer(tensors, self._make_linear))

        def take_ends(embedding: AnyWeight, lm_head: AnyWeight) -> tuple[None, None]:
            head = self._make_linear(dense(lm_head))
            copy_weights((self._embedding, self._lm_head), (dense(embedding), head))
            return None, None

        device = self._embedding.device
        new = read_decoder(source, dtype, device, take_layer, make_ends=take_ends)
        copy_weights(self._norm, new.norm)
        return True

    def forward_into(self, out: Tensor, batch: ForwardBatch, backend: AttentionBackend) -> None:
        self.forward(batch, backend, out)

    def forward(
        self, batch: ForwardBatch, backend: AttentionBackend, out: Tensor | None = None
    ) -> Tensor:
        last = len(self._layers) - 1
        x, residual = self.embed(batch.input_ids, batch.given)
        lora = batch.lora
        if lora is None and batch.adapters:
            lora = lora_of(batch.adapters, x.device)
        tokens, sampled = (None, None) if lora is None else lora
        turns = self._turns(batch)
        for number in range(last):
            mixed = self._mix(number, x, batch, backend, tokens, turns)
            x = self._finish_layer(number, mixed, x, residual, tokens)
            if batch.given is not None and number + 1 < batch.given.embeddings.shape[1]:
                _add_given(residual, batch.given, number + 1)
                x = self._normed(residual, self._layers[number + 1].pre_attention_norm)
        mixed = self._mix(last, x, batch, backend, tokens, turns)
        return self._finish(mixed, x, residual, batch.logits_indices, out, sampled)

    def _mix(
        self,
        number: int,
        x: Tensor,
        batch: ForwardBatch,
        backend: AttentionBackend,
        lora: LoraRows | None,
        turns: Turns,
    ) -> Tensor:
        kv_layer = self._kv_layers[number]
        kv = None if kv_layer is None else backend.layer_kv(kv_layer)
        projected = self._project(number, x, turns, kv, (), lora)
        return self.mix(number, projected, batch, backend)

    def _turns(self, batch: ForwardBatch) -> Turns:
        if batch.given is None or batch.given.rope_positions is None:
            return Turns(batch.positions, self.tables)
        places = torch.from_numpy(batch.given.rope_positions).to(batch.positions.device)
        tables = tuple(table.gather(0, places.repeat(1, 2)) for table in self.tables)
        return Turns(torch.arange(len(places), device=places.device), tables)

    def pack_adapter(self, modules: Mapping[str, LoraModule]) -> DeviceLora:
        if self._group is not None:
            raise ModelNotSupported("adapters over several ranks are not built")
        layers = lora_layers(self._shape, modules)
        try:
            return DeviceLora(layers, self.info.dtype, self._embedding.device)
        except torch.OutOfMemoryError as error:
            raise InvalidRequest(
                f"the device has no room for the adapter ({error}). Adapters that are named at the "
                "start have adapter_memory reserved"
            ) from None

    def embed(self, input_ids: Tensor, given: GivenRows | None = None) -> tuple[Tensor, Tensor]:
        residual = F.embedding(input_ids, self._embedding)
        if self._shape.embedding_scale != 1:
            residual = residual * self._shape.embedding_scale
        if given is not None:
            places = torch.from_numpy(given.places).to(residual.device)
            residual.index_copy_(0, places, given.embeddings[:, 0].to(residual))
        return self._normed(residual, self._layers[0].pre_attention_norm), residual

    def kv_layer(self, number: int) -> int | None:
        return self._kv_layers[number]

    def projected_shapes(self, number: int) -> tuple[tuple[int, ...], ...]:
        shape, layer = self._shape, self._layers[number]
        if not layer.attends:
            return () if layer.qkv is None else ((layer.num_columns,),)
        more = layer.num_columns - (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        queries = shape.num_heads, shape.head_dim
        return (queries, (more,)) if more else (queries,)

    def mixed_size(self, number: int) -> int:
        layer = self._layers[number]
        size = self._shape.num_heads * self._shape.head_dim if layer.attends else 0
        if layer.short_conv is not None:
            return size + layer.short_conv.shape[1]
        if layer.recurrence is None:
            return size
        num_heads, _, v_dim = layer.recurrence.state_shapes[1]
        return size + num_heads * v_dim

    def project(
        self,
        number: int,
        x: Tensor,
        positions: Tensor,
        kv: LayerKV | None,
        out: Sequence[Tensor] = (),
    ) -> Sequence[Tensor]:
        return self._project(number, x, Turns(positions, self.tables), kv, out, None)

    def _project(
        self,
        number: int,
        x: Tensor,
        turns: Turns,
        kv: LayerKV | None,
        out: Sequence[Tensor],
        lora: LoraRows | None,
    ) -> Sequence[Tensor]:
        layer = self._layers[number]
        if layer.qkv is None:
            return ()
        columns = _with_adapters(layer.qkv(x), x, number, "qkv", lora)
        if not layer.attends:
            return (out[0].copy_(columns),) if out else (columns,)
        assert kv is not None
        size = (self._shape.num_heads + 2 * self._shape.num_kv_heads) * self._shape.head_dim
        if size == layer.num_columns:
            return (self._turn_and_store(layer, columns, turns, kv, *out),)
        rest = columns[:, size:]
        if out:
            rest = out[1].copy_(rest)
        queries = out[0] if out else None
        return self._turn_and_store(layer, columns[:, :size], turns, kv, queries), rest

    def _turn_and_store(
        self,
        layer: DeviceLayer,
        qkv: Tensor,
        turns: Turns,
        kv: LayerKV,
        out: Tensor | None = None,
    ) -> Tensor:
        shape, qk_norm = self._shape, layer.qk_norm
        if qk_norm is not None and shape.has_whole_qk_norm:
            q, k = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
            weights = qk_norm.flatten()
            for part, weight in ((qkv[:, :q], weights[:q]), (qkv[:, q : q + k], weights[q:])):
                rms_norm(part, weight, shape.eps, part)
            qk_norm = None
        return rope_and_store(
            qkv,
            turns.positions,
            kv.slot_mapping,
            None if layer.rotary is None else turns.tables[layer.rotary],
            kv.k_slots,
            kv.v_slots,
            shape.num_heads,
            shape.num_kv_heads,
            qk_norm,
            shape.eps,
            out,
            is_centered=shape.norm_type == "layer",
            scales_last=kv.scales_last,
        )

    def mix(
        self,
        number: int,
        projected: Sequence[Tensor],
        batch: ForwardBatch,
        backend: AttentionBackend,
    ) -> Tensor:
        layer, kv_layer = self._layers[number], self._kv_layers[number]
        if not projected:
            return batch.input_ids.new_empty((batch.num_tokens, 0), dtype=self.info.dtype)
        if kv_layer is None:
            return self._run_state(number, projected[0], batch)
        scale, features = self._shape.attention_scale, layer.features
        attended = backend.attend(projected[0], kv_layer, scale, features).flatten(1)
        if layer.has_gate:
            return sigmoid_gate(attended, projected[1])
        if layer.has_state:
            return torch.cat((attended, self._run_state(number, projected[1], batch)), 1)
        return attended

    def _run_state(self, number: int, columns: Tensor, batch: ForwardBatch) -> Tensor:
        layer, states = self._layers[number], batch.recurrent
        assert states is not None, "the step has no states"
        assert states.ids is not None, "the step's states are not for a device"
        first = self._first_states[number]
        if layer.short_conv is not None:
            return short_conv(layer.short_conv, columns, states.ids, states.states[first])
        assert layer.recurrence is not None
        inputs, matrices = states.states[first : first + 2]
        return recurrence(layer.recurrence, columns, states.ids, inputs, matrices, self._shape.eps)

    def finish_layer(self, number: int, mixed: Tensor, x: Tensor, residual: Tensor) -> Tensor:
        return self._finish_layer(number, mixed, x, residual, None)

    def _finish_layer(
        self,
        number: int,
        mixed: Tensor,
        x: Tensor,
        residual: Tensor,
        lora: LoraRows | None,
    ) -> Tensor:
        layer = self._layers[number]
        is_last = number == len(self._layers) - 1
        next_norm = self._norm if is_last else self._layers[number + 1].pre_attention_norm
        if layer.mlp is None:
            out = self._sum_over_ranks(self._mixed_out(number, mixed, lora))
            return self._add(out, residual, layer.post_attention_norm, next_norm)
        if self._shape.has_parallel_residual:
            out = self._sum_over_ranks(
                self._mixed_out(number, mixed, lora) + self._mlp(number, x, lora)
            )
            return self._add(out, residual, layer.post_mlp_norm, next_norm)
        if layer.o is not None:
            out = self._sum_over_ranks(self._mixed_out(number, mixed, lora))
            x = self._add(out, residual, layer.post_attention_norm, layer.pre_mlp_norm)
        out = self._sum_over_ranks(self._mlp(number, x, lora))
        return self._add(out, residual, layer.post_mlp_norm, next_norm)

    def _mixed_out(self, number: int, mixed: Tensor, lora: LoraRows | None) -> Tensor:
        layer = self._layers[number]
        assert layer.o is not None
        shape, net = self._shape, layer.recurrence
        own = 1.0 if net is None or isinstance(net, DeltaNet) else net.out_scale
        if layer.beside is None:
            out = _with_adapters(layer.o(mixed), mixed, number, "o", lora)
            return _scaled(out, shape.attention_out_scale if layer.attends else own)
        size = shape.num_heads * shape.head_dim
        attended = _scaled(layer.o(mixed[:, :size]), shape.attention_out_scale)
        return attended.add_(_scaled(layer.beside(mixed[:, size:]), own))

    def finish(
        self,
        mixed: Tensor,
        x: Tensor,
        residual: Tensor,
        logits_indices: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        return self._finish(mixed, x, residual, logits_indices, out, None)

    def _finish(
        self,
        mixed: Tensor,
        x: Tensor,
        residual: Tensor,
        logits_indices: Tensor,
        out: Tensor | None,
        lora: LoraRows | None,
    ) -> Tensor:
        if not len(logits_indices):
            return x.new_empty((0, self._shape.vocab_size), dtype=torch.float32)
        if len(logits_indices) < len(mixed):  # from here on every token is on its own
            mixed = mixed.index_select(0, logits_indices)
            residual = residual.index_select(0, logits_indices)
            if self._shape.has_parallel_residual or self._layers[-1].o is None:  # it is read
                x = x.index_select(0, logits_indices)
        last = len(self._layers) - 1
        return self._logits(self._finish_layer(last, mixed, x, residual, lora), out)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """A norm, or x itself."""
        if weight is None:
            return x
        return rms_norm(x, weight, self._shape.eps, is_centered=self._shape.norm_type == "layer")

    def _add(
        self, x: Tensor, residual: Tensor, post_norm: Tensor | None, next_norm: Tensor | None
    ) -> Tensor:
        """Adds x [T, H], normed by post_norm and scaled, to the residual in place; returns the next
        product's input."""
        x = self._normed(x, post_norm)
        if self._shape.residual_scale != 1:
            x = x * self._shape.residual_scale
        if next_norm is None:
            return residual.add_(x)
        is_centered = self._shape.norm_type == "layer"
        return add_rms_norm(x, residual, next_norm, self._shape.eps, x, is_centered=is_centered)[0]

    def _mlp(self, number: int, x: Tensor, lora: LoraRows | None) -> Tensor:
        mlp = self._layers[number].mlp
        assert mlp is not None
        if isinstance(mlp, GroupedExperts):
            return mlp(x)
        shape, inner = self._shape, _with_adapters(mlp.gate_up(x), x, number, "gate_up", lora)
        if not shape.has_gated_mlp:
            return mlp.down(squared_relu(inner))
        if shape.gate_scale != 1:
            inner[:, : inner.shape[1] // 2].mul_(shape.gate_scale)
        inner = act_and_mul(inner, shape.activation)
        out = _with_adapters(mlp.down(inner), inner, number, "down", lora)
        return _scaled(out, shape.mlp_out_scale)

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        return x if self._group is None else self._group.all_reduce(x)

    def _logits(self, x: Tensor, out: Tensor | None) -> Tensor:
        """[S, V] float32, in every rank."""
        logits = self._lm_head(x)
        if self._group is not None:
            logits = self._group.gather_columns(logits)[:, : self._shape.vocab_size]
        logits = logits.float() if out is None else out.copy_(logits)
        if self._shape.logit_scale != 1:
            logits.mul_(self._shape.logit_scale)
        if cap := self._shape.logit_soft_cap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits


def _with_adapters(
    out: Tensor, x: Tensor, number: int, product: str, lora: LoraRows | None
) -> Tensor:
    """What a layer's weight gives for x [T, K], out [T, N], with what adapters add to it."""
    return out if lora is None else add_lora(x, lora, entry_of(number, product), out)


def _add_given(residual: Tensor, given: GivenRows, feature: int) -> None:
    """In place."""
    places = torch.from_numpy(given.places).to(residual.device)
    residual.index_add_(0, places, given.embeddings[:, feature].to(residual))


def _scaled(x: Tensor, factor: float) -> Tensor:
    """In place."""
    return x if factor == 1 else x.mul_(factor)


def _numbered(flags: Sequence[bool]) -> list[int | None]:
    """The number of each set flag among those that are set; None of the others."""
    return [sum(flags[:place]) if flag else None for place, flag in enumerate(flags)]


def _first_states(shapes: Sequence[StateShape]) -> dict[int, int]:
    """Of each layer that has states, the place of its first among `ModelInfo.states`."""
    places: dict[int, int] = {}
    for place, shape in enumerate(shapes):
        places.setdefault(shape.layer, place)
    return places


def load_decoder(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    group: TPGroup | None = None,
    num_positions: int | None = None,
    *,
    is_exact: bool = False,
    compiles: bool = True,
) -> Decoder:
    """Read a model of a native family; of several ranks, this one's part of it.

    is_exact, compiles: see `Linear`.

    `num_positions`: so many are needed; by default all that the model has, as far as a table of
    TABLE_BYTES goes. Raises ModelNotSupported for what `check_decoder` refuses, InvalidRequest
    where the model cannot be split over so many ranks.
    """
    check_decoder(source.config)
    if group is not None and group.size == 1:
        group = None
    if parts := compiled_parts(decoder_shape(source.config), has_ranks=group is not None):
        where = "the cpu attention backend" + ("" if group is None else ", in one process")
        raise ModelNotSupported(f"{parts} run natively on {where} only")
    if group is None:
        pack = partial(pack_layer, linear=partial(Linear, is_exact=is_exact, compiles=compiles))
        tensors = read_decoder(source, dtype, device, pack)
    else:
        tensors = _read_part(source, dtype, device, group.rank, group.size)
    tensors = _with_positions(tensors, num_positions)
    longest = tensors.info.max_positions
    num_rows = min(num_positions or longest, longest)
    tables = tuple(rotary.cos_sin(num_rows) for rotary in tensors.rotaries)
    return Decoder(tensors, tables, group, is_exact=is_exact, compiles=compiles)


def describe_part(source: ModelSource, dtype: torch.dtype, num_ranks: int) -> ModelInfo:
    """The info of the first rank's part of a model, as `describe` has that of the whole.

    Raises ModelNotSupported for other families, InvalidRequest where the model cannot be split over
    so many ranks.
    """
    shapes = replace(source, path=None, gguf=None)
    return _read_part(shapes, dtype, torch.device("meta"), 0, num_ranks).info


def _read_part(
    source: ModelSource, dtype: torch.dtype, device: torch.device, rank: int, size: int
) -> DecoderTensors:
    """A rank's part of every tensor, and the info of that part."""
    whole = decoder_shape(source.config)
    check_split(whole, size)
    num_parameters = 0

    def make_layer(layer: LayerTensors) -> DeviceLayer:
        nonlocal num_parameters
        part = shard_layer(layer, whole, rank, size)
        held = [tensor for both in part.projections for tensor in both if tensor is not None]
        norms = [norm for norm in part.norms.values() if norm is not None]
        num_parameters += sum(x.shape.numel() for x in (*norms, *held))
        return pack_layer(part)

    read = read_decoder(source, dtype, device, make_layer)
    lm_head = shard_head(dense(read.lm_head), rank, size)
    num_parameters += sum(x.shape.numel() for x in (read.embedding, read.norm, lm_head))
    shape = shard_shape(whole, size)
    info = replace(
        read.info,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        num_parameters=num_parameters,
    )
    return replace(read, info=info, shape=shape, lm_head=lm_head)


def _with_positions(tensors: DecoderTensors, num_positions: int | None) -> DecoderTensors:
    """Without positions that the table of rotations will not have."""
    if not tensors.rotaries:
        return tensors
    allowed = TABLE_BYTES // (4 * tensors.shape.head_dim * len(tensors.rotaries))
    if num_positions is not None or tensors.info.max_positions <= allowed:
        return tensors
    logger.warning(
        "sequences are limited to %d of the model's %d positions, as many rotations as fit %d MiB; "
        "set max_seq_len for more",
        allowed,
        tensors.info.max_positions,
        TABLE_BYTES >> 20,
    )
    return replace(tensors, info=replace(tensors.info, max_positions=allowed))
