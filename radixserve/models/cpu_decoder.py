"""The native decoder on compiled CPU kernels: a step is one call, from token ids to logits.

The same checkpoints and the same arithmetic as decoder.py; attention is part of the call, which
takes the `cpu` backend's plan.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch
from radixserve.attention.cpu import CpuBackend
from radixserve.models.base import LanguageModel, ModelInfo
from radixserve.models.decoder_tensors import DecoderTensors, LayerTensors, read_decoder
from radixserve.models.mlp_tensors import ExpertTensors, MlpTensors, WeightAndBias
from radixserve.models.source import ModelSource
from radixserve_kernels.cpu_decoder import FusedDecoder
from radixserve_kernels.cpu_experts import PackedExperts
from radixserve_kernels.cpu_weights import PackedWeight, interleave, interleave_weights
from radixserve_kernels.decoder_layer import DecoderLayer, Mlp
from radixserve_kernels.quantized import AnyWeight


class CpuDecoder(LanguageModel):
    """See `LanguageModel`. Made by `load_cpu_decoder`."""

    def __init__(self, read: DecoderTensors) -> None:
        self.info: ModelInfo = read.info
        parts = (read.shape, read.layers, read.embedding, read.norm.contiguous(), read.lm_head)
        self._decoder = FusedDecoder(*parts, read.info.dtype)
        self._rotaries = read.rotaries

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """`backend` is a planned CpuBackend."""
        assert isinstance(backend, CpuBackend), f"not on the {backend.name} backend"
        end, window = int(batch.host.seq_lens.max()), batch.window
        return self._decoder.run(
            input_ids=batch.input_ids,
            positions=batch.positions,
            slots=batch.slot_mapping,
            sampled=batch.logits_indices,
            rotations=[table.up_to(end) for table in self._rotaries],
            plan=backend.planned,
            kv=backend.decoder_kv,
            window_slots=None if window is None else window.slot_mapping,
            window_page_ids=None if window is None else window.kv_indices,
        )


def load_cpu_decoder(
    source: ModelSource, dtype: torch.dtype, weight_dtype: str | None = "auto"
) -> CpuDecoder:
    """Read a model of a native family.

    weight_dtype: "auto" (matrices stay in the 8 or 4 bits that they are stored in), "int8", or None
    to widen all to dtype.
    """
    ends = partial(_pack_ends, dtype)
    cpu = torch.device("cpu")
    return CpuDecoder(read_decoder(source, dtype, cpu, _pack_layer, weight_dtype, ends))


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
    mlp = tensors.mlp
    return DecoderLayer(
        **norms,
        qkv=PackedWeight.of_parts((tensors.q, tensors.k, tensors.v)),
        o=PackedWeight(*tensors.o),
        mlp=_pack_experts(mlp) if isinstance(mlp, ExpertTensors) else _pack_mlp(mlp),
        features=tensors.features,
        rotary=tensors.rotary,
    )


def _pack_mlp(mlp: MlpTensors) -> Mlp[PackedWeight]:
    return Mlp(_interleaved(mlp.gate, mlp.up), PackedWeight(*mlp.down))


def _pack_experts(mlp: ExpertTensors) -> PackedExperts:
    experts = [_pack_mlp(one) for one in mlp.experts]
    gate_up, down = [one.gate_up for one in experts], [one.down for one in experts]
    return PackedExperts(PackedWeight(*mlp.router), gate_up, down, mlp.routing)


def _interleaved(gate: WeightAndBias, up: WeightAndBias) -> PackedWeight:
    bias = None
    if gate[1] is not None and up[1] is not None:
        bias = interleave(gate[1], up[1])
    return PackedWeight(interleave_weights(gate[0], up[0]), bias)
