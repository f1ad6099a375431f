"""The native decoder on compiled CPU kernels: a step is one call, from token ids to logits.

The same checkpoints and the same arithmetic as decoder.py; the call stores and attends
itself, by the attention backend's `compiled_step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch, GivenRows, RecurrentRows
from radixserve.models.base import LanguageModel, ModelInfo
from radixserve.models.decoder_tensors import (
    DecoderTensors,
    LayerTensors,
    check_tensors,
    read_decoder,
)
from radixserve.models.in_place import copy_weights
from radixserve.models.lora import LoraModule, lora_layers
from radixserve.models.mlp_tensors import ExpertTensors, MlpTensors, WeightAndBias
from radixserve.models.source import ModelSource
from radixserve_kernels.cpu_decoder import CompiledRows, FusedDecoder
from radixserve_kernels.cpu_experts import PackedExperts
from radixserve_kernels.cpu_lora import PackedLora, padded_rows
from radixserve_kernels.cpu_recurrent import CompiledStates, PackedRecurrence, PackedShortConv
from radixserve_kernels.cpu_weights import PackedWeight, interleave, interleave_weights
from radixserve_kernels.decoder_layer import (
    DecoderLayer,
    ExpertsBeside,
    LayerInput,
    LayerInputs,
    Mlp,
)
from radixserve_kernels.quantized import AnyWeight


class CpuDecoder(LanguageModel):
    """See `LanguageModel`. Made by `load_cpu_decoder`."""

    is_compiled = True
    no_pictures = ""

    def __init__(self, read: DecoderTensors, activation_bits: int = 16) -> None:
        self.info: ModelInfo = read.info
        if activation_bits == 16:
            _round_finely(read)
        parts = (read.shape, read.layers, read.embedding, read.norm, read.lm_head)
        self._decoder = FusedDecoder(*parts, read.info.dtype, read.layer_inputs)
        self._read, self._shape, self._rotaries = read, read.shape, read.rotaries
        self._rotations: list[Tensor] = []  # of each rotary, of the positions seen so far
        self._num_positions = 0  # that all of them have

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """`backend` has a `compiled_step`: it is the cpu backend."""
        attention = backend.compiled_step()
        assert attention is not None, f"not on the {backend.name} backend"
        end, window = max(batch.host.seq_lens.tolist()), batch.window
        if end > self._num_positions:
            self._rotations = [table.up_to(end) for table in self._rotaries]
            self._num_positions = min(map(len, self._rotations), default=end)
        positions, rotations = batch.positions, self._rotations
        if batch.given is not None and (pairs := batch.given.rope_positions) is not None:
            places = torch.from_numpy(pairs)[:, None]
            positions = torch.arange(len(pairs))
            rotations = [table.gather(0, places) for table in rotations]
        return self._decoder.run(
            input_ids=batch.input_ids,
            positions=positions,
            slots=batch.slot_mapping,
            sampled=batch.logits_indices,
            rotations=rotations,
            attention=attention,
            window_slots=None if window is None else window.slot_mapping,
            window_page_ids=None if window is None else window.kv_indices,
            states=None if batch.recurrent is None else compiled_states(batch.recurrent),
            adapters=batch.adapters,
            given=None if batch.given is None else _given_rows(batch.given, len(batch.input_ids)),
        )

    def read_again(self, source: ModelSource) -> bool:
        """See `LanguageModel.read_again`. Only dense weights: a number that cannot be quantised is
        found as it is read."""
        read, dtype = self._read, self.info.dtype
        if self.info.weight_forms or read.shape.family.has_layer_scale:
            return False
        for tensor in (source.given or {}).values():
            if tensor.dtype == torch.float16 != dtype or tensor.element_size() < 2:
                return False
        check_tensors(source, dtype)
        layers = iter(read.layers)

        def take_layer(tensors: LayerTensors) -> None:
            copy_weights(next(layers), _pack_layer(tensors))

        def take_ends(*ends: AnyWeight) -> tuple[None, None]:
            copy_weights((read.embedding, read.lm_head), _pack_ends(dtype, *ends))
            return None, None

        source = replace(source, copies_given=False)  # into the old ones is a copy
        new = read_decoder(source, dtype, torch.device("cpu"), take_layer, None, take_ends)
        copy_weights(read.norm, new.norm)
        if read.layer_inputs is not None and new.layer_inputs is not None:
            copy_weights(read.layer_inputs, _pack_inputs(dtype, new.layer_inputs))
        return True

    def pack_adapter(self, modules: Mapping[str, LoraModule]) -> PackedLora:
        layers = lora_layers(self._shape, modules)
        for number, products in enumerate(layers):
            if "qkv" in products:
                product = products["qkv"]
                columns = self._read.layers[number].qkv.columns_by_form
                products["qkv"] = product._replace(b=padded_rows(product.b, columns))
            if "gate_up" in products:
                product, inner = products["gate_up"], self._shape.intermediate_sizes[number]
                b = interleave(product.b[:inner], product.b[inner:])
                products["gate_up"] = product._replace(b=b)
        return PackedLora(layers, self.info.dtype)


def _round_finely(read: DecoderTensors) -> None:
    """Choose the weights whose activations are rounded to 16 bits with `activation_bits=16`: the
    head, attention's projections, and the MLPs of the first and last layer. docs/quantization.md
    has what that buys."""
    read.lm_head.round_finely()
    for layer in read.layers:
        layer.qkv.round_finely()
        layer.o.round_finely()
        if layer.beside is not None:
            layer.beside.round_finely()
        if layer.own_input is not None:
            layer.own_input.gate.round_finely()
            layer.own_input.up.round_finely()
    for layer in (read.layers[0], read.layers[-1]):
        if isinstance(layer.mlp, Mlp):
            layer.mlp.gate_up.round_finely()
            layer.mlp.down.round_finely()


def _given_rows(given: GivenRows, num_tokens: int) -> CompiledRows:
    """The given embeddings as the compiled decoder takes them."""
    rows = np.full(num_tokens, -1, np.int64)
    rows[given.places] = np.arange(len(given.places))
    return CompiledRows(rows, given.embeddings.float().contiguous())


def compiled_states(recurrent: RecurrentRows) -> CompiledStates:
    """The states of a step as the compiled decoder takes them."""
    rows: list[tuple[int, int, int, int]] = []
    pieces: list[tuple[int, int, int]] = []
    if recurrent.tokens is not None:
        tokens = {
            name: [] if ids is None else ids.tolist()
            for name, ids in recurrent.tokens._asdict().items()
        }
        before = tokens["state_ids"]
        after, new_rows = tokens["written_ids"] or before, set(tokens["new_rows"])
        kept = dict(zip(tokens["kept_rows"], tokens["kept_in"], strict=True))
        for number, place in enumerate(tokens["places"] or range(len(before))):
            first = -1 if number in new_rows else before[number]
            rows.append((first, after[number], len(pieces), len(pieces) + 1))
            pieces.append((place, place + 1, kept.get(number, -1)))
    for row in recurrent.rows:
        first = -1 if row.is_new else row.state_id
        rows.append((first, row.state_id, len(pieces), len(pieces) + len(row.pieces)))
        pieces += [(piece.start, piece.end, piece.kept_in) for piece in row.pieces]
    return CompiledStates(recurrent.states, np.array(rows, np.int64), np.array(pieces, np.int64))


def load_cpu_decoder(
    source: ModelSource,
    dtype: torch.dtype,
    weight_dtype: str | None = "auto",
    activation_bits: int = 16,
) -> CpuDecoder:
    """Read a model of a native family.

    weight_dtype: "auto" (matrices stay in the 8 or 4 bits that they are stored in), "int8", or None
    to widen all to dtype. activation_bits: see `EngineConfig`.
    """
    ends = partial(_pack_ends, dtype)
    cpu = torch.device("cpu")
    read = read_decoder(source, dtype, cpu, _pack_layer, weight_dtype, ends)
    read = replace(read, norm=read.norm.contiguous())
    if read.layer_inputs is not None:
        read = replace(read, layer_inputs=_pack_inputs(dtype, read.layer_inputs))
    return CpuDecoder(read, activation_bits)


def _pack_inputs(
    dtype: torch.dtype, inputs: LayerInputs[Any, Any]
) -> LayerInputs[PackedWeight, PackedWeight | Tensor]:
    rows, _ = _pack_ends(dtype, inputs.rows, inputs.projection[0])
    return replace(inputs, rows=rows, projection=PackedWeight(*inputs.projection))


def _pack_ends(
    dtype: torch.dtype, embedding: AnyWeight, lm_head: AnyWeight
) -> tuple[PackedWeight | Tensor, PackedWeight]:
    """Rows of another form than the dtype's are read from panels, those of the head if tied."""
    head = PackedWeight(lm_head)
    if isinstance(embedding, Tensor) and embedding.dtype == dtype:
        return embedding.contiguous(), head
    return head if lm_head is embedding else PackedWeight(embedding), head


