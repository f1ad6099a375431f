"""The native decoder on compiled CPU kernels: a step is one call, from token ids to logits.

The same checkpoints and the same arithmetic as decoder.py; attention is part of the call, which
takes the `cpu` backend's plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch
from radixserve.attention.cpu import CpuBackend
from radixserve.models.base import LanguageModel, ModelInfo
from radixserve.models.decoder_tensors import (
    DecoderTensors,
    LayerTensors,
    WeightAndBias,
    read_decoder,
)
from radixserve.models.source import ModelSource
from radixserve_kernels.cpu_decoder import FusedDecoder
from radixserve_kernels.cpu_weights import PackedWeight, interleave
from radixserve_kernels.decoder_layer import DecoderLayer


class CpuDecoder(LanguageModel):
    """See `LanguageModel`. Made by `load_cpu_decoder`."""

    def __init__(self, read: DecoderTensors) -> None:
        self.info: ModelInfo = read.info
        embedding, norm = read.embedding.contiguous(), read.norm.contiguous()
        head = PackedWeight(read.lm_head)
        self._decoder = FusedDecoder(read.shape, read.layers, embedding, norm, head)
        self._rotary = read.rotary

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """`backend` is a planned CpuBackend."""
        assert isinstance(backend, CpuBackend), f"not on the {backend.name} backend"
        return self._decoder.run(
            input_ids=batch.input_ids,
            positions=batch.positions,
            slots=batch.slot_mapping,
            sampled=batch.logits_indices,
            rotations=self._rotary.up_to(int(batch.host.seq_lens.max())),
            plan=backend.planned,
            kv=backend.kv,
        )


def load_cpu_decoder(source: ModelSource, dtype: torch.dtype) -> CpuDecoder:
    """Read a model of a native family."""
    return CpuDecoder(read_decoder(source, dtype, torch.device("cpu"), _pack_layer))


def _pack_layer(tensors: LayerTensors) -> DecoderLayer[PackedWeight]:
    qk_norm = tensors.qk_norm
    return DecoderLayer(
        input_norm=tensors.input_norm.contiguous(),
        qkv=PackedWeight(*tensors.qkv),
        qk_norm=None if qk_norm is None else qk_norm.contiguous(),
        o=PackedWeight(*tensors.o),
        post_norm=tensors.post_norm.contiguous(),
        gate_up=_interleaved(tensors.gate, tensors.up),
        down=PackedWeight(*tensors.down),
    )


def _interleaved(gate: WeightAndBias, up: WeightAndBias) -> PackedWeight:
    weight, bias = interleave(gate[0], up[0]), None
    if gate[1] is not None and up[1] is not None:
        bias = interleave(gate[1], up[1])
    return PackedWeight(weight, bias)
