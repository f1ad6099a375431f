"""Checks and dumps that both caches share. Without recursion, since trees may be deep."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from radixserve.cache.namespace import is_within
from radixserve.cache.sequence import CacheSequence, PageAllocator
from radixserve.cache.snapshot import private_size
from radixserve.cache.watch import WatchRegistry

T = TypeVar("T")


def check_owners(allocator: PageAllocator, published: Iterable[tuple[str, list[int]]]) -> None:
    """AssertionError unless each page has one owner. `published`: names with their pages."""
    owners: dict[int, str] = {}
    private = [
        (repr(seq), seq.pages[len(seq.pages) - seq.num_private :].tolist())
        for seq in allocator.live_sequences
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
    """AssertionError unless a sequence's lengths, tokens and pages agree."""
    name, known = repr(sequence), sequence.length - sequence.num_placeholders
    assert not sequence.is_released, f"{name} is registered after its release"
    assert len(sequence.pages) == allocator.pages_for(sequence.length), f"{name} has wrong pages"
    assert sequence.committed_len <= known, f"{name} has committed too much"
    assert (sequence.tokens[known:] == -1).all(), f"{name} has token ids in its placeholders"


def check_watches(registry: WatchRegistry) -> None:
    """AssertionError unless the registry and the open watches agree."""
    for place, tokens in registry.watched.items():
        assert tokens, f"{place!r} is watched for no token"
        for token, watches in tokens.items():
            assert watches, f"{place!r} is watched by no look-up"
            is_known = all((place, token) in watch.places for watch in watches)
            assert is_known, f"{place!r}: a stale watch"


def page_table(sequence: CacheSequence) -> dict[str, Any]:
    """Returns a sequence as `PrefixCache.dump` shows it."""
    return {
        "length": sequence.length,
        "committed_len": sequence.committed_len,
        "cached_len": sequence.cached_len,
        "num_private": sequence.num_private,
        "pages": sequence.pages.tolist(),
    }


def dump_sequences(
    allocator: PageAllocator, published: Iterable[tuple[int, int]], only: str | None
) -> dict[str, Any]:
    """Returns the part of `PrefixCache.dump` about sequences and fragmentation. `published`: pages
    and tokens of nodes or blocks; `only`: the namespace whose sequences are shown, with those below
    it; None: all."""
    size, sequences = allocator.page_size, allocator.live_sequences
    pages = tokens = 0
    for some_pages, some_tokens in published:
        pages += some_pages
        tokens += some_tokens
    for sequence in sequences:
        private_pages, private_tokens = private_size(sequence, size)
        pages += private_pages
        tokens += private_tokens
    slots = pages * size
    share = (slots - tokens) / slots if slots else 0.0
    return {
        "sequences": [page_table(seq) for seq in sequences if is_within(seq.namespace, only)],
        "fragmentation": {
            "pages": pages,
            "slots": slots,
            "unused_slots": slots - tokens,
            "unused_share": share,
        },
    }


def victim(
    namespace: str, start: int, data: bytes | bytearray, num_pages: int, idle_s: float, reason: str
) -> dict[str, Any]:
    """Returns an entry of `PrefixCache.eviction_preview`; `data`: int32 tokens."""
    tokens = np.frombuffer(bytes(data), np.int32).tolist()
    return {
        "namespace": namespace,
        "start": start,
        "tokens": tokens,
        "num_tokens": len(tokens),
        "num_pages": num_pages,
        "idle_s": idle_s,
        "reason": reason,
    }


def usage_state(sequences: int) -> str:
    """Returns the state of a node that so many sequences use."""
    return "shared" if sequences > 1 else "referenced"


class NodeDump(NamedTuple):
    """What `dump` shows of a node, apart from its place."""

    tokens: bytes | bytearray  # int32
    pages: list[int]
    lock_ref: int
    sequences: int  # that use it
    state: str
    last_use: float | None


def dump_nodes(
    page_size: int,
    roots: Mapping[str, T],
    children: Callable[[T], Iterable[T]],
    describe: Callable[[T], NodeDump],
    max_nodes: int,
) -> dict[str, Any]:
    """Returns the part of `PrefixCache.dump` about nodes."""
    queue: deque[tuple[T, dict[str, Any]]] = deque()
    namespaces: dict[str, Any] = {}
    for name, root in sorted(roots.items(), key=lambda item: item[0]):
        namespaces[name] = _as_dict(0, describe(root))
        queue.append((root, namespaces[name]))
    count, truncated = 0, False
    while queue and not truncated:
        node, shown = queue.popleft()
        for child in children(node):
            if count == max_nodes:
                truncated = True
                break
            below = _as_dict(shown["start"] + shown["num_tokens"], describe(child))
            shown["children"].append(below)
            queue.append((child, below))
            count += 1
    return {"page_size": page_size, "truncated": truncated, "namespaces": namespaces}


def _as_dict(start: int, node: NodeDump) -> dict[str, Any]:
    tokens = np.frombuffer(bytes(node.tokens), np.int32).tolist()
    return {
        "start": start,
        "num_tokens": len(tokens),
        **node._asdict(),
        "tokens": tokens,
        "children": [],
    }
