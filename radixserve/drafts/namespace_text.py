"""`NamespaceText`: what followed when the request's last tokens occurred in other requests of its
namespace, as far as the cache still has them.

A table finds the place of a run of tokens by its hash: 8 bytes for each place, no copy of the text.
A place is a position on the path to a node of the tree; what the tree has there is compared with
the request's tokens before it is used. So a place goes with its node: what was evicted is not
found. Places of one hash replace each other, and a full table forgets the oldest ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.cache import PrefixCache
from radixserve.cache.radix.node import Node, path
from radixserve.cache.radix.sequence import RadixSequence
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.drafts.runs import hash_run, hash_runs
from radixserve.drafts.source import DraftContext, DraftSource

RUN_TOKENS = 5  # looked for
FOLLOWED_TOKENS = 256  # read at a time from the place that was found
MOST_NODES = 1 << 16  # on paths to which places lie
_LEAST_BITS, _MOST_BITS = 12, 20  # of the number of places
_SWEPT_NODES = 16  # looked at, with each request that ends, to let evicted ones go
_NONE: IntArray = np.empty(0, np.int32)


class NamespaceText(DraftSource):
    """Indexes the computed tokens of each request when it ends."""

    name = "namespace"

    def __init__(self, cache: PrefixCache) -> None:
        num_tokens = cache.num_pages * cache.page_size
        bits = min(max(num_tokens.bit_length(), _LEAST_BITS), _MOST_BITS)
        self._shift = 64 - bits
        # By hash: 16 further bits of it, the number of a node, 16 bits, and where the run ends on
        # the path to that. 0: no place.
        self._places: NDArray[np.uint64] = np.zeros(1 << bits, np.uint64)
        self._nodes: list[Node | None] = []  # by number; the numbers of old ones are used again
        self._next_number = self._next_swept = 0

    def draft(self, context: DraftContext, most: int) -> Sequence[int] | None:
        followed: _FollowedText | None = context.kept.get(self)
        if followed is None:
            if not isinstance(context.sequence, RadixSequence):
                return None
            followed = context.kept[self] = _FollowedText(_seed(context.sequence.namespace))
        tokens, text = context.tokens, followed.text
        if len(text):
            passed = len(tokens) - followed.size
            is_right = text[:passed].tobytes() == tokens[followed.size :].tobytes()
            text = text[passed:] if is_right else _NONE
        if not len(text):
            run = tokens[-RUN_TOKENS:].tolist()
            value = hash_run(run, followed.seed)
            place = int(self._places[value >> self._shift])
            if not place or place >> 48 != value & 0xFFFF:
                followed.text = _NONE
                return ()
            text = self._read(place, run, context)
        followed.text, followed.size = text, len(tokens)
        found: list[int] = text[:most].tolist()
        return found

    def end(self, context: DraftContext) -> None:
        sequence = context.sequence
        if not isinstance(sequence, RadixSequence) or sequence.is_stale:
            return
        start, end = max(0, sequence.cached_len - RUN_TOKENS), sequence.committed_len
        if end - start > RUN_TOKENS:
            self._add(sequence.last_node, sequence.tokens[start:end], start)
        self._sweep()

    def stats(self) -> dict[str, int]:
        return {"index_bytes": self._places.nbytes}

    @property
    def num_held_nodes(self) -> int:
        """Nodes that it refers to. O(nodes)."""
        return len(self._nodes) - self._nodes.count(None)

    def _add(self, node: Node, tokens: IntArray, start: int) -> None:
        """Index all runs of `tokens`, which begin at position `start` of the path to `node`."""
        number = self._next_number % MOST_NODES
        self._next_number += 1
        if number == len(self._nodes):
            self._nodes.append(node)
        else:
            self._nodes[number] = node
        hashes = hash_runs(tokens, RUN_TOKENS, _seed(node.namespace.text))
        ends = np.arange(start + RUN_TOKENS, start + len(tokens) + 1, dtype=np.uint64)
        tags = (hashes & np.uint64(0xFFFF)) << np.uint64(48)
        self._places[hashes >> np.uint64(self._shift)] = tags | np.uint64(number << 32) | ends

    def _read(self, place: int, run: Sequence[int], context: DraftContext) -> IntArray:
        """Returns the tokens after a place where `run` should end; empty if it does not."""
        sequence = context.sequence
        assert isinstance(sequence, RadixSequence)
        node, tree = self._nodes[place >> 32 & 0xFFFF], sequence.last_node.namespace
        if node is None or node.parent is None or node.namespace is not tree or tree.is_dead:
            return _NONE
        text = _text_of(node, (place & 0xFFFFFFFF) - RUN_TOKENS, RUN_TOKENS + FOLLOWED_TOKENS)
        return text[RUN_TOKENS:] if text[:RUN_TOKENS].tolist() == run else _NONE

    def _sweep(self) -> None:
        """Let some of the nodes go that were evicted: they hold their tokens."""
        for number in range(self._next_swept, self._next_swept + _SWEPT_NODES):
            index = number % max(1, len(self._nodes))
            node = self._nodes[index] if self._nodes else None
            if node is not None and (node.parent is None or node.namespace.is_dead):
                self._nodes[index] = None
        self._next_swept += _SWEPT_NODES


class _FollowedText:
    """What is expected after a request's tokens."""

    __slots__ = ("seed", "size", "text")

    def __init__(self, seed: int) -> None:
        self.seed = seed  # of its namespace's hashes
        self.size = 0  # tokens at the last draft
        self.text = _NONE  # expected then


def _seed(namespace: str) -> int:
    return zlib.crc32(namespace.encode())


def _text_of(node: Node, start: int, most: int) -> IntArray:
    """Returns up to `most` tokens from position `start` on of the path to `node`; empty if it ends
    before."""
    pieces: list[bytes | bytearray] = []
    for above in path(node):
        offset = max(0, start - above.start) * TOKEN_BYTES
        pieces.append(above.tokens[offset : offset + most * TOKEN_BYTES])
        if above.start <= start:
            break
    text = b"".join(reversed(pieces))[: most * TOKEN_BYTES]
    return np.frombuffer(text, np.int32)
