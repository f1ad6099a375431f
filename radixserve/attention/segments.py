"""Cutting a step's rows into segments and packing these into padded groups; numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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


def pack_segments(segments: Segments, max_tokens: int, max_queries: int) -> list[IndexArray]:
    """Segment numbers of each group, ascending; groups in order of their first segment.

    Segments of more than `max_queries` queries are alone. Others of one kind and of query lengths
    within a factor of two, longest first, fill a group until its padding would exceed FREE_WASTE
    tokens and WASTE_SHARE of the real ones.
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
    return sorted((np.sort(group) for group in groups), key=lambda group: int(group[0]))


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
