"""`BlockView`: turns a cache's node events into events of whole blocks.

A cache's events are about nodes of any length. Routers expect blocks of equal size, counted from
the start of a prefix. A block belongs to the node with its last token:

    node            a b c d e f          parent of
    node                        g h i j k
    blocks of 4     [a b c d]   [e f g h]   (i j k: not whole)

Trees drop tokens from the ends of nodes, so a block is removed together with its last token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from radixserve.cache import EventBatch, EventSnapshot
from radixserve.cache.events import ROOT, Appended, Event, Reset, Split, Stored, Truncated
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent


class _Node:
    __slots__ = ("above", "first_block", "hashes", "namespace", "tokens")

    def __init__(self, namespace: str, first_block: int, above: int, tokens: bytes) -> None:
        self.namespace = namespace
        self.first_block = first_block  # number of whole blocks in the nodes above
        self.above = above  # hash of the last of these blocks; the namespace's hash without any
        self.tokens = bytearray(tokens)  # int32, from the end of that block on
        self.hashes: list[int] = []  # of the whole blocks in `tokens`


class BlockView:
    """Turns node events into block events. Takes 4 bytes per cached token and about 100 per
    block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._width = block_size * TOKEN_BYTES
        self._nodes: dict[int, _Node] = {}
        self._namespaces: dict[str, set[int]] = {}  # their nodes
        # By hash: nodes with that block. Leaves of one page may begin with the same tokens.
        self._copies: Counter[int] = Counter()

    def restart(self, snapshot: EventSnapshot) -> list[KVCacheEvent]:
        """Replace the known nodes by a snapshot. Returns the block events of all its blocks, after
        one that clears the old ones."""
        self._nodes.clear()
        self._namespaces.clear()
        self._copies.clear()
        return [AllBlocksCleared(), *self._apply_all(snapshot.nodes)]

    def apply(self, batch: EventBatch) -> list[KVCacheEvent]:
        """Returns the block events of the next batch. O(tokens stored + blocks removed)."""
        return list(self._apply_all(batch.events))

    def stored(self) -> list[KVCacheEvent]:
        """Returns the events of all stored blocks, for a consumer without a state."""
        nodes = sorted(self._nodes.values(), key=lambda node: node.first_block)
        blocks = [self._stored(node, 0) for node in nodes if node.hashes]  # parents first
        return [AllBlocksCleared(), *blocks]

    def _apply_all(self, events: Sequence[Event]) -> Iterable[KVCacheEvent]:
        for event in events:
            change = self._apply(event)
            if change is not None:
                yield change

    def _apply(self, event: Event) -> KVCacheEvent | None:
        if isinstance(event, Reset):
            return self._reset(event.namespace)
        if isinstance(event, Stored):
            node = self._nodes[event.node] = self._child(event)
            self._namespaces.setdefault(event.namespace, set()).add(event.node)
            return self._hash_new(node)
        node = self._nodes[event.node]
        if isinstance(event, Appended):
            node.tokens += event.tokens
            return self._hash_new(node)
        if isinstance(event, Split):
            self._split(node, event)
            return None
        if isinstance(event, Truncated):
            del node.tokens[-event.num_tokens * TOKEN_BYTES :]
        else:
            del self._nodes[event.node]
            self._namespaces[node.namespace].remove(event.node)
            if not self._namespaces[node.namespace]:
                del self._namespaces[node.namespace]
            node.tokens.clear()
        kept = len(node.tokens) // self._width
        gone, node.hashes = node.hashes[kept:], node.hashes[:kept]
        return self._remove(gone)

    def _child(self, event: Stored) -> _Node:
        if event.parent == ROOT:
            namespace_hash = _digest(event.namespace.encode())
            return _Node(event.namespace, 0, namespace_hash, event.tokens)
        parent = self._nodes[event.parent]
        whole = len(parent.hashes)
        above = parent.hashes[-1] if whole else parent.above
        head = bytes(parent.tokens[whole * self._width :])
        return _Node(event.namespace, parent.first_block + whole, above, head + event.tokens)

    def _hash_new(self, node: _Node) -> BlockStored | None:
        first, width = len(node.hashes), self._width
        key = node.hashes[-1] if first else node.above
        for start in range(first * width, len(node.tokens) - width + 1, width):
            key = _digest(key.to_bytes(8), node.tokens[start : start + width])
            node.hashes.append(key)
        self._copies.update(node.hashes[first:])
        return self._stored(node, first) if len(node.hashes) > first else None

    def _stored(self, node: _Node, first: int) -> BlockStored:
        """Returns the event of a node's blocks from index `first` on."""
        hashes, width = node.hashes[first:], self._width
        data = node.tokens[first * width : len(node.hashes) * width]
        is_root = node.first_block + first == 0
        parent = node.hashes[first - 1] if first else node.above
        keys: list[tuple[str, ...] | None] | None = None
        if is_root and node.namespace:
            keys = [(node.namespace,), *[None] * (len(hashes) - 1)]
        return BlockStored(
            block_hashes=hashes,
            parent_block_hash=None if is_root else parent,
            token_ids=np.frombuffer(bytes(data), np.int32).tolist(),
            block_size=self._block_size,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=keys,
            cache_salt=node.namespace or None,
        )

    def _split(self, lower: _Node, event: Split) -> None:
        size = len(lower.tokens) - event.num_tokens * TOKEN_BYTES
        whole = size // self._width
        upper = _Node(lower.namespace, lower.first_block, lower.above, bytes(lower.tokens[:size]))
        upper.hashes = lower.hashes[:whole]
        self._nodes[event.upper] = upper
        self._namespaces[lower.namespace].add(event.upper)
        if whole:
            lower.above = upper.hashes[-1]
        lower.first_block += whole
        del lower.hashes[:whole], lower.tokens[: whole * self._width]

    def _remove(self, hashes: list[int]) -> BlockRemoved | None:
        gone = []
        for key in reversed(hashes):  # the deepest first
            self._copies[key] -= 1
            if not self._copies[key]:
                del self._copies[key]
                gone.append(key)
        return BlockRemoved(gone, "GPU") if gone else None

    def _reset(self, namespace: str) -> KVCacheEvent | None:
        nodes = [self._nodes.pop(node_id) for node_id in self._namespaces.pop(namespace, ())]
        nodes.sort(key=lambda node: node.first_block)
        removed = self._remove([key for node in nodes for key in node.hashes])
        return AllBlocksCleared() if removed and not self._copies else removed


def _digest(*parts: bytes | bytearray) -> int:
    """Returns a 64-bit hash of all parts."""
    return int.from_bytes(blake2b(b"".join(parts), digest_size=8).digest())
