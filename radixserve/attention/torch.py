"""The `torch` backend: paged attention from PyTorch's own operations, and the tests' reference.

`plan` cuts the step's rows into segments and packs these into a few padded groups; `run` then
costs, for each group, a gather of its pages and one scaled_dot_product_attention:

    fresh    rows that start at position 0: K and V are the step's own, no gather, causal, no mask
    folded   decodes and short chunks: the query heads of a K/V head become query positions,
             [B, Hkv, G * Lq, D] against [B, Hkv, Lk, D], so that K and V are never repeated
    blocked  long chunks behind a prefix, in blocks of at most Q_BLOCK queries, masked
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.attention.base import ForwardBatch, HostIndex, IndexArray, check_dtype, kv_view
from radixserve.errors import ModelNotSupported
from radixserve_kernels.torch_ops import store_kv

Q_BLOCK = 256  # queries of one row in a masked segment, at most
FOLD_MAX = 16  # longest segment whose query heads are folded
FREE_WASTE = 512  # padded K/V tokens in a group that cost less than another group would
WASTE_SHARE = 0.25  # or padding up to this share of its real tokens
GATHER_BYTES = 4 << 20  # K and V of a group, so that they stay in the processor's cache
MASK_ELEMENTS = 4 << 20  # of a group of several segments


@dataclass(frozen=True, slots=True)
class Segments:
    """Consecutive new tokens of one row that attend together; arrays of equal length."""

    row: IndexArray
    first_token: IndexArray  # index into the batch's T tokens
    num_queries: IndexArray
    kv_len: IndexArray  # tokens up to and with the last query
    is_fresh: np.ndarray  # bool: starts at position 0, has more than one token


@dataclass(frozen=True, slots=True)
class Group:
    """B segments padded to Lq queries and Lk keys."""

    size: int  # B
    q_len: int  # Lq
    kv_len: int  # Lk
    is_fresh: bool
    is_folded: bool
    tokens: (
        slice | Tensor
    )  # [B * Lq] the queries among the batch's tokens; padding repeats the last
    pages: slice | Tensor | None  # slots if they are contiguous, else [B * pages] int64 page ids
    rooms: tuple[Tensor, ...] | None  # for gathered K and V, each [B * pages, P * Hkv * D]
    mask: Tensor | None  # [B, 1, Lq or G * Lq, Lk] 0 or -inf


@dataclass(frozen=True, slots=True)
class Plan:
    groups: tuple[Group, ...]
    slot_mapping: Tensor  # [T]
    out_index: Tensor | None  # [T] each token's place in the groups laid end to end; None: in order


class TorchBackend:
    """See `AttentionBackend`. Borrows kv [L, 2, num_pages, P, Hkv, D], float32 or bfloat16."""

    name = "torch"

    def __init__(self, kv: Tensor, num_heads: int) -> None:
        if not check_dtype(kv.dtype):
            raise ModelNotSupported(f"the torch backend takes float32 or bfloat16, not {kv.dtype}")
        num_kv_heads, self.head_dim = kv.shape[-2:]
        if num_heads % num_kv_heads:
            raise ModelNotSupported(
                f"{num_heads} query heads cannot share {num_kv_heads} key heads evenly"
            )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.page_size = kv.shape[3]
        self.dtype, self.device = kv.dtype, kv.device
        self._slots = [kv_view(kv, layer) for layer in range(kv.shape[0])]
        self._pages = [
            (layer_kv[0].flatten(1), layer_kv[1].flatten(1)) for layer_kv in kv.unbind(0)
        ]  # each [num_pages, P * Hkv * D]
        token_bytes = 2 * num_kv_heads * self.head_dim * kv.element_size()
        self._max_group_tokens = max(1, GATHER_BYTES // token_bytes)
        self._workspace = kv.new_empty((2, 0))
        self._plan: Plan | None = None

    def plan(self, batch: ForwardBatch) -> None:
        host = batch.host
        segments = cut_segments(host)
        groups, order = [], []
        for members in pack_segments(segments, self._max_group_tokens):
            tokens = _token_index(segments, members)  # [B, Lq]
            groups.append(self._group(host, segments, members, tokens))
            order.append(np.where(_is_real(segments, members, tokens.shape[1]), tokens, -1).ravel())
        self._plan = Plan(tuple(groups), batch.slot_mapping, self._out_index(np.concatenate(order)))

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float | None = None
    ) -> Tensor:
        plan = self._plan
        assert plan is not None, "run before plan"
        store_kv(k, v, *self._slots[layer], plan.slot_mapping)
        outs = [self._attend(group, q, k, v, layer, scale) for group in plan.groups]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)  # [sum B * Lq, Hq, D]
        return out if plan.out_index is None else out.index_select(0, plan.out_index)

    def _attend(
        self, group: Group, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float | None
    ) -> Tensor:
        """One group's output, [B * Lq, Hq, D]."""
        size, q_len, heads, dim = group.size, group.q_len, self.num_heads, self.head_dim
        query = _take(q, group.tokens).reshape(size, q_len, heads, dim)
        keys, values = self._keys_values(group, k, v, layer)  # [B, Hkv, Lk, D]
        if not group.is_folded:
            out = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                keys,
                values,
                attn_mask=group.mask,
                is_causal=group.is_fresh,
                scale=scale,
                enable_gqa=self.group_size > 1,
            )
            return out.transpose(1, 2).reshape(size * q_len, heads, dim)
        split = (size, q_len, self.num_kv_heads, self.group_size, dim)
        query = query.view(split).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, G * Lq, D]
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=group.mask, scale=scale
        ).view(size, self.num_kv_heads, self.group_size, q_len, dim)
        return out.permute(0, 3, 1, 2, 4).reshape(size * q_len, heads, dim)

    def _keys_values(self, group: Group, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """A group's keys and values, each [B, Hkv, Lk, D]."""
        pages = group.pages
        if pages is None:  # fresh: the step's own
            k, v = _take(k, group.tokens), _take(v, group.tokens)
        elif isinstance(pages, slice):
            k, v = self._slots[layer]
            k, v = k[pages], v[pages]
        else:
            rooms = group.rooms or ()
            k, v = (
                torch.index_select(cache, 0, pages, out=room)
                for cache, room in zip(self._pages[layer], rooms, strict=True)
            )
        shape = (group.size, -1, self.num_kv_heads, self.head_dim)
        k, v = k.reshape(shape), v.reshape(shape)
        return k[:, : group.kv_len].transpose(1, 2), v[:, : group.kv_len].transpose(1, 2)

    def _group(
        self, host: HostIndex, segments: Segments, members: IndexArray, tokens: IndexArray
    ) -> Group:
        q_len = tokens.shape[1]
        kv_len = int(segments.kv_len[members].max())
        is_fresh = bool(segments.is_fresh[members[0]])
        is_folded = not is_fresh and q_len <= FOLD_MAX
        copies = self.group_size if is_folded else 1
        pages = None if is_fresh else self._page_index(host, segments, members)
        return Group(
            size=len(members),
            q_len=q_len,
            kv_len=kv_len,
            is_fresh=is_fresh,
            is_folded=is_folded,
            tokens=self._range_or_index(tokens.ravel()),
            pages=pages,
            rooms=self._rooms(len(pages)) if isinstance(pages, Tensor) else None,
            mask=None if is_fresh else self._mask(segments, members, q_len, copies),
        )

    def _page_index(
        self, host: HostIndex, segments: Segments, members: IndexArray
    ) -> slice | Tensor:
        rows, kv_len = segments.row[members], segments.kv_len[members]
        num_pages = -(-kv_len // self.page_size)
        columns = np.minimum(np.arange(num_pages.max()), num_pages[:, None] - 1)  # pad: own last
        pages = host.kv_indices[host.kv_indptr[rows][:, None] + columns].astype(np.int64)
        if len(members) == 1 and bool((np.diff(pages[0]) == 1).all()):
            first = int(pages[0, 0]) * self.page_size
            return slice(first, first + int(kv_len[0]))
        return torch.from_numpy(pages.ravel()).to(self.device)

    def _rooms(self, num_pages: int) -> tuple[Tensor, ...]:
        """Where a group's K and V are gathered; all groups and layers use the same memory.

        Fresh memory for each gather would cost more than the gather: the system clears its pages.
        """
        width = self._pages[0][0].shape[1]
        if num_pages * width > self._workspace.shape[1]:
            self._workspace = self._workspace.new_empty((2, num_pages * width))
        return tuple(room[: num_pages * width].view(-1, width) for room in self._workspace)

    def _mask(
        self, segments: Segments, members: IndexArray, q_len: int, copies: int
    ) -> Tensor | None:
        """[B, 1, Lq, Lk], or [B, 1, G * Lq, Lk] when queries of more than one token are folded."""
        kv_len, num_queries = segments.kv_len[members], segments.num_queries[members]
        if q_len == 1 and bool((kv_len == kv_len[0]).all()):
            return None
        steps = np.minimum(np.arange(q_len), num_queries[:, None] - 1)
        last_key = (kv_len - num_queries)[:, None] + steps  # [B, Lq] a query sees keys up to here
        hidden = np.arange(kv_len.max()) > last_key[..., None]  # [B, Lq, Lk]
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0.0))
        if q_len > 1 and copies > 1:
            mask = np.tile(mask, (1, copies, 1))
        return torch.from_numpy(mask[:, None]).to(self.device, self.dtype)

    def _out_index(self, order: IndexArray) -> Tensor | None:
        """Where each token lies in `order` (token ids, -1 for padding); None if in order."""
        places = np.flatnonzero(order >= 0)
        if len(places) == len(order) and bool((np.diff(order) == 1).all()):
            return None
        index = np.empty(len(places), np.int64)
        index[order[places]] = places
        return torch.from_numpy(index).to(self.device)

    def _range_or_index(self, tokens: IndexArray) -> slice | Tensor:
        if bool((np.diff(tokens) == 1).all()):
            return slice(int(tokens[0]), int(tokens[-1]) + 1)
        return torch.from_numpy(tokens).to(self.device)


