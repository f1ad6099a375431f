"""The native decoder on any device and attention backend, whole or as one of several ranks.

It uses few kernels; CPU tensors run their torch references. Nothing in `forward` waits for the
device, depends on the values of a tensor, or has a shape that does, so that a CUDA graph can
capture it. The batch and the backend know which tokens form a sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch, LayerKV
from radixserve.errors import ModelNotSupported
from radixserve.models.base import LayeredModel, ModelInfo
from radixserve.models.decoder_shape import check_decoder, decoder_shape
from radixserve.models.decoder_tensors import DecoderTensors, LayerTensors, read_decoder
from radixserve.models.mlp_tensors import ExpertTensors, MlpTensors, WeightAndBias
from radixserve.models.parallel import TPGroup, check_split, shard_head, shard_layer, shard_shape
from radixserve.models.source import ModelSource
from radixserve_kernels.decoder_layer import DecoderLayer, Mlp
from radixserve_kernels.experts import GroupedExperts
from radixserve_kernels.gpu_ops import act_and_mul, add_rms_norm, rms_norm, rope_and_store
from radixserve_kernels.linear import Linear
from radixserve_kernels.quantized import concat_rows, dense

logger = logging.getLogger("radixserve")

TABLE_BYTES = 256 << 20  # of rotations, unless more positions are asked for


class Decoder(LayeredModel):
    """See `LayeredModel`. Made by `load_decoder`. One of several ranks has an `info` of its own.

    Its kernels store K and V, of as many heads as `info` has, where the backend's `layer_kv` says.
    """

    can_capture = True

    def __init__(
        self,
        tensors: DecoderTensors,  # the rank's; layers are DecoderLayer[Linear, GroupedExperts]
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
        self._lm_head = Linear(head, is_exact=is_exact, compiles=compiles)
        self._layers: tuple[DecoderLayer[Linear, GroupedExperts], ...] = tensors.layers
        self.tables = tables

    def forward_into(self, out: Tensor, batch: ForwardBatch, backend: AttentionBackend) -> None:
        self.forward(batch, backend, out)

    def forward(
        self, batch: ForwardBatch, backend: AttentionBackend, out: Tensor | None = None
    ) -> Tensor:
        last = len(self._layers) - 1
        x, residual = self.embed(batch.input_ids)
        for number in range(last):
            q = self.project(number, x, batch.positions, backend.layer_kv(number))
            x = self.finish_layer(number, self.attend(number, q, backend), x, residual)
        q = self.project(last, x, batch.positions, backend.layer_kv(last))
        return self.finish(self.attend(last, q, backend), x, residual, batch.logits_indices, out)

    def embed(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        residual = F.embedding(input_ids, self._embedding)
        if self._shape.embedding_scale != 1:
            residual = residual * self._shape.embedding_scale
        return self._normed(residual, self._layers[0].pre_attention_norm), residual

    def project(
        self,
        number: int,
        x: Tensor,
        positions: Tensor,
        kv: LayerKV,
        out: Tensor | None = None,
    ) -> Tensor:
        shape, layer = self._shape, self._layers[number]
        qkv, qk_norm = layer.qkv(x), layer.qk_norm
        if qk_norm is not None and shape.has_whole_qk_norm:
            q, k = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
            weights = qk_norm.flatten()
            for part, weight in ((qkv[:, :q], weights[:q]), (qkv[:, q : q + k], weights[q:])):
                rms_norm(part, weight, shape.eps, part)
            qk_norm = None
        return rope_and_store(
            qkv,
            positions,
            kv.slot_mapping,
            None if layer.rotary is None else self.tables[layer.rotary],
            kv.k_slots,
            kv.v_slots,
            shape.num_heads,
            shape.num_kv_heads,
            qk_norm,
            shape.eps,
            out,
            is_centered=shape.norm_type == "layer",
        )

    def attend(self, number: int, queries: Tensor, backend: AttentionBackend) -> Tensor:
        features = self._layers[number].features
        return backend.attend(queries, number, self._shape.attention_scale, features).flatten(1)

    def finish_layer(self, number: int, attended: Tensor, x: Tensor, residual: Tensor) -> Tensor:
        layer = self._layers[number]
        is_last = number == len(self._layers) - 1
        next_norm = self._norm if is_last else self._layers[number + 1].pre_attention_norm
        if self._shape.has_parallel_residual:
            out = self._sum_over_ranks(layer.o(attended) + self._mlp(layer.mlp, x))
        else:
            out = self._sum_over_ranks(layer.o(attended))
            x = self._add(out, residual, layer.post_attention_norm, layer.pre_mlp_norm)
            out = self._sum_over_ranks(self._mlp(layer.mlp, x))
        return self._add(out, residual, layer.post_mlp_norm, next_norm)

    def finish(
        self,
        attended: Tensor,
        x: Tensor,
        residual: Tensor,
        logits_indices: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        if not len(logits_indices):
            return x.new_empty((0, self._shape.vocab_size), dtype=torch.float32)
        if len(logits_indices) < len(attended):  # from here on every token is on its own
            attended = attended.index_select(0, logits_indices)
            residual = residual.index_select(0, logits_indices)
            x = x.index_select(0, logits_indices) if self._shape.has_parallel_residual else x
        return self._logits(self.finish_layer(len(self._layers) - 1, attended, x, residual), out)

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

    def _mlp(self, mlp: Mlp[Linear] | GroupedExperts, x: Tensor) -> Tensor:
        if isinstance(mlp, GroupedExperts):
            return mlp(x)
        return mlp.down(act_and_mul(mlp.gate_up(x), self._shape.activation))

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
    if parts := decoder_shape(source.config).compiled_parts:
        raise ModelNotSupported(f"{parts} run natively on the cpu attention backend only")
    if group is not None and group.size == 1:
        group = None
    if group is None:
        pack = partial(_pack_layer, linear=partial(Linear, is_exact=is_exact, compiles=compiles))
        tensors = read_decoder(source, dtype, device, pack)
    else:
        tensors = _read_part(source, dtype, device, group)
    tensors = _with_positions(tensors, num_positions)
    longest = tensors.info.max_positions
    num_rows = min(num_positions or longest, longest)
    tables = tuple(rotary.cos_sin(num_rows) for rotary in tensors.rotaries)
    return Decoder(tensors, tables, group, is_exact=is_exact, compiles=compiles)


def _pack_layer(
    tensors: LayerTensors, linear: Callable[..., Linear] = Linear
) -> DecoderLayer[Linear, GroupedExperts]:
    mlp = tensors.mlp
    return DecoderLayer(
        **tensors.norms,
        qkv=linear(*_stacked(tensors.q, tensors.k, tensors.v)),
        o=linear(*_stacked(tensors.o)),
        mlp=(
            _pack_experts(mlp, linear) if isinstance(mlp, ExpertTensors) else _pack_mlp(mlp, linear)
        ),
        features=tensors.features,
        rotary=tensors.rotary,
        has_gate=False,
        recurrence=None,
        short_conv=None,
        beside=None,
        num_kv_heads=0,
        head_dim=0,
        kv_source=None,
        has_v_norm=False,
        experts_beside=None,
        own_input=None,
        scale=1.0,
    )


def _pack_mlp(mlp: MlpTensors, linear: Callable[..., Linear]) -> Mlp[Linear]:
    assert mlp.gate is not None, "layers without one run on the cpu attention backend"
    return Mlp(linear(*_stacked(mlp.gate, mlp.up)), linear(*_stacked(mlp.down)))


def _pack_experts(mlp: ExpertTensors, linear: Callable[..., Linear]) -> GroupedExperts:
    """The shared expert, which computes every token, is a separate product."""
    experts = mlp.experts[: mlp.routing.num_experts]
    shared = _pack_mlp(mlp.experts[-1], linear) if mlp.routing.has_shared else None
    gate_up = [_stacked(expert.gate, expert.up) for expert in experts if expert.gate is not None]
    down = [_stacked(expert.down) for expert in experts]
    router = linear(*_stacked(mlp.router))
    stacked = *_piled(gate_up), *_piled(down)
    return GroupedExperts(router, *stacked, shared, mlp.routing, mlp.choice_bias)


def _piled(both: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    """[E, N, K] and [E, N] of weights and biases."""
    biases = [bias for _, bias in both if bias is not None]
    return torch.stack([weight for weight, _ in both]), torch.stack(biases) if biases else None


def _stacked(*parts: WeightAndBias) -> tuple[Tensor, Tensor | None]:
    """One projection that gives the features of all, concatenated; biases all or none."""
    biases = [bias for _, bias in parts if bias is not None]
    weight = dense(concat_rows([weight for weight, _ in parts]))
    return weight, torch.cat(biases) if biases else None


def _read_part(
    source: ModelSource, dtype: torch.dtype, device: torch.device, group: TPGroup
) -> DecoderTensors:
    """A rank's part of every tensor, and the info of that part."""
    whole = decoder_shape(source.config)
    check_split(whole, group.size)
    num_parameters = 0

    def make_layer(layer: LayerTensors) -> DecoderLayer[Linear, GroupedExperts]:
        nonlocal num_parameters
        part = shard_layer(layer, whole, group.rank, group.size)
        held = [tensor for both in part.projections for tensor in both if tensor is not None]
        norms = [norm for norm in part.norms.values() if norm is not None]
        num_parameters += sum(x.shape.numel() for x in (*norms, *held))
        return _pack_layer(part)

    read = read_decoder(source, dtype, device, make_layer)
    lm_head = shard_head(dense(read.lm_head), group.rank, group.size)
    num_parameters += sum(x.shape.numel() for x in (read.embedding, read.norm, lm_head))
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