def _pack_layer(tensors: LayerTensors) -> DecoderLayer[PackedWeight, PackedExperts]:
    norms = {
        name: None if norm is None else norm.contiguous() for name, norm in tensors.norms.items()
    }
    mlp, net, beside = tensors.mlp, tensors.recurrence, tensors.beside
    attention = tensors.q, tensors.k, tensors.v
    present = [both for both in attention if both[0].shape[0]]
    first = 0 if beside is None else sum(weight.shape[0] for weight, _ in attention)
    return DecoderLayer(
        **norms,
        qkv=PackedWeight.of_parts((*(present or attention), *tensors.more)),
        o=PackedWeight(*tensors.o),
        mlp=_pack_experts(mlp) if isinstance(mlp, ExpertTensors) else _pack_mlp(mlp),
        features=tensors.features,
        rotary=tensors.rotary,
        has_gate=bool(tensors.more) and net is None,
        recurrence=None if net is None else PackedRecurrence(net, first),
        beside=None if beside is None else PackedWeight(*beside),
        short_conv=None if tensors.short_conv is None else PackedShortConv(tensors.short_conv),
        num_kv_heads=tensors.num_kv_heads,
        head_dim=tensors.head_dim,
        kv_source=tensors.kv_source,
        has_v_norm=tensors.has_v_norm,
        experts_beside=_pack_beside(tensors.experts_beside),
        own_input=_pack_own_input(tensors.own_input),
        scale=tensors.scale,
    )


