"""The `torch` backend: paged attention from PyTorch's own operations.

The reference that the other backends are tested against, and the CPU's backend where there is no
compiler. It is plain: K and V are gathered by slot, pages that rows share are read once per row.

Each row's new tokens are cut into blocks of queries. `QueryBlocks` with equal numbers of queries
and similar numbers of keys are padded to one call of scaled_dot_product_attention, in which the
query heads of a K/V head become query positions: [B, Hkv, G * N, D] against [B, Hkv, K, D], so that
K and V are never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from radixserve.attention.base import (
    AttentionBackend,
    AttentionFeatures,
    AttentionMetadata,
    ForwardBatch,
    IndexArray,
    WindowKV,
    is_attention_dtype,
)
from radixserve.errors import ModelNotSupported
from radixserve_kernels.stored_kv import KV_DTYPES, from_stored

BLOCK_QUERIES = 64  # of a row in one block
SHORT_KEYS = 512  # up to here padding keys costs less than another call
KERNELS = [  # cuDNN's builds a plan for each shape, and shapes differ from step to step
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
CALL_KEYS = 1 << 15  # K/V tokens gathered for one call, padding included, unless one block has more


@dataclass(frozen=True, slots=True)
class QueryBlocks:
    """B blocks of queries, of one or several rows, in the order of their numbers of keys."""

    row: IndexArray  # [B]
    first_token: IndexArray  # [B] index into the batch's T tokens
    num_queries: IndexArray  # [B]
    position: IndexArray  # [B] of its first token
    num_keys: IndexArray  # [B] of the row, up to and with the last one that it sees


@dataclass(frozen=True, slots=True, eq=False)
class PaddedCall:
    """B blocks of N queries each, padded to K keys."""

    size: int  # B
    tokens: Tensor  # [B * N] int64, the queries among the batch's T tokens
    slots: Tensor  # [B * K] int64; padding repeats a block's last one
    window_slots: Tensor | None  # the same of layers that have window pages
    positions: IndexArray  # [B, N] of the queries
    last_seen: IndexArray | None  # [B, N] of bidirectional layers, see `GivenRows`
    num_keys: int  # K
    masks: dict[tuple[int, int, bool], Tensor | None]  # by span and direction, made when needed


class ReferenceBackend(AttentionBackend):
    """See `AttentionBackend`; float32 or bfloat16, on any device; K and V in any of stored_kv.py.

    `shares` changes nothing: shared pages are never read together.
    """

    name = "torch"
    is_slow = True
    features = frozenset(
        ("sliding_window", "attention_chunk_size", "logits_soft_cap", "sinks", "bidirectional"),
    )
    has_window_pages = True
    kv_dtypes = frozenset(KV_DTYPES.values())

    def __init__(
        self,
        kv: Tensor,
        num_heads: int,
        windows: WindowKV | None = None,
        dtype: torch.dtype | None = None,
        *,
        shares: bool = True,
    ) -> None:
        del shares
        super().__init__(kv, num_heads, windows, dtype)
        if not is_attention_dtype(self.dtype):
            raise ModelNotSupported(
                f"the torch backend takes float32 or bfloat16, not {self.dtype}"
            )
        self._calls: list[PaddedCall] = []
        self._last_seen: IndexArray | None = None  # of the planned step, see `GivenRows`

    @classmethod
    def unsupported_reason(
        cls, dtype: torch.dtype, device: torch.device, head_dim: int | None = None
    ) -> str:
        del device, head_dim
        if dtype == torch.float16:
            return "PyTorch's operations are used with float32 and bfloat16, not with float16"
        return ""

    @classmethod
    def about(cls, device_type: str) -> str:
        del device_type
        return "PyTorch's operations, everywhere"

    def plan(self, batch: ForwardBatch) -> None:
        given = batch.given
        self._last_seen = None if given is None else given.last_seen
        blocks = cut_blocks(batch.host, self._last_seen)
        self._calls = [self._pad(batch, blocks, part) for part in group_blocks(blocks)]
        self._batch = batch

    def _attend(self, q: Tensor, layer: int, scale: float, features: AttentionFeatures) -> Tensor:
        assert self._calls, "attend before plan"
        heads = self.num_kv_heads, self.num_heads // self.num_kv_heads  # Hkv, G
        out = q.new_empty(q.shape)
        for call in self._calls:
            queries = q.index_select(0, call.tokens).view(call.size, -1, *heads, self.head_dim)
            queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, G * N, D]
            index = call.window_slots if layer in self.window_layers else call.slots
            assert index is not None
            # Not slots[index]: on a CPU, PyTorch 2.9 has no such operation for FP8.
            stored = (slots.index_select(0, index) for slots in self.slots[layer])
            keys, values = (
                from_stored(some, self.dtype).unflatten(0, (call.size, -1)).transpose(1, 2)
                for some in stored
            )  # each [B, Hkv, K, D]
            mask = self._mask(call, features)
            if features.logits_soft_cap is None and features.sinks is None:
                with sdpa_kernel(KERNELS):
                    attended = F.scaled_dot_product_attention(
                        queries, keys, values, attn_mask=mask, scale=scale
                    )
            else:
                attended = attend_in_full(queries, keys, values, mask, scale, features)
            attended = attended.unflatten(2, (heads[1], -1)).permute(
                0, 3, 1, 2, 4
            )  # [B, N, Hkv, G, D]
            out.index_copy_(0, call.tokens, attended.reshape(-1, *q.shape[1:]))
        return out

    def _pad(self, batch: ForwardBatch, blocks: QueryBlocks, members: slice) -> PaddedCall:
        """The blocks `members`, all of N queries, in one call."""
        host = batch.host
        row, num_keys = blocks.row[members], blocks.num_keys[members][:, None]
        steps = np.arange(blocks.num_queries[members][0])  # [N]
        tokens = blocks.first_token[members][:, None] + steps  # [B, N]
        places = np.minimum(np.arange(num_keys.max()), num_keys - 1)  # [B, K] positions in the row
        page_index = host.kv_indptr[row][:, None] + places // self.page_size

        def slots(kv_indices: NDArray[np.int32]) -> Tensor:
            pages = kv_indices[page_index].astype(np.int64)
            return self._index(pages * self.page_size + places % self.page_size)

        in_windows = None if batch.window is None else slots(batch.window.kv_indices)
        positions = blocks.position[members][:, None] + steps  # [B, N]
        last_seen = None if self._last_seen is None else self._last_seen[tokens]
        tensors = self._index(tokens), slots(host.kv_indices), in_windows
        return PaddedCall(len(row), *tensors, positions, last_seen, int(num_keys.max()), {})

    def _mask(self, call: PaddedCall, features: AttentionFeatures) -> Tensor | None:
        """[B, 1, 1 or G * N, K] 0 or -inf; None: every query sees every key."""
        (window, chunk), both = features.span, features.bidirectional and call.last_seen is not None
        kind = window, chunk, bool(both)
        if kind in call.masks:
            return call.masks[kind]
        own, places = call.positions[..., None], np.arange(call.num_keys)
        last = call.last_seen[..., None] if both and call.last_seen is not None else own
        hidden = places > last  # [B, N, K]
        if window:
            hidden |= places <= own - window
        if chunk:
            hidden |= places < own // chunk * chunk
        mask = None
        if hidden.any():
            bias = np.where(hidden, np.float32(-np.inf), np.float32(0))
            if call.positions.shape[1] > 1:
                bias = np.tile(bias, (1, self.num_heads // self.num_kv_heads, 1))
            mask = torch.from_numpy(bias[:, None]).to(self.kv.device, self.dtype)
        call.masks[kind] = mask
        return mask

    def _index(self, index: IndexArray) -> Tensor:
        return torch.from_numpy(index.ravel()).to(self.kv.device)


def attend_in_full(
    queries: Tensor,  # [B, Hkv, G * N, D]
    keys: Tensor,  # [B, Hkv, K, D]
    values: Tensor,
    mask: Tensor | None,  # as in `PaddedCall`
    scale: float,
    features: AttentionFeatures,
) -> Tensor:
    """Soft-capped scores and sinks, which PyTorch's own function does not have, in float32."""
    scores = (queries @ keys.transpose(2, 3)).float() * scale
    if features.logits_soft_cap is not None:
        scores = torch.tanh(scores / features.logits_soft_cap) * features.logits_soft_cap
    if mask is not None:
        scores = scores + mask
    if features.sinks is None:
        weights = scores.softmax(-1)
    else:
        sinks = features.sinks.float().view(1, keys.shape[1], -1, 1)  # [1, Hkv, G, 1]
        sinks = sinks.repeat_interleave(scores.shape[2] // sinks.shape[2], 2)
        sinks = sinks.expand(scores.shape[0], -1, -1, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    return weights.to(values.dtype) @ values


def cut_blocks(host: AttentionMetadata, last_seen: IndexArray | None = None) -> QueryBlocks:
    """Every new token once; those of a row in blocks of BLOCK_QUERIES and a rest. last_seen: of
    `GivenRows`."""
    num_new = np.diff(host.qo_indptr)
    count = -(-num_new // BLOCK_QUERIES)  # blocks of each row
    row = np.repeat(np.arange(len(count)), count)
    done = (np.arange(len(row)) - (np.cumsum(count) - count)[row]) * BLOCK_QUERIES
    num_queries = np.minimum(num_new[row] - done, BLOCK_QUERIES)
    position = host.start[row] + done
    first_token = host.qo_indptr[row] + done
    num_keys = position + num_queries
    if last_seen is not None:
        num_keys = last_seen[first_token + num_queries - 1] + 1
    order = np.lexsort((num_keys, num_queries))
    columns = row, first_token, num_queries, position, num_keys
    return QueryBlocks(*(array[order] for array in columns))


def group_blocks(blocks: QueryBlocks) -> list[slice]:
    """Neighbouring blocks for one call each: of as many queries, and padded to at most twice their
    keys or SHORT_KEYS, and to CALL_KEYS in all."""
    groups: list[slice] = []
    first, shapes = 0, list(zip(blocks.num_queries.tolist(), blocks.num_keys.tolist(), strict=True))
    for block, (num_queries, num_keys) in enumerate(shapes):
        allowed = max(2 * shapes[first][1], SHORT_KEYS)
        if (
            num_queries != shapes[first][0]
            or num_keys > allowed
            or (block > first and (block + 1 - first) * num_keys > CALL_KEYS)
        ):
            groups.append(slice(first, block))
            first = block
    return [*groups, slice(first, len(shapes))]
