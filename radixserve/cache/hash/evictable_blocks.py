"""`EvictableBlocks`: locks of findable blocks, and the unlocked ones in the order of eviction."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from radixserve.cache.hash.block import Block

_SLACK = 4096  # entries kept that say nothing any more, beside as many as there are blocks


class EvictableBlocks:
    """Unlocked blocks, least recently used first.

    A release appends its chain whole. What was locked again or used later is skipped when its turn
    comes: a block belongs to the batch whose number is its `batch`.
    """

    __slots__ = ("_batches", "_num_blocks", "_num_entries", "_number")

    def __init__(self) -> None:
        self._batches: deque[tuple[int, list[Block]]] = deque()  # each taken from its end
        self._num_entries = 0  # in all batches
        self._num_blocks = 0  # entries that are unlocked blocks and can be found
        self._number = 0  # of the last batch

    def __len__(self) -> int:
        return self._num_blocks

    def __iter__(self) -> Iterator[Block]:
        """In the order of eviction. O(entries), of which at most half say nothing."""
        for number, blocks in self._batches:
            yield from (block for block in reversed(blocks) if _is_in(block, number))

    def lock(self, blocks: Sequence[Block]) -> None:
        """One more lock on each."""
        fresh = 0
        for block in blocks:
            count = block.lock_ref
            block.lock_ref = count + 1
            if not count:
                fresh += 1
        self._num_blocks -= fresh

    def unlock(self, blocks: list[Block]) -> list[Block]:
        """Undo one `lock` of each, the last one first; the list is this object's from now on.
        Returns those without a lock that cannot be found."""
        number = self._number = self._number + 1
        gone: list[Block] = []
        fresh = 0
        for block in reversed(blocks):
            count = block.lock_ref = block.lock_ref - 1
            if not count:
                if block.is_listed:
                    block.batch = number
                    fresh += 1
                else:
                    gone.append(block)
        if fresh:
            self._num_blocks += fresh
            self._num_entries += len(blocks)
            self._batches.append((number, blocks))
            if self._num_entries > 2 * self._num_blocks + _SLACK:
                self._compact()
        return gone

    def take(self, count: int) -> list[Block]:
        """Remove so many blocks, at most as many as there are, least recently used first. The
        caller makes them impossible to find."""
        taken: list[Block] = []
        while len(taken) < count:
            number, blocks = self._batches[0]
            before = len(blocks)
            while blocks and len(taken) < count:
                block = blocks.pop()
                if block.batch == number and not block.lock_ref and block.is_listed:
                    taken.append(block)
            self._num_entries -= before - len(blocks)
            if not blocks:
                self._batches.popleft()
        self._num_blocks -= count
        return taken

    def forget(self, count: int) -> None:
        """So many unlocked blocks cannot be found any more."""
        self._num_blocks -= count

    def _compact(self) -> None:
        """Drop the entries that say nothing. O(entries), amortised O(1) for each."""
        kept = [(n, [b for b in blocks if _is_in(b, n)]) for n, blocks in self._batches]
        self._batches = deque(batch for batch in kept if batch[1])
        self._num_entries = sum(len(blocks) for _, blocks in self._batches)


def _is_in(block: Block, number: int) -> bool:
    """Whether a block of that batch is unlocked and was not used later."""
    return block.batch == number and not block.lock_ref and block.is_listed
