"""The `torch` backend: paged attention from PyTorch's own operations, and the tests' reference.

`plan` cuts the step's rows into parts; `run` then costs a number of operations for each part:

    shared   leading pages that several rows have in common: all their queries against the one
             copy of those keys, merged with each row's own part by log-sum-exp
    dense    a long chunk of one row: blocks of queries, a product for each K/V head
    single   a decode whose pages lie in few runs: these are read where they are
    group    other decodes and short chunks, padded to one batch of scaled_dot_product_attention:
             the query heads of a K/V head become query positions, [B, Hkv, G * Lq, D] against
             [B, Hkv, Lk, D], so that K and V are never repeated

Rows that start at position 0, or right behind what they share, read the step's own K and V.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from radixserve.attention import dense
from radixserve.attention.base import (
    AttentionBackend,
    ForwardBatch,
    HostIndex,
    IndexArray,
    check_dtype,
)
from radixserve.attention.cuda.cascade import SharedNode, covered_pages, find_shared
from radixserve.attention.segments import (
    Segments,
    cut_segments,
    find_runs,
    hidden_keys,
    is_real,
    pack_segments,
    slots_of,
    token_index,
)
from radixserve.errors import ModelNotSupported
from radixserve_kernels.torch_ops import attention_with_lse, merge_attention

MAX_FOLDED = 63  # queries of a row in a group; longer chunks are dense
GATHER_BYTES = 4 << 20  # K and V of a group, so that they stay in the processor's cache
SHARE_BYTES = 1 << 20  # K and V that sharing must save a layer, to pay for the merge
RUN_BYTES = 96 << 10  # K and V for which one more operation is cheaper than gathering them
LONG_BYTES = 256 << 10  # K and V from which a row is better not part of a group


@dataclass(frozen=True, slots=True)
class Keys:
    """Where a part's keys and values are."""

    pages: slice | Tensor | None  # slots if contiguous, or [B * pages] page ids; None: fresh
    rooms: tuple[Tensor, ...] | None  # for gathered K and V, each [B * pages, P * Hkv * D]


@dataclass(frozen=True, slots=True)
class Group:
    """B segments padded to Lq queries and Lk keys."""

    size: int  # B
    q_len: int  # Lq
    kv_len: int  # Lk
    tokens: slice | Tensor  # [B * Lq] the queries among the batch's tokens; padding repeats
    keys: Keys
    mask: Tensor | None  # [B, 1, Lq or G * Lq, Lk] 0 or -inf


@dataclass(frozen=True, slots=True)
class Dense:
    """Some queries against one run of keys."""

    tokens: slice | Tensor  # the queries among the batch's tokens
    kv_len: int
    keys: Keys
    is_causal: bool  # the last query sees all keys, the one before it all but the last ...


@dataclass(frozen=True, slots=True)
class Single:
    """One query against keys in a few runs of slots."""

    token: slice  # among the batch's tokens
    runs: tuple[slice, ...]


Part = Group | Dense | Single


@dataclass(frozen=True, slots=True)
class Plan:
    parts: tuple[Part, ...]
    shared: tuple[Dense, ...]
    slot_mapping: Tensor  # [T]
    out_index: Tensor | None  # [T] each token's place in the parts laid end to end; None: in order