def _pack_beside(
    beside: ExpertsBeside[ExpertTensors] | None,
) -> ExpertsBeside[PackedExperts] | None:
    if beside is None:
        return None
    return ExpertsBeside(
        _pack_experts(beside.experts),
        *(beside.router_norm.contiguous(), beside.pre_norm.contiguous()),
        *(beside.post_mlp_norm.contiguous(), beside.post_norm.contiguous()),
    )


def _pack_own_input(own: LayerInput[WeightAndBias] | None) -> LayerInput[PackedWeight] | None:
    if own is None:
        return None
    return LayerInput(PackedWeight(*own.gate), PackedWeight(*own.up), own.norm.contiguous())


def _pack_mlp(mlp: MlpTensors) -> Mlp[PackedWeight]:
    gate_up = PackedWeight(*mlp.up) if mlp.gate is None else _interleaved(mlp.gate, mlp.up)
    return Mlp(gate_up, PackedWeight(*mlp.down))


def _pack_experts(mlp: ExpertTensors) -> PackedExperts:
    experts = [_pack_mlp(expert) for expert in mlp.experts]
    gate_up, down = [expert.gate_up for expert in experts], [expert.down for expert in experts]
    router = PackedWeight(*mlp.router)
    biases = mlp.choice_bias, mlp.expert_scale
    return PackedExperts(router, gate_up, down, mlp.routing, *biases)


def _interleaved(gate: WeightAndBias, up: WeightAndBias) -> PackedWeight:
    bias = None
    if gate[1] is not None and up[1] is not None:
        bias = interleave(gate[1], up[1])
    return PackedWeight(interleave_weights(gate[0], up[0]), bias)
