"""`BlockView`: turns a cache's node events into events of whole blocks.

A cache's events are about nodes of any length. Routers expect blocks of equal size, counted from
the start of a prefix. A block belongs to the node with its last token:

    node            a b c d e f          parent of
    node                        g h i j k
    blocks of 4     [a b c d]   [e f g h]   (i j k: not whole)

Trees drop tokens from the ends of nodes, so a block is removed together with its last token.

Blocks of adapters have their name, as vLLM's have. The tokens of an activated adapter, which the
cache has with a mark, are reported as the ids that they are; a block with some of them is the
adapter's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np

from radixserve.adapters.table import AdapterTable
from radixserve.arrays import IntArray
from radixserve.cache import EventBatch, EventSnapshot
from radixserve.cache.events import ROOT, Appended, Event, Reset, Split, Stored, Truncated
from radixserve.cache.namespace import as_namespace
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.kv_events.schema import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from radixserve.request import FIRST_PICTURE_ID, MAX_TOKEN_IDS, unmarked
from radixserve.token_marks import num_before_mark


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

    def __init__(self, block_size: int, adapters: AdapterTable | None = None) -> None:
        """`adapters`: those that computed some of the blocks."""
        self._block_size = block_size
        self._adapters = AdapterTable() if adapters is None else adapters
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
        blocks = [event for node in nodes for event in self._stored(node, 0)]  # parents first
        return [AllBlocksCleared(), *blocks]

    def _apply_all(self, events: Sequence[Event]) -> Iterable[KVCacheEvent]:
        for event in events:
            yield from self._apply(event)

    def _apply(self, event: Event) -> Iterable[KVCacheEvent]:
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
            return ()
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

    def _hash_new(self, node: _Node) -> Iterable[BlockStored]:
        first, width = len(node.hashes), self._width
        key = node.hashes[-1] if first else node.above
        for start in range(first * width, len(node.tokens) - width + 1, width):
            key = _digest(key.to_bytes(8), node.tokens[start : start + width])
            node.hashes.append(key)
        self._copies.update(node.hashes[first:])
        return self._stored(node, first)

    def _stored(self, node: _Node, first: int) -> Iterator[BlockStored]:
        """Yields the events of a node's blocks from index `first` on: of those that the model
        computed, then of an activated adapter's."""
        width, end = self._width, len(node.hashes)
        data = np.frombuffer(bytes(node.tokens[first * width : end * width]), np.int32)
        keyed = data.reshape(-1, self._block_size)
        num_plain = num_before_mark(data) // self._block_size
        for begin, part in ((first, keyed[:num_plain]), (first + num_plain, keyed[num_plain:])):
            if len(part):
                yield self._blocks(node, begin, part)

    def _blocks(self, node: _Node, begin: int, keyed: IntArray) -> BlockStored:
        """Returns the event of a node's blocks from index `begin` on, whose tokens the cache has as
        `keyed` [blocks, block size]."""
        end, is_root = begin + len(keyed), node.first_block + begin == 0
        last = int(keyed[-1, -1])
        mark = 0 if last >= FIRST_PICTURE_ID else last // MAX_TOKEN_IDS
        number, name, salt = self._owner(node.namespace, mark)
        own = () if name is None else (name,)
        keys = [own] * len(keyed)
        if is_root and salt:
            keys[0] = (*own, salt)
        return BlockStored(
            block_hashes=node.hashes[begin:end],
            parent_block_hash=None if is_root else node.hashes[begin - 1] if begin else node.above,
            token_ids=(unmarked(keyed) if name else keyed).flatten().tolist(),
            block_size=self._block_size,
            lora_id=number,
            medium="GPU",
            lora_name=name,
            extra_keys=[key or None for key in keys] if any(keys) else None,
            cache_salt=salt or None,
        )

    def _owner(self, namespace: str, mark: int) -> tuple[int | None, str | None, str]:
        """Returns number and name of the adapter that computed a block, and its namespace without
        that. `mark`: of the block's last token."""
        place = as_namespace(namespace)
        if mark:
            adapter = self._adapters.numbered.get(mark)
        else:
            adapter = self._adapters.known.get(place.adapter)
        salt = str(place._replace(adapter=""))
        if adapter is not None:
            return adapter.number, adapter.info.name, salt
        return None, place.adapter.rpartition("@")[0] or None, salt

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

    def _remove(self, hashes: list[int]) -> list[KVCacheEvent]:
        gone = []
        for key in reversed(hashes):  # the deepest first
            self._copies[key] -= 1
            if not self._copies[key]:
                del self._copies[key]
                gone.append(key)
        return [BlockRemoved(gone, "GPU")] if gone else []

    def _reset(self, namespace: str) -> list[KVCacheEvent]:
        nodes = [self._nodes.pop(node_id) for node_id in self._namespaces.pop(namespace, ())]
        nodes.sort(key=lambda node: node.first_block)
        removed = self._remove([key for node in nodes for key in node.hashes])
        return [AllBlocksCleared()] if removed and not self._copies else removed


def _digest(*parts: bytes | bytearray) -> int:
    """Returns a 64-bit hash of all parts."""
    return int.from_bytes(blake2b(b"".join(parts), digest_size=8).digest())