def cut_segments(host: HostIndex) -> Segments:
    """One segment a row, but blocks of Q_BLOCK queries where a row needs a mask.

    row    |--- prefix in the cache ---|--- new tokens -------------|
    block 0                            |- Q_BLOCK -|                  keys: prefix + this block
    block 1                                        |- Q_BLOCK -|      keys: ... up to this block
    """
    num_new = np.diff(host.qo_indptr)
    is_fresh = (host.start == 0) & (num_new > 1)
    blocks = np.where(is_fresh, 1, -(-num_new // Q_BLOCK))
    row = np.repeat(np.arange(len(num_new)), blocks)
    nth = np.arange(len(row)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    num_queries = np.minimum(num_new[row] - nth * Q_BLOCK, Q_BLOCK)
    num_queries = np.where(is_fresh[row], num_new[row], num_queries)
    return Segments(
        row=row,
        first_token=host.qo_indptr[row] + nth * Q_BLOCK,
        num_queries=num_queries,
        kv_len=host.start[row] + nth * Q_BLOCK + num_queries,
        is_fresh=is_fresh[row],
    )


def pack_segments(segments: Segments, max_tokens: int) -> list[IndexArray]:
    """Segment numbers of each group, ascending; groups in order of their first segment.

    Segments of one kind and of query lengths within a factor of two, longest first, fill a group
    until its padding would exceed FREE_WASTE tokens and WASTE_SHARE of the real ones.
    """
    q_class = np.ceil(np.log2(segments.num_queries)).astype(np.int64)
    kind = q_class * 2 + segments.is_fresh
    order = np.lexsort((-segments.kv_len, kind))
    groups: list[list[int]] = []
    group_kind = tallest = real = q_len = 0
    for number, its_kind, length, queries in zip(
        order.tolist(),
        kind[order].tolist(),
        segments.kv_len[order].tolist(),
        segments.num_queries[order].tolist(),
        strict=True,
    ):
        size = len(groups[-1]) + 1 if groups else 1
        waste = size * tallest - real - length
        if (
            not groups
            or its_kind != group_kind
            or waste > max(FREE_WASTE, WASTE_SHARE * (real + length))
            or size * tallest > max_tokens
            or size * tallest * max(q_len, queries) > MASK_ELEMENTS
        ):
            groups.append([])
            group_kind, tallest, real, q_len = its_kind, length, 0, 0
        groups[-1].append(number)
        real += length
        q_len = max(q_len, queries)
    return sorted((np.sort(group) for group in groups), key=lambda group: int(group[0]))


def _token_index(segments: Segments, members: IndexArray) -> IndexArray:
    """[B, Lq] the batch's token of each query; padding repeats a segment's last one."""
    num_queries = segments.num_queries[members][:, None]
    steps = np.minimum(np.arange(num_queries.max()), num_queries - 1)
    return segments.first_token[members][:, None] + steps


def _is_real(segments: Segments, members: IndexArray, q_len: int) -> np.ndarray:
    return np.arange(q_len) < segments.num_queries[members][:, None]


def _take(x: Tensor, tokens: slice | Tensor) -> Tensor:
    return x[tokens] if isinstance(tokens, slice) else x.index_select(0, tokens)