class ReferenceBackend(AttentionBackend):
    """See `AttentionBackend`. Borrows kv [L, 2, num_pages, P, Hkv, D], float32 or bfloat16.

    `shares`: whether rows attend together to leading pages that they have in common, where that
    saves reading at least SHARE_BYTES.
    """

    name = "torch"

    def __init__(self, kv: Tensor, num_heads: int, *, shares: bool = True) -> None:
        if not check_dtype(kv.dtype):
            raise ModelNotSupported(f"the torch backend takes float32 or bfloat16, not {kv.dtype}")
        super().__init__(kv, num_heads)
        self.group_size = num_heads // self.num_kv_heads
        self.dtype, self.device = kv.dtype, kv.device
        self._pages = [
            (layer_kv[0].flatten(1), layer_kv[1].flatten(1)) for layer_kv in kv.unbind(0)
        ]  # each [num_pages, P * Hkv * D]
        self._token_bytes = 2 * self.num_kv_heads * self.head_dim * kv.element_size()
        self._shares = shares
        self._workspace = kv.new_empty((2, 0))
        self._plan: Plan | None = None

    def plan(self, batch: ForwardBatch) -> None:
        single = self._plan_single(batch) if batch.num_tokens == 1 else None
        self._plan = single or self._plan_rows(batch)
        self._slot_mapping = batch.slot_mapping

    def attend(self, q: Tensor, layer: int, scale: float | None = None) -> Tensor:
        plan = self._plan
        assert plan is not None, "attend before plan"
        k, v = (slots.index_select(0, plan.slot_mapping) for slots in self._slots[layer])
        return self._run_parts(plan, q, k, v, layer, scale)

    # -- computing ----------------------------------------------------------------------------

    def _run_parts(
        self, plan: Plan, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float | None
    ) -> Tensor:
        """`run` without the storing; k, v [T, Hkv, D] are those of the new tokens."""
        scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        wants_lse = bool(plan.shared)
        outs, all_lse = [], []
        for part in plan.parts:
            if isinstance(part, Single):
                out, lse = self._attend_single(part, q, layer, scale, wants_lse=wants_lse)
            elif isinstance(part, Dense):
                out, lse = self._attend_dense(part, q, k, v, layer, scale, wants_lse=wants_lse)
            else:
                out, lse = self._attend_group(part, q, k, v, layer, scale, wants_lse=wants_lse)
            outs.append(out)
            all_lse.append(lse)
        result = _in_order(outs, plan.out_index)  # [T, Hq, D]
        if wants_lse:
            lse = _in_order([one for one in all_lse if one is not None], plan.out_index)  # [T, Hq]
            for part in plan.shared:
                self._merge_shared(part, result, lse, (q, k, v), layer, scale)
        return result

    def _merge_shared(
        self,
        part: Dense,
        result: Tensor,
        lse: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        layer: int,
        scale: float,
    ) -> None:
        """Add what `part`'s queries see in their shared pages to `result` and `lse`, in place."""
        other, other_lse = self._attend_shared(part, *qkv, layer, scale)
        own, own_lse = _take(result, part.tokens), _take(lse, part.tokens)
        merged = merge_attention(own, own_lse, other, other_lse)
        both = torch.logaddexp(own_lse, other_lse)
        if isinstance(part.tokens, slice):
            result[part.tokens], lse[part.tokens] = merged, both
        else:
            result.index_copy_(0, part.tokens, merged)
            lse.index_copy_(0, part.tokens, both)

    def _attend_shared(
        self, part: Dense, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """[n, Hq, D] and [n, Hq]. All queries see all keys: few of them go in one operation."""
        query = _take(q, part.tokens)
        if len(query) > MAX_FOLDED:
            out, lse = self._attend_dense(part, q, k, v, layer, scale, wants_lse=True)
            assert lse is not None
            return out, lse
        keys, values = self._keys_values(part.keys, part.tokens, k, v, layer)
        shape = (-1, self.num_kv_heads, self.head_dim)
        return dense.attend_all(query, keys.reshape(shape), values.reshape(shape), scale)

    def _attend_single(
        self, part: Single, q: Tensor, layer: int, scale: float, *, wants_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """[1, Hq, D] and, if wanted, [1, Hq]."""
        keys, values = self._slots[layer]
        query = q[part.token].reshape(self.num_kv_heads, self.group_size, self.head_dim)
        if len(part.runs) == 1:
            run = part.runs[0]
            k, v = keys[run].transpose(0, 1)[None], values[run].transpose(0, 1)[None]
            out, lse = _attention(query[None], k, v, None, scale, wants_lse=wants_lse)
            return self._flat(out, lse)
        out, lse = _attend_runs(
            query * scale,
            [keys[run].permute(1, 2, 0) for run in part.runs],
            [values[run].transpose(0, 1) for run in part.runs],
            wants_lse=wants_lse,
        )
        return self._flat(out, lse)

    def _flat(self, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One query's [1, Hq, D] and [1, Hq], whatever the heads' grouping."""
        out = out.reshape(1, self.num_heads, self.head_dim)
        return out, None if lse is None else lse.reshape(1, self.num_heads)

    def _attend_dense(
        self,
        part: Dense,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        scale: float,
        *,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """[n, Hq, D] and, if wanted, [n, Hq]."""
        keys, values = self._keys_values(part.keys, part.tokens, k, v, layer)
        shape = (-1, self.num_kv_heads, self.head_dim)
        keys, values = keys.reshape(shape), values.reshape(shape)
        return dense.attend(
            _take(q, part.tokens),
            keys[: part.kv_len],
            values[: part.kv_len],
            scale,
            is_causal=part.is_causal,
            wants_lse=wants_lse,
        )

    def _attend_group(
        self,
        group: Group,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        scale: float,
        *,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """[B * Lq, Hq, D] and, if wanted, [B * Lq, Hq]."""
        size, q_len, heads, dim = group.size, group.q_len, self.num_heads, self.head_dim
        keys, values = self._keys_values(group.keys, group.tokens, k, v, layer)
        shape = (size, -1, self.num_kv_heads, dim)
        keys = keys.reshape(shape)[:, : group.kv_len].transpose(1, 2)  # [B, Hkv, Lk, D]
        values = values.reshape(shape)[:, : group.kv_len].transpose(1, 2)
        split = (size, q_len, self.num_kv_heads, self.group_size, dim)
        query = _take(q, group.tokens).reshape(split).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out, lse = _attention(query, keys, values, group.mask, scale, wants_lse=wants_lse)
        folded = (size, self.num_kv_heads, self.group_size, q_len)
        out = out.view(*folded, dim).permute(0, 3, 1, 2, 4).reshape(size * q_len, heads, dim)
        if lse is not None:
            lse = lse.view(folded).permute(0, 3, 1, 2).reshape(size * q_len, heads)
        return out, lse

    def _keys_values(
        self, keys: Keys, tokens: slice | Tensor, k: Tensor, v: Tensor, layer: int
    ) -> tuple[Tensor, Tensor]:
        """K and V by slot, in the order of the part's segments."""
        if keys.pages is None:
            return _take(k, tokens), _take(v, tokens)
        if isinstance(keys.pages, slice):
            all_k, all_v = self._slots[layer]
            return all_k[keys.pages], all_v[keys.pages]
        found = [
            torch.index_select(cache, 0, keys.pages, out=room)
            for cache, room in zip(self._pages[layer], keys.rooms or (), strict=True)
        ]
        return found[0], found[1]

    # -- planning -----------------------------------------------------------------------------

    def _plan_single(self, batch: ForwardBatch) -> Plan | None:
        """The plan of a batch of one token that is read in place; None where it is not."""
        host = batch.host
        kv_len, pages = int(host.seq_lens[0]), host.kv_indices
        breaks = np.flatnonzero(pages[1:] - pages[:-1] != 1) + 1
        count = len(breaks) + 1
        if count > 1 and not self._pays_in_place(count, kv_len * self._token_bytes):
            return None
        runs = slots_of(pages, [0, *breaks.tolist(), len(pages)], kv_len, self.page_size)
        return Plan((Single(slice(0, 1), runs),), (), batch.slot_mapping, None)

    def _pays_in_place(self, num_runs: Any, num_bytes: Any) -> Any:
        """Whether keys in so many runs are better not gathered; for numbers or arrays of them.

        Several runs take plain products, which in bfloat16 are slow.
        """
        most = 1 if self.dtype != torch.float32 else np.iinfo(np.int64).max
        return (num_runs <= most) & (num_runs * RUN_BYTES <= num_bytes)

    def _plan_rows(self, batch: ForwardBatch) -> Plan:
        host = batch.host
        nodes = find_shared(host, self.page_size, self._pays_together) if self._shares else []
        segments = cut_segments(host, self.page_size, covered_pages(nodes, len(host.start)))
        parts, order, rest = self._singles(host, segments)
        max_tokens = max(1, GATHER_BYTES // self._token_bytes)
        for members in pack_segments(segments, rest, max_tokens, MAX_FOLDED):
            tokens = token_index(segments, members)  # [B, Lq]
            parts.append(self._part(host, segments, members, tokens))
            order.append(np.where(is_real(segments, members, tokens.shape[1]), tokens, -1).ravel())
        return Plan(
            parts=tuple(parts),
            shared=tuple(self._shared(host, node) for node in nodes),
            slot_mapping=batch.slot_mapping,
            out_index=self._out_index(np.concatenate(order)),
        )

    def _singles(
        self, host: HostIndex, segments: Segments
    ) -> tuple[list[Part], list[IndexArray], IndexArray]:
        """Decodes that are read in place, their tokens, and the numbers of all other segments."""
        everything = np.arange(len(segments.row))
        num_bytes = segments.kv_len * self._token_bytes
        is_long = (segments.num_queries == 1) & (num_bytes >= LONG_BYTES)
        if not is_long.any():
            return [], [], everything
        places, first, end = find_runs(host, segments, self.page_size)
        is_single = is_long & self._pays_in_place(end - first + 1, num_bytes)
        numbers = np.flatnonzero(is_single)
        num_pages = -(-segments.kv_len // self.page_size)
        parts: list[Part] = []
        for token, page, count, kv_len, a, b in zip(
            segments.first_token[numbers].tolist(),
            segments.first_page[numbers].tolist(),
            num_pages[numbers].tolist(),
            segments.kv_len[numbers].tolist(),
            first[numbers].tolist(),
            end[numbers].tolist(),
            strict=True,
        ):
            bounds = [page, *places[a:b].tolist(), page + count]
            runs = slots_of(host.kv_indices, bounds, kv_len, self.page_size)
            parts.append(Single(slice(token, token + 1), runs))
        tokens = [segments.first_token[numbers]]
        return parts, tokens, everything[~is_single]

    def _part(
        self, host: HostIndex, segments: Segments, members: IndexArray, tokens: IndexArray
    ) -> Group | Dense:
        """The segments `members`; `tokens` [B, Lq]."""
        q_len, kv_len = tokens.shape[1], int(segments.kv_len[members].max())
        keys = Keys(None, None)
        if not segments.is_fresh[members[0]]:
            keys = self._keys(host, segments.first_page[members], segments.kv_len[members])
        where = self._range_or_index(tokens.ravel())
        if q_len > MAX_FOLDED:
            return Dense(where, kv_len, keys, is_causal=True)
        mask = self._mask(hidden_keys(segments, members, q_len), q_len)
        return Group(len(members), q_len, kv_len, where, keys, mask)

    def _pays_together(self, num_rows: int, num_tokens: int) -> bool:
        return (num_rows - 1) * num_tokens * self._token_bytes >= SHARE_BYTES

    def _shared(self, host: HostIndex, node: SharedNode) -> Dense:
        first, last = host.qo_indptr[node.rows], host.qo_indptr[node.rows + 1]
        tokens = first
        if bool((last - first > 1).any()):
            tokens = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)])
        kv_len = (node.end - node.first) * self.page_size
        start = host.kv_indptr[node.rows[:1]] + node.first
        keys = self._keys(host, start, np.array([kv_len]))
        return Dense(self._range_or_index(tokens), kv_len, keys, is_causal=False)

    def _keys(self, host: HostIndex, first_page: IndexArray, kv_len: IndexArray) -> Keys:
        """Pages of segments that begin at `first_page` of kv_indices, padded with their last."""
        num_pages = -(-kv_len // self.page_size)
        columns = np.minimum(np.arange(num_pages.max()), num_pages[:, None] - 1)
        pages = host.kv_indices[first_page[:, None] + columns].astype(np.int64)
        if len(kv_len) == 1 and bool((np.diff(pages[0]) == 1).all()):
            first = int(pages[0, 0]) * self.page_size
            return Keys(slice(first, first + int(kv_len[0])), None)
        index = torch.from_numpy(pages.ravel()).to(self.device)
        return Keys(index, self._rooms(len(index)))

    def _rooms(self, num_pages: int) -> tuple[Tensor, ...]:
        """Where K and V are gathered; all parts and layers use the same memory."""
        width = self._pages[0][0].shape[1]
        if num_pages * width > self._workspace.shape[1]:
            self._workspace = self._workspace.new_empty((2, num_pages * width))
        return tuple(room[: num_pages * width].view(-1, width) for room in self._workspace)

    def _mask(self, hidden: np.ndarray | None, q_len: int) -> Tensor | None:
        """[B, 1, Lq, Lk], or [B, 1, G * Lq, Lk] for more than one query a segment."""
        if hidden is None:
            return None
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0.0))
        if q_len > 1 and self.group_size > 1:
            mask = np.tile(mask, (1, self.group_size, 1))
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


def _attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """query [B, Hkv, N, D]; keys, values [B, Hkv, Lk, D]; ([B, Hkv, N, D], [B, Hkv, N] float32)."""
    if wants_lse:
        return attention_with_lse(query, keys, values, mask, scale)
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(query, keys, values, attn_mask=mask, scale=scale), None


def _attend_runs(
    query: Tensor, keys: list[Tensor], values: list[Tensor], *, wants_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """query [Hkv, G, D], scaled; keys, each [Hkv, D, n]; values, each [Hkv, n, D]; float32.

    Returns [Hkv, G, D] and, if wanted, [Hkv, G].
    """
    scores = [torch.bmm(query, run) for run in keys]
    joined = scores[0] if len(scores) == 1 else torch.cat(scores, -1)
    lse = joined.logsumexp(-1) if wants_lse else None
    weights = torch.split(joined.softmax(-1), [run.shape[1] for run in values], -1)
    out = torch.bmm(weights[0], values[0])
    for weight, run in zip(weights[1:], values[1:], strict=True):
        out.baddbmm_(weight, run)
    return out, lse


def _in_order(pieces: list[Tensor], index: Tensor | None) -> Tensor:
    """The pieces end to end, then each token's row."""
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole if index is None else whole.index_select(0, index)


def _take(x: Tensor, tokens: slice | Tensor) -> Tensor:
    return x[tokens] if isinstance(tokens, slice) else x.index_select(0, tokens)
