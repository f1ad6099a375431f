"""`HashPrefixWatch`: a look-up of whole blocks, repeated only after one of them changed."""

from __future__ import annotations

from bisect import bisect_left

from radixserve.arrays import IntArray
from radixserve.cache.hash.block import Block
from radixserve.cache.hash.block_pool import BlockPool
from radixserve.cache.watch import PrefixWatch


class HashPrefixWatch(PrefixWatch):
    """How many whole blocks of one prompt are cached.

    Blocks of a chain are dropped from its end, so it watches only the last one matched and the
    first one missing. The prompt is hashed once, and only as far as it is cached.
    """

    __slots__ = ("_chain", "_found", "_namespace", "_pool")

    def __init__(self, pool: BlockPool, tokens: IntArray, namespace: str) -> None:
        super().__init__(pool.watch_registry)
        self._pool = pool
        self._namespace = namespace
        num_blocks = max(0, len(tokens) - 1) // pool.block_size
        self._chain = pool.chain(namespace, tokens[: num_blocks * pool.block_size].tobytes())
        self._found: list[Block] = []
        self.refresh()

    @property
    def locked_len(self) -> int:
        """Tokens of `cached_len` in blocks that live sequences hold anyway. O(log blocks)."""
        held = bisect_left(self._found, True, key=lambda block: not block.lock_ref)
        return held * self._pool.block_size

    def path(self) -> tuple[int, ...]:
        """Ids of the blocks matched, from the first on."""
        return tuple([block.block_id for block in self._found])

    def refresh(self) -> None:
        """Look up again, from the last match that is still cached. O(blocks added and removed)."""
        found, chain = self._found, self._chain
        while found and not found[-1].is_listed:
            found.pop()
        self._pool.match(self._namespace, chain, found)
        self.cached_len = len(found) * self._pool.block_size
        places = {(found[-1].key, b"")} if found else set()
        if len(found) < chain.num_blocks:
            places.add((chain.key(len(found)), b""))
        self._watch_at(frozenset(places))
