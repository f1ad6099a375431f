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
from radixserve.drafts.source import DraftContext, DraftSource

RUN_TOKENS = 5  # looked for
FOLLOWED_TOKENS = 256  # read at a time from the place that was found
MOST_NODES = 1 << 16  # on paths to which places lie
_LEAST_BITS, _MOST_BITS = 12, 20  # of the number of places
_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
_POWERS = [pow(_MULTIPLIER, RUN_TOKENS - 1 - index, 1 << 64) for index in range(RUN_TOKENS)]
_SWEPT_NODES = 16  # looked at, with each request that ends, to let evicted ones go


class NamespaceText(DraftSource):
    """Indexes the computed tokens of each request when it ends."""

    name = "namespace"

    def __init__(self, cache: PrefixCache) -> None:
        num_tokens = cache.num_pages * cache.page_size
        bits = min(max(num_tokens.bit_length(), _LEAST_BITS), _MOST_BITS)
        self._shift = 64 - bits
        self._node_at: IntArray = np.full(1 << bits, -1, np.int32)  # by hash: number of a node
        self._end_at: IntArray = np.zeros(1 << bits, np.int32)  # and where the run ends
        self._nodes: list[Node | None] = []  # by number; the numbers of old ones are used again
        self._next_number = self._next_swept = 0
        # By request id: number of its tokens at the last draft, and what was expected then.
        self._followed: dict[str, tuple[int, IntArray]] = {}

    def draft(self, context: DraftContext, most: int) -> Sequence[int]:
        tokens, name = context.tokens, context.request.request_id
        size = len(tokens)
        num_before, text = self._followed.get(name, (size, tokens[:0]))
        passed = size - num_before
        if not passed < len(text) or (text[:passed] != tokens[num_before:]).any():
            text = self._find(context)
        else:
            text = text[passed:]
        self._followed[name] = size, text
        found: list[int] = text[:most].tolist()
        return found

    def end(self, context: DraftContext) -> None:
        self._followed.pop(context.request.request_id, None)
        sequence = context.sequence
        if not isinstance(sequence, RadixSequence) or sequence.is_stale:
            return
        start, end = max(0, sequence.cached_len - RUN_TOKENS), sequence.committed_len
        if end - start > RUN_TOKENS:
            self._add(sequence.last_node, sequence.tokens[start:end], start)
        self._sweep()

    def stats(self) -> dict[str, int]:
        return {"index_bytes": self._node_at.nbytes + self._end_at.nbytes}

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
        places = self._places(tokens, node.namespace.text)
        self._node_at[places] = number
        self._end_at[places] = np.arange(start + RUN_TOKENS, start + len(tokens) + 1)

    def _places(self, tokens: IntArray, namespace: str) -> NDArray[np.uint64]:
        """[n - RUN_TOKENS + 1] the places in the table of all runs among n tokens."""
        count = len(tokens) - RUN_TOKENS + 1
        values = tokens.astype(np.uint64)
        hashes = np.full(count, _seed(namespace), np.uint64)
        for index, power in enumerate(_POWERS):
            hashes += values[index : index + count] * np.uint64(power)
        hashes ^= hashes >> np.uint64(32)
        return (hashes * np.uint64(_MULTIPLIER)) >> np.uint64(self._shift)

    def _place(self, run: Sequence[int], namespace: str) -> int:
        """The place of one run."""
        value = _seed(namespace)
        for token_id, power in zip(run, _POWERS, strict=True):
            value += token_id * power
        value &= _MASK
        value ^= value >> 32
        return (value * _MULTIPLIER & _MASK) >> self._shift

    def _find(self, context: DraftContext) -> IntArray:
        """Returns the tokens after the run that the request ends with; empty without one."""
        tokens = context.tokens
        if len(tokens) < RUN_TOKENS:
            return tokens[:0]
        run, namespace = tokens[-RUN_TOKENS:], context.request.params.namespace
        place = self._place(run.tolist(), namespace)
        number = int(self._node_at[place])
        node = self._nodes[number] if number >= 0 else None
        if node is None or node.parent is None or node.namespace.is_dead:
            return tokens[:0]
        if node.namespace.text != namespace:
            return tokens[:0]
        end = int(self._end_at[place])
        first = end - RUN_TOKENS
        text = _text_of(node, first, RUN_TOKENS + FOLLOWED_TOKENS)
        if len(text) <= RUN_TOKENS or (text[:RUN_TOKENS] != run).any():
            return tokens[:0]
        return text[RUN_TOKENS:]

    def _sweep(self) -> None:
        """Let some of the nodes go that were evicted: they hold their tokens."""
        for number in range(self._next_swept, self._next_swept + _SWEPT_NODES):
            index = number % max(1, len(self._nodes))
            node = self._nodes[index] if self._nodes else None
            if node is not None and (node.parent is None or node.namespace.is_dead):
                self._nodes[index] = None
        self._next_swept += _SWEPT_NODES


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
