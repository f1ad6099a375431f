"""Cutting a step's rows into segments and packing these into padded groups; numpy only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixserve.attention.base import HostIndex, IndexArray

FREE_WASTE = 512  # padded K/V tokens in a group that cost less than another group would
WASTE_SHARE = 0.25  # or padding up to this share of its real tokens
MASK_ELEMENTS = 4 << 20  # of a group of several segments


@dataclass(frozen=True, slots=True)
class Segments:
    """Each row's own part: its new tokens, and the keys behind what it shares with others.

    row    |-- shared pages --|-- own keys before the step --|-- new tokens --|
                              |<--------------- kv_len ---------------------->|
    """

    row: IndexArray
    first_token: IndexArray  # index into the batch's T tokens
    num_queries: IndexArray
    first_page: IndexArray  # index into kv_indices
    kv_len: IndexArray  # keys from there on, up to and with the last query
    is_fresh: np.ndarray  # bool: all those keys are the step's own


def cut_segments(host: HostIndex, page_size: int, shared_pages: IndexArray) -> Segments:
    """One segment a row, behind its first `shared_pages` pages."""
    num_new = np.diff(host.qo_indptr)
    first_key = shared_pages * page_size
    return Segments(
        row=np.arange(len(num_new)),
        first_token=host.qo_indptr[:-1],
        num_queries=num_new,
        first_page=host.kv_indptr[:-1] + shared_pages,
        kv_len=host.seq_lens - first_key,
        is_fresh=host.start == first_key,
    )


def pack_segments(
    segments: Segments, numbers: IndexArray, max_tokens: int, max_queries: int
) -> list[IndexArray]:
    """The segments `numbers` in groups: those of each, ascending; in order of their first one.

    Segments of more than `max_queries` queries are alone. Others of one kind and of query lengths
    within a factor of two, longest first, fill a group until its padding would exceed FREE_WASTE
    tokens and WASTE_SHARE of the real ones.
    """
    if not len(numbers):
        return []
    num_queries, kv_len = segments.num_queries[numbers], segments.kv_len[numbers]
    kind = np.ceil(np.log2(num_queries)).astype(np.int64) * 2 + segments.is_fresh[numbers]
    size, tallest, real = len(numbers), int(kv_len.max()), int(kv_len.sum())
    longest = int(num_queries.max())
    if (
        bool((kind == kind[0]).all())
        and (size == 1 or longest <= max_queries)
        and size * tallest - real <= max(FREE_WASTE, WASTE_SHARE * real)
        and size * tallest <= max_tokens
        and size * tallest * longest <= MASK_ELEMENTS
    ):
        return [numbers]
    order = np.lexsort((-kv_len, kind))
    groups = _fill_groups(kind, kv_len, num_queries, order, max_tokens, max_queries)
    packed = [numbers[np.sort(group)] for group in groups]
    return sorted(packed, key=lambda group: int(group[0]))


def _fill_groups(
    kind: IndexArray,
    kv_len: IndexArray,
    num_queries: IndexArray,
    order: IndexArray,
    max_tokens: int,
    max_queries: int,
) -> list[list[int]]:
    """See `pack_segments`; segments are considered in `order`."""
    groups: list[list[int]] = []
    group_kind = tallest = real = q_len = 0
    for number, its_kind, length, queries in zip(
        order.tolist(),
        kind[order].tolist(),
        kv_len[order].tolist(),
        num_queries[order].tolist(),
        strict=True,
    ):
        size = len(groups[-1]) + 1 if groups else 1
        waste = size * tallest - real - length
        if (
            not groups
            or its_kind != group_kind
            or max(q_len, queries) > max_queries
            or waste > max(FREE_WASTE, WASTE_SHARE * (real + length))
            or size * tallest > max_tokens
            or size * tallest * max(q_len, queries) > MASK_ELEMENTS
        ):
            groups.append([])
            group_kind, tallest, real, q_len = its_kind, length, 0, 0
        groups[-1].append(number)
        real += length
        q_len = max(q_len, queries)
    return groups


def find_runs(
    host: HostIndex, segments: Segments, page_size: int
) -> tuple[IndexArray, IndexArray, IndexArray]:
    """Where contiguous runs of pages begin in kv_indices, and which of these places lie inside
    each segment: (places, first, end), segment s has places[first[s] : end[s]] and one run more."""
    places = np.flatnonzero(host.kv_indices[1:] - host.kv_indices[:-1] != 1) + 1
    last_page = segments.first_page + -(-segments.kv_len // page_size)
    first = places.searchsorted(segments.first_page, "right")
    return places, first, np.maximum(places.searchsorted(last_page), first)


def slots_of(
    page_ids: NDArray[np.int32], bounds: Sequence[int], num_tokens: int, page_size: int
) -> tuple[slice, ...]:
    """Slots of the first `num_tokens` tokens on contiguous pages between each two `bounds`."""
    slots = []
    for first, end in itertools.pairwise(bounds):
        slot = int(page_ids[first]) * page_size
        slots.append(slice(slot, slot + min((end - first) * page_size, num_tokens)))
        num_tokens -= (end - first) * page_size
    return tuple(slots)


def token_index(segments: Segments, members: IndexArray) -> IndexArray:
    """[B, Lq] the batch's token of each query; padding repeats a segment's last one."""
    num_queries = segments.num_queries[members][:, None]
    steps = np.minimum(np.arange(num_queries.max()), num_queries - 1)
    return segments.first_token[members][:, None] + steps


def is_real(segments: Segments, members: IndexArray, q_len: int) -> np.ndarray:
    """[B, Lq] which of them are no padding."""
    return np.arange(q_len) < segments.num_queries[members][:, None]


def hidden_keys(segments: Segments, members: IndexArray, q_len: int) -> np.ndarray | None:
    """[B, Lq, Lk] bool, the keys that a query must not see; None when it may see all."""
    kv_len, num_queries = segments.kv_len[members], segments.num_queries[members]
    if q_len == 1 and bool((kv_len == kv_len[0]).all()):
        return None
    steps = np.minimum(np.arange(q_len), num_queries[:, None] - 1)
    last_key = (kv_len - num_queries)[:, None] + steps  # [B, Lq] a query sees keys up to here
    return np.asarray(np.arange(kv_len.max()) > last_key[..., None])
