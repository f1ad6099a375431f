"""A decoder's weights split over ranks, each of which computes a part of every layer.

Query heads, key/value heads and the columns of the MLP are split; o and down take a rank's part as
input, so that the sum over the ranks is the layer's output. Key/value heads are repeated if there
are more ranks than heads. The embedding is whole in every rank; the head is split by vocabulary.
Ranks exchange tensors through a `TPGroup`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.errors import InvalidRequest
from radixserve.models.decoder_shape import DecoderShape
from radixserve.models.decoder_tensors import LayerTensors
from radixserve.models.mlp_tensors import MlpTensors, WeightAndBias
from radixserve_kernels.quantized import dense

MAX_RANKS = 64


class TPGroup(Protocol):
    """The way from one rank to the others. Every call is made by all of them, in the same order.

    The tensor calls may be part of a CUDA graph; their results are equal in every rank to the bit.
    """

    rank: int  # 0 samples the tokens
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in the memory of x."""
        ...

    def gather_columns(self, x: Tensor) -> Tensor:
        """[S, size * n]: every rank's x [S, n] side by side."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x by that of rank 0."""
        ...

    def all_reduce_min(self, number: int) -> int:
        """The smallest of every rank's number. Waits for all of them; not part of a graph."""
        ...


def check_split(shape: DecoderShape, size: int) -> None:
    """Raise InvalidRequest, naming the sizes that are possible, if `size` ranks cannot share."""
    reason = _not_divisible_reason(shape, size)
    if reason:
        possible = [str(n) for n in range(1, MAX_RANKS + 1) if not _not_divisible_reason(shape, n)]
        raise InvalidRequest(
            f"tensor_parallel_size={size} cannot split this model: {reason}; "
            f"possible are {', '.join(possible)}"
        )


def _not_divisible_reason(shape: DecoderShape, size: int) -> str:
    if shape.has_whole_qk_norm and size > 1:
        return "its queries and keys are normed over all heads"
    if any(shape.experts) and size > 1:
        return "its experts are not split"
    for count, what in (
        (shape.num_heads, "query heads"),
        (shape.intermediate_size, "columns of the MLP"),
    ):
        if count % size:
            return f"{count} {what} are no multiple of it"
    if shape.num_kv_heads % size and size % shape.num_kv_heads:
        return f"{shape.num_kv_heads} key/value heads can neither be split nor repeated evenly"
    return ""


def shard_shape(shape: DecoderShape, size: int) -> DecoderShape:
    """The shape of the part that each of `size` ranks has."""
    return replace(
        shape,
        num_heads=shape.num_heads // size,
        num_kv_heads=max(1, shape.num_kv_heads // size),
        intermediate_size=shape.intermediate_size // size,
    )


def shard_layer(layer: LayerTensors, shape: DecoderShape, rank: int, size: int) -> LayerTensors:
    """A rank's part of a layer; `shape` is that of the whole. Copies: nothing whole stays alive."""
    heads, kv_heads = _part(shape.num_heads, rank, size), _kv_heads(shape, rank, size)
    q_rows, kv_rows = _features(heads, shape), _features(kv_heads, shape)
    columns = _part(shape.intermediate_size, rank, size)
    qk_norm = layer.qk_norm
    if qk_norm is not None:
        num_heads = shape.num_heads
        k_norm = qk_norm[num_heads + kv_heads.start : num_heads + kv_heads.stop]
        qk_norm = torch.cat((qk_norm[heads], k_norm))
    mlp = layer.mlp
    assert isinstance(mlp, MlpTensors), "check_split refuses experts"
    assert mlp.gate is not None, "layers without one run on the cpu attention backend"
    return replace(
        layer,
        qk_norm=qk_norm,
        q=_both_rows(layer.q, q_rows),
        k=_both_rows(layer.k, kv_rows),
        v=_both_rows(layer.v, kv_rows),
        o=_columns(layer.o, q_rows, rank),
        mlp=MlpTensors(
            gate=_both_rows(mlp.gate, columns),
            up=_both_rows(mlp.up, columns),
            down=_columns(mlp.down, columns, rank),
        ),
    )


def shard_head(head: Tensor, rank: int, size: int) -> Tensor:
    """A rank's rows of the head [V, H], padded with zeros so that all ranks have equally many."""
    count = -(-len(head) // size)
    part = head[rank * count : (rank + 1) * count]
    return F.pad(part, (0, 0, 0, count - len(part))) if len(part) < count else part.clone()


def _part(count: int, rank: int, size: int) -> slice:
    each = count // size
    return slice(rank * each, (rank + 1) * each)


def _kv_heads(shape: DecoderShape, rank: int, size: int) -> slice:
    """The K/V heads that the rank's query heads read; ranks may have to share one."""
    first = rank * shape.num_kv_heads // size
    return slice(first, first + max(1, shape.num_kv_heads // size))


def _features(heads: slice, shape: DecoderShape) -> slice:
    return slice(heads.start * shape.head_dim, heads.stop * shape.head_dim)


def _both_rows(both: WeightAndBias, part: slice) -> WeightAndBias:
    weight, bias = both
    return dense(weight)[part].clone(), None if bias is None else bias[part].clone()


def _columns(both: WeightAndBias, part: slice, rank: int) -> WeightAndBias:
    """The bias is added once, by rank 0."""
    weight, bias = dense(both[0]), both[1]
    return weight[:, part].clone(memory_format=torch.contiguous_format), bias if rank == 0 else None
