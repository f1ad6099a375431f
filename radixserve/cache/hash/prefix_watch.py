"""`HashPrefixWatch`: a look-up that is repeated only when a block came or went where it ended."""

from __future__ import annotations

from bisect import bisect_left

from radixserve.arrays import IntArray
from radixserve.cache.hash.block import Block, BlockWatcher
from radixserve.cache.hash.block_pool import BlockPool


class HashPrefixWatch(BlockWatcher):
    """How many whole blocks of one prompt are cached, for a waiting request. Read-only.

    Blocks of a chain are dropped from its end, so the last one matched and the first one missing
    are all that has to be watched. The prompt is hashed once, and only as far as it is cached.
    """

    __slots__ = ("_chain", "_found", "_namespace", "_pool", "_watched", "cached_len")

    def __init__(self, pool: BlockPool, tokens: IntArray, namespace: str) -> None:
        self._pool = pool
        self._namespace = namespace
        num_blocks = max(0, len(tokens) - 1) // pool.block_size
        self._chain = pool.chain(namespace, tokens[: num_blocks * pool.block_size].tobytes())
        self._found: list[Block] = []
        self._watched: set[bytes] = set()
        self.cached_len = 0  # tokens in the cache, at most all but the last one
        self.refresh()

    @property
    def locked_len(self) -> int:
        """Of `cached_len`, tokens in blocks that live sequences hold anyway. O(log blocks)."""
        held = bisect_left(self._found, True, key=lambda block: not block.lock_ref)
        return held * self._pool.block_size

    def path(self) -> tuple[int, ...]:
        """Serial numbers of the blocks matched, from the first on."""
        return tuple([block.block_id for block in self._found])

    def refresh(self) -> None:
        """Look again, going on from what is still there. O(blocks that came and went)."""
        found, chain = self._found, self._chain
        while found and not found[-1].is_listed:
            found.pop()
        self._pool.match(self._namespace, chain, found)
        self.cached_len = len(found) * self._pool.block_size
        wanted = {found[-1].key} if found else set()
        if len(found) < chain.num_blocks:
            wanted.add(chain.key(len(found)))
        if wanted != self._watched:
            self._unwatch()
            self._watched = wanted
            for key in wanted:
                self._pool.watch_registry.add(key, self)

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        self._unwatch()
        self._pool.watch_registry.close(self)

    def _unwatch(self) -> None:
        for key in self._watched:
            self._pool.watch_registry.remove(key, self)
        self._watched = set()
