"""Invariants of both caches, and `dump` of their nodes. Iterative: trees may be deep."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from radixserve.cache.page_pool import PageAllocator
from radixserve.cache.sequence import CacheSequence
from radixserve.cache.watch import WatchRegistry

T = TypeVar("T")


def check_owners(allocator: PageAllocator, published: Iterable[tuple[str, list[int]]]) -> None:
    """AssertionError unless each page has one owner. `published`: names with their pages."""
    owners: dict[int, str] = {}
    private = [
        (repr(seq), seq.pages[len(seq.pages) - seq.num_private :].tolist())
        for seq in live_sequences(allocator)
    ]
    for name, pages in [("the free list", allocator.pool.free_ids()), *published, *private]:
        for page in pages:
            assert 0 <= page < allocator.pool.num_pages, f"{name} has page {page}: no such page"
            assert page not in owners, f"page {page} belongs to {owners[page]} and to {name}"
            owners[page] = name
    lost = [page for page in range(allocator.pool.num_pages) if page not in owners]
    assert not lost, f"pages {lost[:8]} have no owner ({len(lost)} in all)"
    counted = sum(len(pages) for _, pages in private)
    assert allocator.num_private == counted, "private pages miscounted"


def check_tokens(allocator: PageAllocator, sequence: CacheSequence) -> None:
    """Invariants of every sequence, in either cache."""
    name, known = repr(sequence), sequence.length - sequence.num_unknown
    assert not sequence.is_released, f"{name} is registered after its release"
    assert len(sequence.pages) == allocator.pages_for(sequence.length), f"{name} has wrong pages"
    assert sequence.committed_len <= known, f"{name} has committed too much"
    assert (sequence.tokens[known:] == -1).all(), f"{name} knows what it calls unknown"


def check_watches(registry: WatchRegistry) -> None:
    """The registry and the open watches agree: a closed one watches no place."""
    for place, tokens in registry.watched.items():
        assert tokens, f"{place!r} is watched for no token"
        for token, watches in tokens.items():
            assert watches, f"{place!r} is watched by no look-up"
            assert all((place, token) in w.places for w in watches), f"{place!r}: a stale watch"


def live_sequences(allocator: PageAllocator) -> list[CacheSequence]:
    return [seq for seq in allocator.live_sequences if isinstance(seq, CacheSequence)]


class Picture(NamedTuple):
    """What `dump` shows of a node, apart from its place."""

    tokens: bytes | bytearray  # int32
    pages: list[int]
    lock_ref: int
    sequences: int  # that use it


def dump_nodes(
    page_size: int,
    roots: Mapping[str, T],
    children: Callable[[T], Iterable[T]],
    picture: Callable[[T], Picture],
    max_nodes: int,
) -> dict[str, Any]:
    """See `PrefixCache.dump`."""
    queue: deque[tuple[T, dict[str, Any]]] = deque()
    namespaces: dict[str, Any] = {}
    for name, root in sorted(roots.items(), key=lambda item: item[0]):
        namespaces[name] = _as_dict(0, picture(root))
        queue.append((root, namespaces[name]))
    count, truncated = 0, False
    while queue and not truncated:
        node, shown = queue.popleft()
        for child in children(node):
            if count == max_nodes:
                truncated = True
                break
            below = _as_dict(shown["start"] + shown["num_tokens"], picture(child))
            shown["children"].append(below)
            queue.append((child, below))
            count += 1
    return {"page_size": page_size, "truncated": truncated, "namespaces": namespaces}


def _as_dict(start: int, picture: Picture) -> dict[str, Any]:
    tokens = np.frombuffer(bytes(picture.tokens), np.int32).tolist()
    return {
        "start": start,
        "num_tokens": len(tokens),
        **picture._asdict(),
        "tokens": tokens,
        "children": [],
    }
