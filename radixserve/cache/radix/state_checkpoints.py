"""`StateCheckpoints`: recurrent states kept for prefixes in the tree, and the tree that loses them.

A checkpoint is a state after the first n tokens of a path. It belongs to the node that holds token
n - 1, and goes with it; a node may have several. A sequence can go on from the deepest one on its
path only, however much K/V is cached behind it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from radixserve.cache.page_pool import PagePool
from radixserve.cache.radix.child_index import child_covering, siblings_with_head
from radixserve.cache.radix.eviction import EvictionOrder
from radixserve.cache.radix.node import Node, path
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.cache.sequence import NO_STATE
from radixserve.cache.state_pool import StatePool
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.errors import OutOfPages

NO_CHECKPOINTS: dict[int, int] = {}  # of a node; stays empty


class Checkpoint(NamedTuple):
    """`state_id` holds the state after `length` tokens, the last of them in `node`."""

    length: int
    state_id: int
    node: Node


class StateCheckpoints:
    """Owns the states of the tree; the least recently used is evicted first.

    A pinned one is not evicted: a sequence is about to copy it. Where its node goes, it stays
    until it is not pinned any more.
    """

    def __init__(self, num_states: int, interval: int) -> None:
        """`interval`: tokens from one checkpoint of a sequence to the next."""
        self.pool = StatePool(num_states)
        self.interval = interval
        self.num_evicted = 0
        self.by_node: dict[Node, dict[int, int]] = {}  # length -> state id
        self._places: OrderedDict[int, tuple[Node, int]] = OrderedDict()  # by state id, see above
        self._pins: dict[int, int] = {}  # state id -> sequences
        self._without_node: set[int] = set()  # pinned ones
        self._lent: dict[int, Callable[[], None]] = {}  # see `lend`; the oldest first
        self._collector: bytearray | None = None
        self._collected: dict[int, int] = {}

    def stats(self) -> dict[str, int]:
        """States, by owner, and checkpoints evicted since the start. O(1)."""
        num_states, num_free, num_kept = self.pool.num_states, self.pool.num_free, len(self._places)
        return {
            "states_total": num_states,
            "states_free": num_free,
            "states_tree": num_kept,
            "states_private": num_states - num_free - num_kept,
            "evicted_checkpoints": self.num_evicted,
        }

    def deepest(self, node: Node, length: int, multiple_of: int = 1) -> Checkpoint:
        """The deepest one at `length` or before it on the path to `node`; state NO_STATE at length
        0 where there is none. O(nodes of the path + checkpoints of the last ones)."""
        if (parent := node.parent) is not None:
            best = self._among(siblings_with_head(node, length), length, multiple_of)
            if best is not None:
                return best
            node = parent
        for at in path(node):
            best = self._among([at], length, multiple_of)
            if best is not None:
                return best
        root = node
        while root.parent is not None:
            root = root.parent
        return Checkpoint(0, NO_STATE, root)

    def _among(self, nodes: list[Node], length: int, multiple_of: int) -> Checkpoint | None:
        """The deepest one of these nodes at `length` or before it."""
        found = [
            Checkpoint(one, state_id, node)
            for node in nodes
            for one, state_id in self.by_node.get(node, NO_CHECKPOINTS).items()
            if one <= length and not one % multiple_of
        ]
        return max(found, key=lambda one: one.length, default=None)

    @property
    def has_room(self) -> bool:
        """Whether a state can be allocated."""
        return bool(self._lent) or self.can_lend

    @property
    def can_lend(self) -> bool:
        """Whether one can be allocated that is not lent."""
        num_held = len(self._places) + len(self._without_node)
        return self.pool.num_free > 0 or num_held > len(self._pins)

    def allocate(self) -> int:
        """A state, evicting a checkpoint when none is free; OutOfPages when all are in use."""
        if not self.has_room:
            raise OutOfPages(f"all {self.pool.num_states} recurrent states are used by sequences")
        if not self.pool.num_free:
            self._evict_one()
        return self.pool.allocate()

    def lend(self, state_id: int, on_loss: Callable[[], None]) -> None:
        """The sequence that owns it can do without it: others may take it when no checkpoint is
        left to evict, and `on_loss` is called then."""
        self._lent[state_id] = on_loss

    def reclaim(self, state_id: int) -> None:
        """It is not lent any more."""
        del self._lent[state_id]

    def add(self, node: Node, length: int, state_id: int) -> None:
        """The state after `length` tokens, the last of them in `node`; freed where the node has
        one already."""
        found = self.by_node.setdefault(node, {})
        if length in found:
            self.pool.free(state_id)
            self._places.move_to_end(found[length])
        else:
            found[length] = state_id
            self._places[state_id] = node, length

    def pin(self, state_id: int) -> None:
        """Use a checkpoint: it is the most recent one now, and kept until `unpin`."""
        self._pins[state_id] = self._pins.get(state_id, 0) + 1
        if state_id in self._places:
            self._places.move_to_end(state_id)

    def unpin(self, state_id: int) -> None:
        self._pins[state_id] -= 1
        if not self._pins[state_id]:
            del self._pins[state_id]
            if state_id in self._without_node:
                self._without_node.discard(state_id)
                self.pool.free(state_id)

    def is_only_pin(self, state_id: int) -> bool:
        return self._pins.get(state_id) == 1

    def take(self, state_id: int) -> None:
        """The only one who has pinned a checkpoint owns its state now: it is none any more."""
        del self._pins[state_id]
        if state_id in self._places:
            self._detach(state_id)
        else:
            self._without_node.discard(state_id)

    def collect(self, tokens: bytearray) -> None:
        """Until `collected`, keep the checkpoints of nodes that go where a sequence of these
        (int32 bytes) has the same tokens up to there."""
        self._collector = tokens

    def collected(self) -> dict[int, int]:
        """By length; the caller owns them now."""
        found, self._collected, self._collector = self._collected, {}, None
        return found

    # -- for the tree -------------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` is the new upper part of `lower`."""
        found = self.by_node.get(lower)
        if found is None:
            return
        moved = {length: found.pop(length) for length in list(found) if length <= upper.end}
        if moved:
            self.by_node[upper] = moved
            for length, state_id in moved.items():
                self._places[state_id] = upper, length
        if not found:
            del self.by_node[lower]

    def drop_after(self, node: Node, end: int) -> None:
        """`node` is about to lose its tokens from position `end` on."""
        found = self.by_node.get(node)
        if found is None:
            return
        for length in [length for length in found if length > end]:
            self._drop_checkpoint(node, length, found.pop(length))
        if not found:
            del self.by_node[node]

    def move(self, old: Node, new: Node) -> None:
        """`new` holds all tokens of its sibling `old`."""
        for length, state_id in self.by_node.pop(old, {}).items():
            del self._places[state_id]
            self.add(new, length, state_id)

    def _drop_checkpoint(self, node: Node, length: int, state_id: int) -> None:
        del self._places[state_id]
        tokens, first, last = self._collector, node.start * TOKEN_BYTES, length * TOKEN_BYTES
        if state_id in self._pins:
            self._without_node.add(state_id)
        elif (
            tokens is not None
            and length not in self._collected
            and tokens[first:last] == node.tokens[: last - first]
        ):
            self._collected[length] = state_id
        else:
            self.pool.free(state_id)

    def _evict_one(self) -> None:
        victim = next((one for one in self._places if one not in self._pins), None)
        if victim is None:
            victim = next(iter(self._lent))
            self._lent.pop(victim)()
        else:
            self._detach(victim)
        self.pool.free(victim)

    def _detach(self, state_id: int) -> None:
        node, length = self._places.pop(state_id)
        found = self.by_node[node]
        del found[length]
        if not found:
            del self.by_node[node]
        self.num_evicted += 1

    def check(self, nodes: list[Node], states: list[int], pinned: list[int]) -> None:
        """AssertionError unless each state has one owner. `states`: of the sequences; `pinned`:
        what they are about to copy."""
        known = {id(node) for node in nodes}
        kept: list[int] = []
        for node, found in self.by_node.items():
            assert found, f"node {node.node_id} has an empty record of checkpoints"
            assert id(node) in known, f"node {node.node_id} is gone and has checkpoints"
            for length, state_id in found.items():
                assert node.start < length <= node.end, f"checkpoint {length} of another node"
                assert self._places.get(state_id) == (node, length), f"state {state_id} misplaced"
            kept += found.values()
        assert len(kept) == len(self._places), "a checkpoint has no node"
        owned = [*self.pool.free_ids(), *kept, *states, *self._without_node]
        assert sorted(owned) == list(range(self.pool.num_states)), "a state has not one owner"
        assert self._lent.keys() <= set(states), "a state is lent without an owner"
        counted = {state_id: pinned.count(state_id) for state_id in pinned}
        assert counted == self._pins, f"{self._pins} pins counted, {counted} found"
        assert not self._collected, "checkpoints without an owner"
        assert self._without_node <= self._pins.keys(), "a state is kept without a user"


class CheckpointTree(RadixTree):
    """A `RadixTree` whose nodes lose their checkpoints with their tokens."""

    def __init__(
        self, pool: PagePool, page_size: int, order: EvictionOrder, checkpoints: StateCheckpoints
    ) -> None:
        super().__init__(pool, page_size, order)
        self.checkpoints = checkpoints

    def split(self, node: Node, at: int) -> Node:
        upper = super().split(node, at)
        self.checkpoints.split(upper, node)
        return upper

    def cut(self, leaf: Node, keep: int) -> array[int]:
        self.checkpoints.drop_after(leaf, leaf.start + keep * self.page_size)
        return super().cut(leaf, keep)

    def remove(self, node: Node) -> array[int]:
        parent, checkpoints = node.parent, self.checkpoints
        if node not in checkpoints.by_node or parent is None:
            return super().remove(node)
        pages, cover = super().remove(node), None
        if node.num_tokens < self.page_size and not node.namespace.is_dead:
            cover = child_covering(parent, node.key)
        if cover is None:
            checkpoints.drop_after(node, node.start)
        else:  # a sibling holds all of this leaf
            checkpoints.move(node, cover)
        return pages
