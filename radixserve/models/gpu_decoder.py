"""The native decoder on device kernels: what the CUDA path runs, whole or as one of several ranks.

The same models and the same arithmetic as decoder.py, as few kernels as they can be had in. Nothing
in `forward` waits for the device, depends on the values of a tensor, or has a shape that does, so
that a CUDA graph can record it. On CPU tensors the kernels' torch twins run.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch
from radixserve.models.base import LanguageModel, ModelInfo
from radixserve.models.decoder import (
    DecoderTensors,
    LayerTensors,
    WeightAndBias,
    check_decoder,
    decoder_shape,
    read_decoder,
    sampled_rows,
    stacked,
)
from radixserve.models.parallel import TPGroup, check_split, shard_head, shard_layer, shard_shape
from radixserve.models.source import ModelSource
from radixserve_kernels.gpu_ops import add_rms_norm, rms_norm, rope_and_store, silu_and_mul

logger = logging.getLogger("radixserve")

TABLE_BYTES = 256 << 20  # of rotations, unless more positions are asked for


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """One layer's weights and biases, contiguous; sizes are the rank's, see `LayerTensors`."""

    input_norm: Tensor  # [H]
    qkv: WeightAndBias  # H -> Q + 2 KV
    qk_norm: Tensor | None  # [Hq + Hkv, D]
    o: WeightAndBias  # Q -> H
    post_norm: Tensor  # [H]
    gate_up: WeightAndBias  # H -> 2 M
    down: WeightAndBias  # M -> H


class GpuDecoder(LanguageModel):
    """See `LanguageModel`. Made by `load_gpu_decoder`. Of several ranks `info` is the rank's own.

    The backend needs `kv`, a pool of as many key/value heads as `info` has, and `attend`.
    """

    can_capture = True  # by a CUDA graph

    def __init__(
        self,
        read: DecoderTensors,  # info, shape and layers (GpuLayer) of the rank
        cos_sin: Tensor,  # [max positions, D] float32
        lm_head: Tensor,  # [V, H], or the rank's part of it
        ranks: TPGroup | None,
    ) -> None:
        self.info: ModelInfo = read.info
        self._shape, self._ranks = read.shape, ranks
        self._embedding, self._norm, self._lm_head = read.embedding, read.norm, lm_head
        self._layers: tuple[GpuLayer, ...] = read.layers
        self._cos_sin = cos_sin

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
                x, residual = sampled_rows(x, batch), sampled_rows(residual, batch)
            x = self._summed(F.linear(x, *layer.o))
            x, residual = add_rms_norm(x, residual, layer.post_norm, eps, x)
            x = silu_and_mul(F.linear(x, *layer.gate_up))
            x = self._summed(F.linear(x, *layer.down))
            norm = self._norm if number == last else self._layers[number + 1].input_norm
            x, residual = add_rms_norm(x, residual, norm, eps, x)
        return self._logits(x)

    def _attend(
        self,
        layer: GpuLayer,
        x: Tensor,  # [T, H]
        batch: ForwardBatch,
        backend: AttentionBackend,
        number: int,
        slots: Tensor,  # [2, num_slots, Hkv, D]
    ) -> Tensor:
        q = rope_and_store(
            F.linear(x, *layer.qkv),
            batch.positions,
            batch.slot_mapping,
            self._cos_sin,
            slots[0],
            slots[1],
            self._shape.num_heads,
            self._shape.num_kv_heads,
            layer.qk_norm,
            self._shape.eps,
        )
        return backend.attend(q, number).flatten(1)

    def _summed(self, x: Tensor) -> Tensor:
        """Over the ranks."""
        return x if self._ranks is None else self._ranks.all_reduce(x)

    def _logits(self, x: Tensor) -> Tensor:
        """[S, V] float32, in every rank."""
        logits = F.linear(x, self._lm_head)
        if self._ranks is not None:
            logits = self._ranks.gather_columns(logits)[:, : self._shape.vocab_size]
        return logits.float()


def load_gpu_decoder(
    source: ModelSource,
    dtype: torch.dtype,
    device: torch.device,
    ranks: TPGroup | None = None,
    num_positions: int | None = None,
) -> GpuDecoder:
    """Read a model that decoder.py can read; of several ranks, this one's part of it.

    `num_positions`: so many are needed; by default all that the model has, as far as a table of
    TABLE_BYTES goes. Raises InvalidRequest where it cannot be split over so many ranks.
    """
    check_decoder(source.config)
    whole = decoder_shape(source.config)
    if ranks is not None and ranks.size == 1:
        ranks = None
    if ranks is None:
        read = read_decoder(source, dtype, device, _gpu_layer)
        lm_head = read.lm_head
    else:
        rank, size = ranks.rank, ranks.size
        check_split(whole, size)
        read = read_decoder(
            source, dtype, device, lambda layer: _gpu_layer(shard_layer(layer, whole, rank, size))
        )
        lm_head = shard_head(read.lm_head, rank, size)
        read = _of_rank(read, size, lm_head)
    read = _with_positions(read, num_positions)
    longest = read.info.max_positions
    cos_sin = read.rotary.cos_sin(min(num_positions or longest, longest))
    return GpuDecoder(read, cos_sin, lm_head, ranks)


def _gpu_layer(tensors: LayerTensors) -> GpuLayer:
    return GpuLayer(
        input_norm=tensors.input_norm,
        qkv=tensors.qkv,
        qk_norm=tensors.qk_norm,
        o=tensors.o,
        post_norm=tensors.post_norm,
        gate_up=stacked(tensors.gate, tensors.up),
        down=tensors.down,
    )


def _of_rank(read: DecoderTensors, size: int, lm_head: Tensor) -> DecoderTensors:
    """What was read, described as the part that a rank has."""
    shape = shard_shape(read.shape, size)
    held = [read.embedding, read.norm, lm_head]
    for layer in read.layers:
        held += [layer.input_norm, layer.post_norm]
        for weight, bias in (layer.qkv, layer.o, layer.gate_up, layer.down):
            held += [weight] if bias is None else [weight, bias]
    info = replace(
        read.info,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        num_parameters=sum(tensor.numel() for tensor in held),
    )
    return replace(read, info=info, shape=shape)


def _with_positions(read: DecoderTensors, num_positions: int | None) -> DecoderTensors:
    """Without positions that the table of rotations will not have."""
    allowed = TABLE_BYTES // (4 * read.shape.head_dim)
    if num_positions is not None or read.info.max_positions <= allowed:
        return read
    logger.warning(
        "sequences are limited to %d of the model's %d positions, as many rotations as fit %d MiB; "
        "set max_seq_len for more",
        allowed,
        read.info.max_positions,
        TABLE_BYTES >> 20,
    )
    return replace(read, info=replace(read.info, max_positions=allowed))
