"""The native decoder on any device and attention backend, whole or as one of several ranks.

As few kernels as it can be had in; on CPU tensors their torch references run. Nothing in `forward`
waits for the device, depends on the values of a tensor, or has a shape that does, so that a CUDA
graph can capture it. Which tokens belong together is the batch's and the backend's business.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch
from radixserve.models.base import LanguageModel, ModelInfo
from radixserve.models.decoder_tensors import (
    DecoderTensors,
    LayerTensors,
    WeightAndBias,
    check_decoder,
    decoder_shape,
    read_decoder,
)
from radixserve.models.parallel import TPGroup, check_split, shard_head, shard_layer, shard_shape
from radixserve.models.source import ModelSource
from radixserve_kernels.decoder_layer import DecoderLayer
from radixserve_kernels.gpu_ops import add_rms_norm, rms_norm, rope_and_store, silu_and_mul
from radixserve_kernels.linear import Linear

logger = logging.getLogger("radixserve")

TABLE_BYTES = 256 << 20  # of rotations, unless more positions are asked for


class Decoder(LanguageModel):
    """See `LanguageModel`. Made by `load_decoder`. One of several ranks has an `info` of its own.

    It stores K and V in the backend's pool, of as many key/value heads as `info` has, and calls
    `attend`.
    """

    can_capture = True

    def __init__(
        self,
        tensors: DecoderTensors,  # the rank's; layers are DecoderLayer[Linear]
        cos_sin: Tensor,  # [max positions, D] float32
        group: TPGroup | None,
    ) -> None:
        self.info: ModelInfo = tensors.info
        self._shape, self._group = tensors.shape, group
        self._embedding, self._norm = tensors.embedding, tensors.norm
        self._lm_head = Linear(tensors.lm_head)  # H -> V, or the rank's part of V
        self._layers: tuple[DecoderLayer[Linear], ...] = tensors.layers
        self.cos_sin = cos_sin

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        eps, last = self._shape.eps, len(self._layers) - 1
        slots = backend.kv.flatten(2, 3)  # [L, 2, num_slots, Hkv, D]
        residual = F.embedding(batch.input_ids, self._embedding)  # [T, H]
        x = rms_norm(residual, self._layers[0].input_norm, eps)
        for number, layer in enumerate(self._layers):
            x = self._attend(layer, x, batch, backend, number, slots[number])  # [T, Hq * D]
            if number == last:  # from here on every token is on its own
                if not len(batch.logits_indices):
                    return x.new_empty((0, self._shape.vocab_size), dtype=torch.float32)
                x, residual = _sampled_rows(x, batch), _sampled_rows(residual, batch)
            x = self._sum_over_ranks(layer.o(x))
            x, residual = add_rms_norm(x, residual, layer.post_norm, eps, x)
            x = silu_and_mul(layer.gate_up(x))
            x = self._sum_over_ranks(layer.down(x))
            norm = self._norm if number == last else self._layers[number + 1].input_norm
            x, residual = add_rms_norm(x, residual, norm, eps, x)
        return self._logits(x)

    def _attend(
        self,
        layer: DecoderLayer[Linear],
        x: Tensor,  # [T, H]
        batch: ForwardBatch,
        backend: AttentionBackend,
        number: int,
        slots: Tensor,  # [2, num_slots, Hkv, D]
    ) -> Tensor:
        q = rope_and_store(
            layer.qkv(x),
            batch.positions,
            batch.slot_mapping,
            self.cos_sin,
            slots[0],
            slots[1],
            self._shape.num_heads,
            self._shape.num_kv_heads,
            layer.qk_norm,
            self._shape.eps,
        )
        return backend.attend(q, number).flatten(1)

    def _sum_over_ranks(self, x: Tensor) -> Tensor:
        return x if self._group is None else self._group.all_reduce(x)

    def _logits(self, x: Tensor) -> Tensor:
        """[S, V] float32, in every rank."""
        logits = self._lm_head(x)
        if self._group is not None:
            logits = self._group.gather_columns(logits)[:, : self._shape.vocab_size]
        return logits.float()


def load_decoder(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    group: TPGroup | None = None,
    num_positions: int | None = None,
) -> Decoder:
    """Read a model of a native family; of several ranks, this one's part of it.

    `num_positions`: so many are needed; by default all that the model has, as far as a table of
    TABLE_BYTES goes. Raises ModelNotSupported for what `check_decoder` refuses, InvalidRequest
    where the model cannot be split over so many ranks.
    """
    check_decoder(source.config)
    if group is not None and group.size == 1:
        group = None
    if group is None:
        tensors = read_decoder(source, dtype, device, _pack_layer)
    else:
        tensors = _read_part(source, dtype, device, group)
    tensors = _with_positions(tensors, num_positions)
    longest = tensors.info.max_positions
    cos_sin = tensors.rotary.cos_sin(min(num_positions or longest, longest))
    return Decoder(tensors, cos_sin, group)


def _pack_layer(tensors: LayerTensors) -> DecoderLayer[Linear]:
    return DecoderLayer(
        input_norm=tensors.input_norm,
        qkv=Linear(*tensors.qkv),
        qk_norm=tensors.qk_norm,
        o=Linear(*tensors.o),
        post_norm=tensors.post_norm,
        gate_up=Linear(*_stacked(tensors.gate, tensors.up)),
        down=Linear(*tensors.down),
    )


def _stacked(first: WeightAndBias, second: WeightAndBias) -> WeightAndBias:
    """One projection that gives the features of both, concatenated; bias both or neither."""
    bias = None
    if first[1] is not None and second[1] is not None:
        bias = torch.cat((first[1], second[1]))
    return torch.cat((first[0], second[0])), bias


def _read_part(
    source: ModelSource, dtype: torch.dtype, device: torch.device, group: TPGroup
) -> DecoderTensors:
    """A rank's part of every tensor, and the info of that part."""
    whole = decoder_shape(source.config)
    check_split(whole, group.size)
    num_parameters = 0

    def make_layer(layer: LayerTensors) -> DecoderLayer[Linear]:
        nonlocal num_parameters
        part = shard_layer(layer, whole, group.rank, group.size)
        held = [tensor for both in part.projections for tensor in both if tensor is not None]
        num_parameters += sum(x.numel() for x in (part.input_norm, part.post_norm, *held))
        return _pack_layer(part)

    read = read_decoder(source, dtype, device, make_layer)
    lm_head = shard_head(read.lm_head, group.rank, group.size)
    num_parameters += sum(x.numel() for x in (read.embedding, read.norm, lm_head))
    shape = shard_shape(whole, group.size)
    info = replace(
        read.info,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        num_parameters=num_parameters,
    )
    return replace(read, info=info, shape=shape, lm_head=lm_head)


def _with_positions(tensors: DecoderTensors, num_positions: int | None) -> DecoderTensors:
    """Without positions that the table of rotations will not have."""
    allowed = TABLE_BYTES // (4 * tensors.shape.head_dim)
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


def _sampled_rows(x: Tensor, batch: ForwardBatch) -> Tensor:
    """The rows of x [T, n] after which a token is drawn: [S, n]."""
    rows = batch.logits_indices
    return x if len(rows) == len(x) else x.index_select(0, rows)
