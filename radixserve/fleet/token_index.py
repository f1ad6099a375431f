"""`TokenIndex`: which replicas have which tokens cached, exact to the token, by their cache events.

The index is one tree of token edges for all replicas. An edge has a bit for each replica that has
its tokens cached. An edge ends where tokens diverge, where a replica's node ends, and where an open
request's prompt ends. A replica's bit is its number. A removed replica's number is reused when its
bits have been cleared, which happens a few at a time, with each batch of events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.events import (
    ROOT,
    Appended,
    Event,
    EventBatch,
    EventSnapshot,
    Removed,
    Reset,
    Split,
    Stored,
    Truncated,
)
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.fleet.index_node import (
    NEVER,
    NO_CHILDREN,
    HoldingReplica,
    IndexNode,
    Matched,
    Reservation,
    Reserved,
    Root,
)

WORK_HALF_LIFE_S = 3600.0
NO_NEED = (float("inf"), 0.0)
_SWEPT = 64  # nodes of removed replicas that are cleared with each batch of events


class TokenIndex:
    """The cached tokens of all replicas. A replica is known by its name from `add` to `remove`.
    Owned by one thread.

    Memory: 4 bytes per token that any replica has cached, about 250 bytes per edge, and about 100
    bytes per node of each replica.
    """

    def __init__(self) -> None:
        self.num_edges = 0
        self.num_tokens = 0  # in all edges
        self.now = 0.0  # seconds, set by the owner: the time of use of what is stored or reserved
        self._roots: dict[str, Root] = {}  # by namespace
        self._holders: dict[str, HoldingReplica] = {}
        self._live = 0  # bits of all replicas
        self._numbers = 0  # bits in use, those of removed replicas included
        self._removed: deque[tuple[int, Iterator[IndexNode]]] = deque()

    # -- replicas -----------------------------------------------------------------------------

    def add(self, replica: str) -> int:
        """Add a replica with an empty cache. Returns its number. Its events are ignored until its
        first snapshot."""
        assert replica not in self._holders
        number = (~self._numbers & (self._numbers + 1)).bit_length() - 1  # the lowest bit not set
        self._numbers |= 1 << number
        self._live |= 1 << number
        self._holders[replica] = HoldingReplica(number)
        return number

    def remove(self, replica: str) -> None:
        """Remove a replica. `match` ignores its tokens from now on. O(1)."""
        holder = self._holders.pop(replica)
        self._live &= ~(1 << holder.number)
        self._removed.append((holder.number, iter(holder.ends.values())))

    def number(self, replica: str) -> int:
        return self._holders[replica].number

    def needs_snapshot(self, replica: str) -> bool:
        """Whether events of the replica are missing: later ones are ignored until a snapshot."""
        return self._holders[replica].cursor.is_lost

    def next_event(self, replica: str) -> int:
        """The number of the replica's next event."""
        return self._holders[replica].cursor.end

    def evicted_at(self, replica: str) -> float:
        """The last use of the tokens that the replica evicted last; NEVER before an eviction.

        With LRU, all tokens that it still has were used later. O(1).
        """
        return self._holders[replica].evicted_at

    # -- events -------------------------------------------------------------------------------

    def take(self, replica: str, batch: EventBatch) -> None:
        """Apply the events of `batch` that are new: stored, evicted (Removed, Truncated), split and
        reset tokens. About 3 us per event, and O(tokens in it)."""
        holder = self._holders[replica]
        for event in holder.cursor.accept(batch):
            self._apply(holder, event)
        if self._removed:
            self._sweep()

    def restart(self, replica: str, snapshot: EventSnapshot) -> bool:
        """Replace what is known of the replica by `snapshot`, if that is newer. Returns whether it
        was. O(tokens in both)."""
        holder = self._holders[replica]
        if not holder.cursor.restart(snapshot):
            return False
        for node in holder.ends.values():
            self._clear_up(node, 1 << holder.number)
        holder.ends.clear()
        holder.evicted_at = NEVER
        for stored in snapshot.nodes:
            self._apply(holder, stored)
        return True

    def _apply(self, holder: HoldingReplica, event: Event) -> None:
        ends = holder.ends
        if isinstance(event, Stored):
            above = self._root(event.namespace) if event.parent == ROOT else ends[event.parent]
            ends[event.node] = self._store(above, event.tokens, 1 << holder.number)
        elif isinstance(event, Appended):
            ends[event.node] = self._grow(ends[event.node], event.tokens, 1 << holder.number)
        elif isinstance(event, Removed):
            node = ends.pop(event.node)
            holder.evicted_at = node.used_at
            self._clear(node, event.num_tokens, 1 << holder.number)
        elif isinstance(event, Split):
            ends[event.upper] = self._above(ends[event.node], event.num_tokens)
        elif isinstance(event, Truncated):
            node = self._above(ends[event.node], event.num_tokens)
            holder.evicted_at = node.used_at
            self._clear(ends[event.node], event.num_tokens, 1 << holder.number)
            ends[event.node] = node
        else:
            assert isinstance(event, Reset)
            self._reset(holder, event.namespace)

    def _root(self, namespace: str) -> IndexNode:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace)
        return root

    def _store(self, node: IndexNode, tokens: bytes, bit: int) -> IndexNode:
        """Store `tokens` below `node` and set `bit` on their edges. Returns the node at their
        end."""
        pos, stop = 0, len(tokens)
        while pos < stop:
            child = node.children.get(tokens[pos : pos + TOKEN_BYTES])
            if child is None:
                return self._attach(node, tokens[pos:], bit)
            edge = child.tokens
            if not tokens.startswith(edge, pos):
                child = self._split(child, common_bytes(edge, tokens, pos))
                edge = child.tokens
            child.holders |= bit
            node = child
            pos += len(edge)
        return node

    def _grow(self, node: IndexNode, tokens: bytes, bit: int) -> IndexNode:
        """Like `_store`, but lengthens the edge if only this replica has it."""
        if node.children or node.reserved is not None or node.holders != bit:
            return self._store(node, tokens, bit)
        node.tokens += tokens
        self.num_tokens += len(tokens) // TOKEN_BYTES
        return node

    def _attach(self, parent: IndexNode, tokens: bytes, holders: int) -> IndexNode:
        leaf = IndexNode(parent, tokens, holders, self.now)
        if parent.children is NO_CHILDREN:
            parent.children = {}
        parent.children[tokens[:TOKEN_BYTES]] = leaf
        self.num_edges += 1
        self.num_tokens += len(tokens) // TOKEN_BYTES
        return leaf

    def _split(self, node: IndexNode, cut: int) -> IndexNode:
        """Cut an edge after `cut` bytes. `node` becomes the lower part. Returns the upper part."""
        parent, edge, reserved = node.parent, node.tokens, node.reserved
        assert parent is not None
        upper = IndexNode(parent, edge[:cut], node.holders, node.used_at)
        upper.reserved = reserved
        upper.work_s = node.work_s
        parent.children[edge[:TOKEN_BYTES]] = upper
        node.parent, node.tokens = upper, edge[cut:]
        upper.children = {edge[cut : cut + TOKEN_BYTES]: node}
        self.num_edges += 1
        return upper

    def _above(self, node: IndexNode, num_tokens: int) -> IndexNode:
        """The node that ends `num_tokens` before the end of `node`; an edge is split if needed."""
        rest = num_tokens * TOKEN_BYTES
        while rest:
            size = len(node.tokens)
            if size > rest:
                return self._split(node, size - rest)
            rest -= size
            assert node.parent is not None
            node = node.parent
        return node

    def _clear(self, node: IndexNode, num_tokens: int, bit: int) -> None:
        """Clear `bit` from the last `num_tokens` tokens up to the end of `node`, except those with
        which another node of the same replica begins, too."""
        rest = num_tokens * TOKEN_BYTES
        while rest:
            size, parent = len(node.tokens), node.parent
            assert parent is not None
            if any(child.holders & bit for child in node.children.values()):
                return
            if size > rest:
                self._split(node, size - rest)
                size = rest
            node.holders &= ~bit
            self._prune(node)
            rest -= size
            node = parent

    def _prune(self, node: IndexNode) -> None:
        """Remove `node`, and then the nodes above it, while they have no replica, no child and no
        open request."""
        while not (node.holders or node.children or node.reserved):
            parent, key = node.parent, node.tokens[:TOKEN_BYTES]
            if parent is None:
                assert isinstance(node, Root)
                self._roots.pop(node.namespace, None)
                return
            if parent.children.get(key) is not node:  # it was removed before
                return
            del parent.children[key]
            self.num_edges -= 1
            self.num_tokens -= node.num_tokens
            node = parent

    def _reset(self, holder: HoldingReplica, namespace: str) -> None:
        """Clear a replica's tokens in a namespace. O(nodes of the replica)."""
        root, bit = self._roots.get(namespace), 1 << holder.number
        if root is None:
            return
        stack: list[IndexNode] = [root]
        cached: list[IndexNode] = []  # nodes with the bit, each before those below it
        while stack:
            node = stack.pop()
            below = [child for child in node.children.values() if child.holders & bit]
            stack += below
            cached += below
        for node in reversed(cached):
            node.holders &= ~bit
            self._prune(node)
        holder.ends = {key: node for key, node in holder.ends.items() if node.holders & bit}

    def _sweep(self) -> None:
        """Clear some bits of removed replicas. A number without bits can be used again."""
        for _ in range(_SWEPT):
            if not self._removed:
                return
            number, ends = self._removed[0]
            node, bit = next(ends, None), 1 << number
            if node is None:
                self._removed.popleft()
                self._numbers &= ~bit
                continue
            self._clear_up(node, bit)

    def _clear_up(self, node: IndexNode, bit: int) -> None:
        """Clear `bit` from all tokens between the root and the end of `node`."""
        while node.holders & bit:
            above = node.parent
            assert above is not None
            node.holders &= ~bit
            self._prune(node)
            node = above

    # -- requests -----------------------------------------------------------------------------

    def match(
        self, tokens: bytes, namespace: str, lengths: IntArray, needs: tuple[float, float] = NO_NEED
    ) -> Matched | None:
        """Match a prompt against the index. Returns where the longest match ends; None if the
        namespace is unknown.

        tokens     the prompt (int32)
        lengths    is set, by replica number, to how many leading tokens of it each replica has
                   cached, or will have when the open requests there are computed
        needs      (mean recent work of a replica, seconds to compute a token). Leading tokens whose
                   requests are more work than n + 1 times either of them, on n replicas, should be
                   computed on another replica: `Matched.spread`

        O(matched tokens) in memcmp, and about 0.3 us per edge and replica.
        """
        lengths[:] = 0
        node: IndexNode | None = self._roots.get(namespace)
        if node is None:
            return None
        alive, pos, stop = self._live, 0, len(tokens)
        spread, is_spread, continued = 0, needs is not NO_NEED, None
        share_s, token_s = needs
        while alive:
            child = node.children.get(tokens[pos : pos + TOKEN_BYTES]) if pos < stop else None
            if child is None:
                write_lengths(lengths, alive, pos // TOKEN_BYTES)
                break
            reserved = child.reserved
            holding = alive & (child.holders if reserved is None else child.holders | reserved.mask)
            if holding != alive:
                write_lengths(lengths, alive & ~holding, pos // TOKEN_BYTES)
                alive = holding
                if not alive:
                    break
            edge = child.tokens
            if is_spread:
                age_s = self.now - child.used_at
                work_s = child.work_s * 0.5 ** (age_s / WORK_HALF_LIFE_S)
                least_s = max(share_s, (pos + len(edge)) // TOKEN_BYTES * token_s)
                is_spread = work_s >= (alive.bit_count() + 1) * least_s
            if not tokens.startswith(edge, pos):
                write_lengths(
                    lengths, alive, (pos + common_bytes(edge, tokens, pos)) // TOKEN_BYTES
                )
                break
            node = child
            pos += len(edge)
            if is_spread:
                spread = pos // TOKEN_BYTES
            if node.conversation is not None:
                continued = node
        return Matched(node, pos, spread, continued)

    def reserve(
        self,
        tokens: bytes,
        namespace: str,
        number: int,
        matched: Matched | None = None,
        work_s: float = 0.0,
    ) -> Reservation:
        """Count all of `tokens` (int32) as cached on a replica until `release`, and as used now.

        number   of the replica
        matched  the result of `match` for the same tokens, if the index has not changed since
        work_s   work of the request without its prefill, in seconds

        Costs as much as `match`.
        """
        parent, pos, *_ = matched or Matched(self._root(namespace), 0)
        node = end = self._store(parent, tokens[pos:], 0)
        first_reservation = Reserved({number: 1})
        now = self.now
        while node.parent is not None:
            node.work_s = node.work_s * 0.5 ** ((now - node.used_at) / WORK_HALF_LIFE_S) + work_s
            node.used_at = now
            reserved = node.reserved
            node.reserved = first_reservation if reserved is None else reserved.with_one(number)
            node = node.parent
        return Reservation(number, end)

    def release(self, reservation: Reservation) -> None:
        """End a reservation. O(edges of the prompt)."""
        number, node = reservation
        while node.parent is not None:
            above, reserved = node.parent, node.reserved
            assert reserved is not None
            if len(reserved.counts) == 1 and reserved.counts[number] == 1:
                node.reserved = None
            else:
                node.reserved = reserved.without_one(number)
            self._prune(node)
            node = above

    # -- audit --------------------------------------------------------------------------------

    def cached_paths(self, replica: str, namespace: str) -> list[tuple[int, ...]]:
        """The longest token paths that a replica has cached, sorted. O(tokens); for audits."""
        paths, bit = [], 1 << self._holders[replica].number
        root = self._roots.get(namespace)
        stack: list[tuple[IndexNode, bytes]] = [] if root is None else [(root, b"")]
        while stack:
            node, above = stack.pop()
            path = above + node.tokens
            below = [child for child in node.children.values() if child.holders & bit]
            stack += [(child, path) for child in below]
            if path and not below:
                paths.append(tuple(np.frombuffer(path, np.int32).tolist()))
        return sorted(paths)

    def check(self) -> None:
        """Raise AssertionError unless all invariants are true. O(size of the index)."""
        num_edges = num_tokens = 0
        stack: list[IndexNode] = [*self._roots.values()]
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                assert key == child.tokens[:TOKEN_BYTES], "a child under another's first token"
                assert child.parent is node, "a child with another parent"
                assert child.holders or child.children or child.reserved, "a node without use"
                if node.parent is not None:
                    stray = child.holders & ~node.holders & self._live
                    assert not stray, f"{stray:b} have a node cached, but not its parent"
                if child.reserved is not None:
                    mask = sum(1 << number for number in child.reserved.counts)
                    assert child.reserved.mask == mask, "reserved for others than counted"
                num_edges += 1
                num_tokens += child.num_tokens
                stack.append(child)
        assert num_edges == self.num_edges, f"{self.num_edges} edges counted, {num_edges} found"
        assert num_tokens == self.num_tokens, f"{self.num_tokens} tokens, {num_tokens} found"
        for name, holder in self._holders.items():
            for end in holder.ends.values():
                assert end.holders >> holder.number & 1, f"{name} ends where it holds nothing"


def write_lengths(lengths: IntArray, mask: int, length: int) -> None:
    """Set the entries of `lengths` whose bits are set in `mask`."""
    if mask.bit_count() > 8:
        data = np.frombuffer(mask.to_bytes(-(-len(lengths) // 8), "little"), np.uint8)
        lengths[np.unpackbits(data, count=len(lengths), bitorder="little").view(np.bool_)] = length
        return
    while mask:
        low = mask & -mask
        lengths[low.bit_length() - 1] = length
        mask ^= low


def common_bytes(edge: bytes, tokens: bytes, pos: int) -> int:
    """The number of bytes that `edge` and `tokens[pos:]` have in common, in whole tokens."""
    count = min(len(edge), len(tokens) - pos) // TOKEN_BYTES
    differs = np.frombuffer(edge, np.int32, count) != np.frombuffer(tokens, np.int32, count, pos)
    first = int(differs.argmax()) if count else 0
    return (first if count and differs[first] else count) * TOKEN_BYTES
