"""`Part`: some requests of a step as paged kernels want them, as int32 arrays; numpy only.

The names qo_indptr, kv_indptr, kv_indices and last_page_len mean what they mean in FlashInfer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.attention.base import HostIndex, IndexArray

MAX_KERNEL_PAGE_SIZE = 64  # tokens of the largest page that kernels are asked to read


@dataclass(frozen=True, slots=True)
class Part:
    """n requests over neighbouring tokens of a step. Request i has the queries
    [qo_indptr[i], qo_indptr[i + 1]) and reads kv_lens[i] keys on the pages
    kv_indices[kv_indptr[i] : kv_indptr[i + 1]].

    A request may be without pages: its queries see nothing here. Or without queries: padding.
    """

    first: int  # the part's tokens are [first, end) of the plan's order
    end: int
    qo_indptr: IntArray  # [n + 1] from 0 to end - first
    kv_indptr: IntArray  # [n + 1] from 0
    kv_indices: IntArray | slice  # page ids, or which of the batch's kv_indices they are
    last_page_len: IntArray  # [n] tokens in the last page; 0 without pages
    kv_lens: IntArray  # [n]
    max_q: int  # most queries of a request
    is_causal: bool  # the last query sees all keys, the one before it all but the last ...;
    # else every query sees every key

    @property
    def num_requests(self) -> int:
        return len(self.kv_lens)

    @property
    def num_pages(self) -> int:
        return int(self.kv_indptr[-1])

    @property
    def is_decode(self) -> bool:
        """Every request has one query and at least one key."""
        return self.is_causal and self.max_q == 1


def unique_part(
    host: HostIndex, rows: IndexArray, page_size: int, covered: IndexArray, first: int
) -> Part:
    """The `rows`' new tokens against what lies behind each row's first `covered` [R] pages.

    `first`: the place of the first of these tokens in the plan's order.
    """
    num_new = host.qo_indptr[rows + 1] - host.qo_indptr[rows]
    start = host.kv_indptr[rows] + covered[rows]
    count = host.kv_indptr[rows + 1] - start
    kv_lens = host.seq_lens[rows] - covered[rows] * page_size
    qo_indptr = indptr_of(num_new)
    kv_indices: IntArray | slice = slice(int(start[0]), int(start[-1] + count[-1]))
    if not bool((start[1:] == start[:-1] + count[:-1]).all()):
        kv_indices = take_ranges(host.kv_indices, start, count)
    return Part(
        first=first,
        end=first + int(qo_indptr[-1]),
        qo_indptr=qo_indptr,
        kv_indptr=indptr_of(count),
        kv_indices=kv_indices,
        last_page_len=((kv_lens - 1) % page_size + 1).astype(np.int32),
        kv_lens=kv_lens.astype(np.int32),
        max_q=int(num_new.max()),
        is_causal=True,
    )


def pad_part(part: Part, num_requests: int, num_tokens: int) -> Part:
    """The same with exactly `num_requests` requests over `num_tokens` tokens, for fixed shapes.

    Requests that are added to a decode read one token of page 0. Those added to other parts are
    without pages: the first has all tokens that are left over, the others none.
    """
    missing = num_requests - part.num_requests
    room = num_tokens - (part.end - part.first)
    if missing < 0 or room < 0 or (part.is_decode and room != missing) or (room and not missing):
        raise ValueError(
            f"{part.num_requests} requests over {part.end - part.first} tokens do not fit a shape "
            f"of {num_requests} requests over {num_tokens}"
        )
    if not missing:
        return part
    is_decode = part.is_decode
    kv_indices = part.kv_indices
    if is_decode:
        if isinstance(kv_indices, slice):
            raise ValueError("a decode that is to be padded needs its page ids")
        kv_indices = np.concatenate((kv_indices, np.zeros(missing, np.int32)))
    num_new = np.zeros(missing, np.int64)
    num_new[:1] = room
    ones = np.full(missing, int(is_decode))
    return replace(
        part,
        end=part.first + num_tokens,
        qo_indptr=_longer(part.qo_indptr, ones if is_decode else num_new),
        kv_indptr=_longer(part.kv_indptr, ones),
        kv_indices=kv_indices,
        last_page_len=np.concatenate((part.last_page_len, ones), dtype=np.int32),
        kv_lens=np.concatenate((part.kv_lens, ones), dtype=np.int32),
        max_q=max(part.max_q, room if not is_decode else 1),
    )


def choose_kernel_page_size(page_size: int, wanted: int | None = None) -> int:
    """Tokens of a page as kernels are asked to read it, a divisor of `page_size`.

    `wanted`, where it is one; else the largest up to MAX_KERNEL_PAGE_SIZE. Pages of K and V lie
    token after token, so that a page can be read as several smaller ones.
    """
    if wanted is not None:
        if not 0 < wanted <= page_size or page_size % wanted:
            raise ValueError(f"pages of {page_size} tokens cannot be read as pages of {wanted}")
        return wanted
    return max(
        size for size in range(1, min(page_size, MAX_KERNEL_PAGE_SIZE) + 1) if page_size % size == 0
    )


def on_kernel_pages(part: Part, host: HostIndex, page_size: int, size: int) -> Part:
    """The same on pages of `size` tokens, a divisor of `page_size`."""
    if size == page_size:
        return part
    places = part.kv_indices
    pages = host.kv_indices[places] if isinstance(places, slice) else places
    factor = page_size // size
    smaller = np.repeat(pages * np.int32(factor), factor)
    smaller += np.tile(np.arange(factor, dtype=np.int32), len(pages))
    count = -(-part.kv_lens.astype(np.int64) // size)
    first = part.kv_indptr[:-1].astype(np.int64) * factor
    return replace(
        part,
        kv_indptr=indptr_of(count),
        kv_indices=take_ranges(smaller, first, count),
        last_page_len=np.where(part.kv_lens > 0, (part.kv_lens - 1) % size + 1, 0).astype(np.int32),
    )


def indptr_of(lengths: NDArray[np.signedinteger]) -> IntArray:
    """[n + 1] int32: 0 and the running sums."""
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def take_ranges(values: IntArray, first: IndexArray, count: IndexArray) -> IntArray:
    """The ranges [first[i], first[i] + count[i]) of `values`, end to end."""
    if not len(first):
        return values[:0]
    ends = (first + count).tolist()
    return np.concatenate([values[a:b] for a, b in zip(first.tolist(), ends, strict=True)])


def _longer(indptr: IntArray, lengths: NDArray[np.signedinteger]) -> IntArray:
    return np.concatenate((indptr, indptr[-1] + np.cumsum(lengths)), dtype=np.int32)
