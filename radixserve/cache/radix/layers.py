"""`RadixLayers`: the plug point of a tree for layers whose memory is not its K/V pages.

What such layers keep of a prefix may be missing although the prefix's K/V is cached. So they decide
how much of a match a new sequence can resume, and make the sequence. A cache without such layers
has none of these calls.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from radixserve.cache.layers import CacheLayers
from radixserve.cache.lookup import MissReason
from radixserve.cache.page_pool import PagePool
from radixserve.cache.radix.eviction import EvictionOrder
from radixserve.cache.radix.node import Match, Node
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.cache.radix.sequence import RadixSequence
from radixserve.cache.sequence import PageAllocator


class RadixLayers(CacheLayers):
    """The further layers of one `RadixCache`, which calls these methods.

    `resumable_prefix` and `has_room_for_copy` change nothing.
    """

    missing_reason: MissReason  # of a look-up that ends where K/V is cached and these layers lack

    # -- the parts of a cache -----------------------------------------------------------------

    def make_pool(self, num_pages: int) -> PagePool:
        """Returns the cache's page pool."""
        return PagePool(num_pages)

    def make_tree(self, pool: PagePool, page_size: int, order: EvictionOrder) -> RadixTree:
        """Returns the cache's tree."""
        return RadixTree(pool, page_size, order)

    def make_allocator(
        self, pool: PagePool, page_size: int, tree: RadixTree, clock: Callable[[], float]
    ) -> PageAllocator:
        """Returns the cache's allocator."""
        return PageAllocator(pool, page_size, tree, clock)

    # -- a sequence ---------------------------------------------------------------------------

    @abstractmethod
    def resumable_prefix(self, node: Node, length: int, multiple_of: int = 1) -> tuple[int, Node]:
        """Returns the longest prefix of a match that a sequence can resume, and the node with its
        last token. The match has `length` tokens, the last of them in `node`. `multiple_of`: the
        page size, where the prefix must have whole pages; `length` has then, too."""

    def has_room_for_copy(self, node: Node, length: int) -> bool:
        """Whether these layers have room for the copy of the partial page at the end of that
        prefix."""
        del node, length
        return True

    def begin_sequence(self, match: Match, node: Node, length: int) -> None:
        """Called when the resumable prefix of `match` is locked: `length` tokens, the last of them
        in `node`. `make_sequence` follows."""

    @abstractmethod
    def make_sequence(
        self, *parts: Any, match_len: int, limit: int, num_tokens: int
    ) -> RadixSequence:
        """Returns a new sequence. `parts`: the arguments of `RadixSequence`; `match_len`: tokens
        whose K/V is cached; `limit`: tokens of the prompt that were looked for; `num_tokens`: all
        of its tokens."""

    # -- inspection ---------------------------------------------------------------------------

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Returns counters and gauges that `RadixCache.stats` shows. O(1)."""

    @abstractmethod
    def check(self, pool: PagePool, nodes: list[Node], sequences: list[RadixSequence]) -> None:
        """AssertionError at the first broken invariant. `nodes`: all of the tree; `sequences`: all
        live ones."""
