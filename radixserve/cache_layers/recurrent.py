"""`RecurrentLayers`: the pool of recurrent states, checkpoints in the tree, the sequence.

A recurrent layer keeps one state per sequence instead of K/V per token. All such layers of a model
together have one state of fixed size, named by an id; the cache deals in ids alone.

A checkpoint is a state after the first n tokens of a path. It belongs to the node that holds token
n - 1, and goes with it; a node may have several. A sequence can continue from the deepest
checkpoint on its path only, however much K/V is cached behind it.

The state of a `StatefulSequence` covers its first `length` tokens: tokens that the sequence is
extended by are computed in the next step. It begins as a copy of a checkpoint, leaves checkpoints
in the tree on its way, and becomes one itself when the sequence is released. A step scheduled ahead
may compute past the sequence's end. It reads one state and writes another, as long as there is
room, so that the former state stays available; the step after it writes the first one again.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from radixserve.cache.lookup import MissReason
from radixserve.cache.page_pool import PagePool
from radixserve.cache.radix.child_index import child_covering, siblings_with_head
from radixserve.cache.radix.eviction import EvictionOrder
from radixserve.cache.radix.layers import RadixLayers
from radixserve.cache.radix.node import Match, Node, path
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.cache.radix.sequence import RadixSequence, node_covering
from radixserve.cache.sequence import CacheSequence
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.cache_layers.checkpoint_order import NO_STATE, CheckpointOrder, CheckpointSpacing
from radixserve.checks import check_float, check_int
from radixserve.errors import InvalidRequest, OutOfPages
from radixserve.schedule import RowStates, ScheduledRows

StateCopy = tuple[int, int]  # (source state, destination state)
TAIL_TOKENS = 8  # a checkpoint is taken so many tokens before a prompt's end, for other endings


class StatePool:
    """State ids 0 .. num_states - 1; a state is free or allocated, never both."""

    __slots__ = ("_copies", "_free", "num_states")

    def __init__(self, num_states: int) -> None:
        self.num_states = num_states
        self._free = array("i", range(num_states - 1, -1, -1))
        self._copies: list[StateCopy] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Returns a free state id. There must be one."""
        return self._free.pop()

    def free(self, state_id: int) -> None:
        self._free.append(state_id)

    def copy(self, source: int, destination: int) -> None:
        """Queue a copy of a state, to be made before the next step."""
        self._copies.append((source, destination))

    def take_copies(self) -> list[StateCopy]:
        """Returns the copies to be made before the next step, one after the other in this order."""
        copies, self._copies = self._copies, []
        return copies

    def free_ids(self) -> list[int]:
        """Returns a copy of the free list, for audits."""
        return list(self._free)


# Kinds of checkpoints: which are used again is counted by kind.
PROMPT = "prompt"  # of a chat: where the generation prompt begins, or the first message
MESSAGE = "message"  # at the end of another message
BRANCH = "branch"  # where another sequence leaves this one's path
SPACED = "spaced"  # see `CheckpointSpacing`
END = "end"  # where a sequence ended
LAST = "last"  # before a prompt's last token
TAIL = "tail"  # a few tokens before the end of a prompt, whose generation prompt is not known

LEAST_RECORDS = 1024  # of evicted checkpoints; as many as twice the states in large pools
NO_CHECKPOINTS: dict[int, int] = {}  # of a node; stays empty
_SPARE = LAST, TAIL  # kinds that are of use as long as the end of their sequence has no state
NO_MISSED: dict[int, tuple[str, int]] = {}  # stays empty


class Checkpoint(NamedTuple):
    """`state_id` holds the state after `length` tokens, the last of them in `node`."""

    length: int
    state_id: int
    node: Node


class StateCheckpoints:
    """The checkpoints of a tree and the pool of their states.

    The checkpoint that is expected to save the fewest tokens is evicted first, see
    `CheckpointOrder`. A sequence pins the checkpoint that it is about to copy: a pinned checkpoint
    is not evicted, and outlives its node until the last pin is removed.
    """

    def __init__(self, num_states: int, spacing: CheckpointSpacing) -> None:
        self.pool = StatePool(num_states)
        self.spacing = spacing
        self.num_evicted = 0
        self.by_node: dict[Node, dict[int, int]] = {}  # length -> state id
        self._order = CheckpointOrder(self._tokens_saved, max(LEAST_RECORDS, 2 * num_states))
        self._pins: dict[int, int] = {}  # state id -> number of pins
        self._without_node: set[int] = set()  # states of pinned checkpoints whose node is gone
        self._lent: dict[int, Callable[[], None]] = {}  # state id -> on_loss; the oldest first
        self._collector: bytearray | None = None  # tokens of `collect`
        self._collected: dict[int, int] = {}  # length -> state id

    def stats(self) -> dict[str, int]:
        """States, by owner, and checkpoints evicted since the start. O(1)."""
        num_states, num_free, num_kept = self.pool.num_states, self.pool.num_free, len(self._order)
        return {
            "states_total": num_states,
            "states_free": num_free,
            "states_tree": num_kept,
            "states_private": num_states - num_free - num_kept,
            "evicted_checkpoints": self.num_evicted,
        }

    def deepest(self, node: Node, length: int, multiple_of: int = 1) -> Checkpoint:
        """Returns the deepest checkpoint at `length` or before it on the path to `node`; NO_STATE
        at length 0 if there is none. `multiple_of`: of which its length must be a multiple.
        O(nodes of the path + checkpoints of the last ones)."""
        if (parent := node.parent) is not None:
            best = self._among(siblings_with_head(node, length), length, multiple_of)
            if best is not None:
                return best
            node = parent
        for ancestor in path(node):
            best = self._among([ancestor], length, multiple_of)
            if best is not None:
                return best
        root = node
        while root.parent is not None:
            root = root.parent
        return Checkpoint(0, NO_STATE, root)

    def _among(self, nodes: list[Node], length: int, multiple_of: int) -> Checkpoint | None:
        """Returns the deepest checkpoint of these nodes at `length` or before it, None without
        one."""
        best_len, best = 0, None
        for node in nodes:
            for kept_len, state_id in self.by_node.get(node, NO_CHECKPOINTS).items():
                if best_len < kept_len <= length and not kept_len % multiple_of:
                    best_len, best = kept_len, (state_id, node)
        return None if best is None else Checkpoint(best_len, *best)

    @property
    def has_room(self) -> bool:
        """Whether a state can be allocated."""
        return bool(self._lent) or self.can_lend

    @property
    def can_lend(self) -> bool:
        """Whether a state can be allocated without taking a lent one."""
        num_checkpoints = len(self._order) + len(self._without_node)
        return self.pool.num_free > 0 or num_checkpoints > len(self._pins)

    def allocate(self) -> int:
        """Returns a state; evicts a checkpoint if none is free. Raises OutOfPages if all are in
        use."""
        if not self.has_room:
            raise OutOfPages(f"all {self.pool.num_states} recurrent states are used by sequences")
        if not self.pool.num_free:
            self._evict_one()
        return self.pool.allocate()

    def allocate_for(self, kind: str, tokens_saved: int, uses: int = 0) -> int | None:
        """Returns a state for a checkpoint that saves `tokens_saved` tokens. If none is free,
        evicts a checkpoint with a smaller expected saving; None without one. `uses`: of a former
        checkpoint at its place."""
        if not self.pool.num_free:
            victim = self._order.first(self._pins)
            if victim is None or not self._order.outlives(victim, kind, tokens_saved, uses):
                return None
            self._evict(victim)
        return self.pool.allocate()

    def lend(self, state_id: int, on_loss: Callable[[], None]) -> None:
        """Offer a state that its sequence can do without: another sequence may take it when no
        checkpoint is left to evict. `on_loss` is called then."""
        self._lent[state_id] = on_loss

    def reclaim(self, state_id: int) -> None:
        """Take back a lent state."""
        del self._lent[state_id]

    def add(self, node: Node, length: int, state_id: int, kind: str) -> None:
        """Add the state after `length` tokens, the last of them in `node`, as a checkpoint. Frees
        it if the node has a checkpoint of that length already."""
        kept = self.by_node.setdefault(node, {})
        if length in kept:
            self.pool.free(state_id)
        else:
            kept[length] = state_id
            self._order.add(node, length, state_id, kind)

    def _tokens_saved(self, state_id: int) -> int:
        """Returns the tokens between a checkpoint and the one before it on its path. O(nodes
        between them)."""
        node, length = self._order.place(state_id)
        return length - self.deepest(node, length - 1).length

    def pin(self, state_id: int, *, is_best: bool = True) -> None:
        """Keep a checkpoint until `unpin`, and count a use of it. `is_best`: no deeper one on the
        path was evicted. If one was, a use of a checkpoint before the end of a prompt says nothing:
        the state at the end of that sequence would have been used."""
        self._pins[state_id] = self._pins.get(state_id, 0) + 1
        if state_id in self._order and (is_best or self._order.kind(state_id) not in _SPARE):
            self._order.use(state_id)

    def unpin(self, state_id: int) -> None:
        self._pins[state_id] -= 1
        if not self._pins[state_id]:
            del self._pins[state_id]
            if state_id in self._without_node:
                self._without_node.discard(state_id)
                self.pool.free(state_id)

    def is_first_victim(self, state_id: int) -> bool:
        """Whether a pinned checkpoint would be the next one to be evicted, without its pins."""
        if self.pool.num_free or state_id not in self._order:
            return False
        return self._order.first(self._pins.keys() - {state_id}) == state_id

    def note_miss(self, node: Node, start: int, end: int) -> dict[int, tuple[str, int]]:
        """Note that a prompt whose match of `end` tokens ends in `node` continues from the
        checkpoint at `start`. Returns kind and uses of evicted checkpoints between them that
        prompts asked for, by length."""
        self._order.advance()
        return self._order.miss(node, start, end)

    def is_only_pin(self, state_id: int) -> bool:
        return self._pins.get(state_id) == 1

    def take(self, state_id: int) -> None:
        """Turn a checkpoint with a single pin into a state owned by the caller."""
        del self._pins[state_id]
        if state_id in self._order:
            self._detach(state_id)
        else:
            self._without_node.discard(state_id)

    def collect(self, tokens: bytearray) -> None:
        """Until `collected`, keep the checkpoints of removed nodes whose prefixes agree with
        `tokens` (int32 bytes)."""
        self._collector = tokens

    def collected(self) -> dict[int, int]:
        """Returns the states kept since `collect`, by length. The caller owns them from now on."""
        collected, self._collected, self._collector = self._collected, {}, None
        return collected

    # -- for the tree -------------------------------------------------------------------------

    def split(self, upper: Node, lower: Node) -> None:
        """Move the checkpoints of `lower` that belong to `upper`, its new upper part."""
        self._order.split(upper, lower)
        kept = self.by_node.get(lower)
        if kept is None:
            return
        moved = {length: kept.pop(length) for length in list(kept) if length <= upper.end}
        if moved:
            self.by_node[upper] = moved
        if not kept:
            del self.by_node[lower]

    def drop_after(self, node: Node, end: int) -> None:
        """Drop the checkpoints of `node` after position `end`: it is about to lose these tokens."""
        self._order.forget_after(node, end)
        kept = self.by_node.get(node)
        if kept is None:
            return
        for length in [length for length in kept if length > end]:
            self._drop_checkpoint(node, length, kept.pop(length))
        if not kept:
            del self.by_node[node]

    def move(self, old: Node, new: Node) -> None:
        """Move the checkpoints of `old`, which is removed, to its sibling `new`, which has all of
        its tokens."""
        self._order.forget_after(old, old.start)
        for length, state_id in self.by_node.pop(old, {}).items():
            kind = self._order.kind(state_id)
            self._order.discard(state_id)
            self.add(new, length, state_id, kind)

    def _drop_checkpoint(self, node: Node, length: int, state_id: int) -> None:
        self._order.discard(state_id)
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
        victim = self._order.first(self._pins)
        if victim is not None:
            self._evict(victim)
            return
        lent = next(iter(self._lent))
        self._lent.pop(lent)()
        self.pool.free(lent)

    def _evict(self, state_id: int) -> None:
        self._detach(state_id)
        self.pool.free(state_id)

    def _detach(self, state_id: int) -> None:
        node, length = self._order.place(state_id)
        self._order.evict(state_id)
        kept = self.by_node[node]
        del kept[length]
        if not kept:
            del self.by_node[node]
        self.num_evicted += 1

    def check(self, nodes: list[Node], states: list[int], pinned: list[int]) -> None:
        """AssertionError unless each state has one owner. `states`: of the sequences; `pinned`:
        what they are about to copy."""
        known = {id(node) for node in nodes}
        kept: list[int] = []
        for node, states_by_len in self.by_node.items():
            assert states_by_len, f"node {node.node_id} has an empty record of checkpoints"
            assert id(node) in known, f"node {node.node_id} is gone and has checkpoints"
            for length, state_id in states_by_len.items():
                assert node.start < length <= node.end, f"checkpoint {length} of another node"
                assert state_id in self._order, f"state {state_id} has no place in the order"
                assert self._order.place(state_id) == (node, length), f"state {state_id} misplaced"
            kept += states_by_len.values()
        assert len(self._order) == len(kept), "a checkpoint has no node"
        self._order.check(set(nodes))
        owned = [*self.pool.free_ids(), *kept, *states, *self._without_node]
        assert sorted(owned) == list(range(self.pool.num_states)), "a state needs exactly one owner"
        assert self._lent.keys() <= set(states), "a state is lent without an owner"
        counted = {state_id: pinned.count(state_id) for state_id in pinned}
        assert counted == self._pins, f"{self._pins} pins counted, {counted} found"
        assert not self._collected, "checkpoints without an owner"
        assert self._without_node <= self._pins.keys(), "a state is kept without a user"


class RecurrentLayers(RadixLayers):
    """`num_states` recurrent states. A sequence begins at the deepest checkpoint of its path.

    checkpoint_interval  tokens between two checkpoints; None: see `CheckpointSpacing`. Checkpoints
                         are also taken before a prompt's end, where prompts branch, at the end of
                         sequences and of a conversation's turns
    state_tokens         number of tokens whose K/V takes the memory of one state
    """

    missing_reason: MissReason = "no_checkpoint"
    needs_each_call = True

    def __init__(
        self,
        num_states: int,
        checkpoint_interval: int | None = None,
        state_tokens: float = 0.0,
    ) -> None:
        check_int("num_states", num_states, 1, 2**31 - 1)
        if checkpoint_interval is not None:
            check_int("checkpoint_interval", checkpoint_interval, 1)
        check_float("state_tokens", state_tokens, 0.0, math.inf)
        spacing = CheckpointSpacing(checkpoint_interval, state_tokens)
        self.checkpoints = StateCheckpoints(num_states, spacing)
        self._missed: Mapping[int, tuple[str, int]] = NO_MISSED  # of the sequence that begins

    def make_tree(self, pool: PagePool, page_size: int, order: EvictionOrder) -> RadixTree:
        return CheckpointTree(pool, page_size, order, self.checkpoints)

    def resumable_prefix(self, node: Node, length: int, multiple_of: int = 1) -> tuple[int, Node]:
        usable, _, node = self.checkpoints.deepest(node, length, multiple_of)
        return usable, node

    def begin_sequence(self, match: Match, node: Node, length: int) -> None:
        del node
        self._missed = self.checkpoints.note_miss(match[1], length, match[0])

    def make_sequence(
        self, *parts: Any, match_len: int, limit: int, num_tokens: int
    ) -> StatefulSequence:
        sequence = StatefulSequence(*parts)
        wanted = {num_tokens - TAIL_TOKENS: TAIL, match_len: BRANCH, limit: LAST}
        checkpoint = self.checkpoints.deepest(sequence.last_node, sequence.length)
        sequence.begin_at(checkpoint, wanted, self._missed)
        return sequence

    def note_turns(self, sequence: CacheSequence, turn_starts: Sequence[int]) -> None:
        """Keep the states before the generation prompt, after system message and tools, and at
        the ends of other messages."""
        assert isinstance(sequence, StatefulSequence)
        for start in turn_starts:
            is_end = start in (turn_starts[0], turn_starts[-1])
            sequence.want_checkpoint(start, PROMPT if is_end else MESSAGE)

    def plan_step(self, sequences: Sequence[CacheSequence], rows: ScheduledRows) -> dict[str, Any]:
        mine = cast(Sequence[StatefulSequence], sequences)
        kept = [
            sequence.take_draft_states(start, rows.drafts[row])
            if row in rows.drafts
            else sequence.take_checkpoints(start)
            for row, (sequence, start) in enumerate(zip(mine, rows.starts, strict=True))
        ]
        # Last of all: no row of this step may read what `take_checkpoints` evicts.
        futures = rows.future_indices or [-1] * len(kept)
        for sequence, future_index, checkpoints in zip(mine, futures, kept, strict=True):
            read, written = sequence.step_states(is_ahead=future_index >= 0)
            rows.states.append(RowStates(read, checkpoints, written))
        return {"state_copies": self.checkpoints.pool.take_copies()}

    def stats(self) -> dict[str, int]:
        return self.checkpoints.stats()

    def check(self, pool: PagePool, nodes: list[Node], sequences: list[RadixSequence]) -> None:
        """Each state is free, of one node, or of one sequence."""
        del pool
        states: list[int] = []
        pinned: list[int] = []
        for sequence in sequences:
            assert isinstance(sequence, StatefulSequence)
            own, source = sequence.owned_states()
            states += own
            pinned += source
        self.checkpoints.check(nodes, states, pinned)


class CheckpointTree(RadixTree):
    """A `RadixTree` whose nodes lose their checkpoints with their tokens."""

    def __init__(
        self, pool: PagePool, page_size: int, order: EvictionOrder, checkpoints: StateCheckpoints
    ) -> None:
        super().__init__(pool, page_size, order)
        self.checkpoints = checkpoints

    def split(self, node: Node, num_tokens: int) -> Node:
        upper = super().split(node, num_tokens)
        self.checkpoints.split(upper, node)
        return upper

    def cut(self, leaf: Node, keep: int) -> array[int]:
        self.checkpoints.drop_after(leaf, leaf.start + keep * self.page_size)
        return super().cut(leaf, keep)

    def remove(self, node: Node) -> array[int]:
        parent, checkpoints = node.parent, self.checkpoints
        if node not in checkpoints.by_node or parent is None:
            checkpoints.drop_after(node, node.start)
            return super().remove(node)
        pages, cover = super().remove(node), None
        if node.num_tokens < self.page_size and not node.namespace.is_dead:
            cover = child_covering(parent, node.key)
        if cover is None:
            checkpoints.drop_after(node, node.start)
        else:  # a sibling has all tokens of this leaf
            checkpoints.move(node, cover)
        return pages


class StatefulSequence(RadixSequence):
    """Made by `RecurrentLayers`."""

    __slots__ = (
        "_begin_state",
        "_draft_states",
        "_former",
        "_former_len",
        "_former_uses",
        "_kinds",
        "_last_kept",
        "_spare_states",
        "_state",
        "_taken",
        "_wanted",
    )

    _begin_state: int  # state of the pinned checkpoint to copy before the next token
    _state: int  # state after `length` tokens, which this sequence alone uses
    _former: int  # state after _former_len tokens, before a step ahead; lent, so it may be taken
    _former_len: int
    _spare_states: list[int]  # reserved for the next drafts
    _draft_states: dict[int, int]  # length -> state between the drafts in flight
    _taken: dict[int, int]  # length -> state of the checkpoints that are still to be published
    _kinds: dict[int, str]  # length -> kind of these checkpoints
    _wanted: dict[int, str]  # length -> kind of checkpoints to take besides the spacing's
    _former_uses: dict[int, int]  # length -> uses of the evicted checkpoint at that place
    _last_kept: int  # length of the deepest checkpoint on its path

    def begin_at(
        self,
        checkpoint: Checkpoint,
        wanted: dict[int, str],
        missed: Mapping[int, tuple[str, int]] = NO_MISSED,
    ) -> None:
        """Start a new sequence at a checkpoint. `wanted`: kinds of others to take, by length;
        `missed`: kinds and uses of evicted ones to take again."""
        self._state, self._begin_state = NO_STATE, checkpoint.state_id
        self._former, self._former_len = NO_STATE, -1
        self._spare_states, self._draft_states = [], {}
        self._taken, self._kinds, self._wanted = {}, {}, wanted
        self._former_uses = {}
        for length, (kind, uses) in missed.items():
            wanted[length], self._former_uses[length] = kind, uses
        self._last_kept = checkpoint.length
        if checkpoint.state_id != NO_STATE:
            self._checkpoints.pin(checkpoint.state_id, is_best=not missed)

    @property
    def _checkpoints(self) -> StateCheckpoints:
        if TYPE_CHECKING:
            assert isinstance(self._tree, CheckpointTree)
        return self._tree.checkpoints

    @property
    def state_id(self) -> int:
        """Id of its state after `length` tokens; NO_STATE before one was allocated."""
        return self._state

    def owned_states(self) -> tuple[list[int], list[int]]:
        """Returns the states that it owns, and those that it has pinned, for audits."""
        own = [self._state, self._former, *self._taken.values()]
        own += [*self._spare_states, *self._draft_states.values()]
        pinned = [self._begin_state] if self._begin_state != NO_STATE else []
        return [state_id for state_id in own if state_id != NO_STATE], pinned

    def step_states(self, *, is_ahead: bool) -> tuple[int, int]:
        """Returns the ids of the states that the step of its last tokens reads and writes. To be
        called once per step, after all `take_checkpoints`. `is_ahead`: the step is scheduled ahead,
        so the sequence may turn out to end before its last token."""
        read, other, checkpoints = self._state, self._former, self._checkpoints
        if not is_ahead:
            return read, read
        if other != NO_STATE:
            checkpoints.reclaim(other)
        elif checkpoints.can_lend:
            other = checkpoints.allocate()
        else:
            return read, read
        self._state, self._former, self._former_len = other, read, self.length - 1
        checkpoints.lend(read, self._lose_former)
        return read, other

    def _lose_former(self) -> None:
        self._former = NO_STATE

    def note_branch_point(self, length: int) -> None:
        self.want_checkpoint(length)

    def want_checkpoint(self, length: int, kind: str = BRANCH) -> None:
        """Keep a checkpoint after `length` tokens: other sequences may continue there. `kind`:
        PROMPT, MESSAGE or BRANCH."""
        if kind == PROMPT:  # it is known where the generation prompt begins
            others = self._wanted.items()
            self._wanted = {other_len: other for other_len, other in others if other != TAIL}
        if self._wanted.get(length, MESSAGE) == MESSAGE:
            self._wanted[length] = kind

    def take_checkpoints(self, start: int) -> tuple[tuple[int, int], ...]:
        """Returns (length, state id), ascending, of the checkpoints to keep while the tokens
        [start, self.length) are computed, as far as states are available. `commit` publishes
        them."""
        if self.is_stale:
            return ()
        checkpoints, end = self._checkpoints, self.length
        spacing, wanted = checkpoints.spacing, self._wanted
        kinds = dict.fromkeys(spacing.lengths(start, end), SPACED)
        if wanted:
            kinds |= {length: kind for length, kind in wanted.items() if start < length <= end}
            self._wanted = {length: kind for length, kind in wanted.items() if length > end}
        taken = []
        for length in sorted(kinds.keys() - self._taken.keys()):
            kind, distance = kinds[length], length - self._last_kept
            if kind == MESSAGE and distance < spacing.least_apart(length):
                continue
            uses = self._former_uses.get(length, 0)
            state_id = checkpoints.allocate_for(kind, distance, uses)
            if state_id is None:
                continue
            self._taken[length], self._kinds[length] = state_id, kind
            self._last_kept = length
            taken.append((length, state_id))
        return tuple(taken)

    def reserve_rewind(self, num_tokens: int) -> int:
        """See `CacheSequence.reserve_rewind`: a state for each token, as far as there are any that
        no sequence uses."""
        spare = self._spare_states
        while len(spare) < num_tokens and self._checkpoints.can_lend:
            spare.append(self._checkpoints.allocate())
        return min(len(spare), num_tokens)

    def take_draft_states(self, start: int, num_drafts: int) -> tuple[tuple[int, int], ...]:
        """Returns (length, state id), ascending, of the states to keep while the token at `start`
        and `num_drafts` drafts are computed: those before each draft. `rewind` follows."""
        lengths = range(start + 1, start + 1 + num_drafts)
        self._draft_states = {length: self._spare_states.pop() for length in lengths}
        return tuple(self._draft_states.items())

    def rewind(self, length: int) -> None:
        checkpoints, states = self._checkpoints, self._draft_states
        start, self._draft_states = min(states) - 1, {}
        if length < self.length:
            checkpoints.pool.free(self._state)
            self._state = states.pop(length)
        super().rewind(length)
        for kept_len, checkpoint in self.take_checkpoints(start):
            checkpoints.pool.copy(states.get(kept_len, self._state), checkpoint)
        for state_id in states.values():  # copied before another sequence writes them
            checkpoints.pool.free(state_id)

    def _append(self, data: bytes) -> None:
        if self._state != NO_STATE:
            super()._append(data)
            return
        checkpoints, begin_state = self._checkpoints, self._begin_state
        is_own = checkpoints.is_only_pin(begin_state) and (
            not checkpoints.has_room or checkpoints.is_first_victim(begin_state)
        )
        state_id = begin_state if is_own else checkpoints.allocate()
        try:
            super()._append(data)
        except OutOfPages:
            if not is_own:
                checkpoints.pool.free(state_id)
            raise
        self._state, self._begin_state = state_id, NO_STATE
        if is_own:
            checkpoints.take(state_id)
        elif begin_state != NO_STATE:
            checkpoints.pool.copy(begin_state, state_id)
            checkpoints.unpin(begin_state)

    def copy_from(self, source: CacheSequence) -> int:
        """Copies nothing and returns 0: the recurrent state belongs to the other namespace."""
        del source
        return 0

    def fork(self) -> StatefulSequence:
        """See `CacheSequence.fork`. InvalidRequest unless all tokens are committed."""
        if self.length != self.committed_len:
            raise InvalidRequest(
                f"a sequence with a recurrent state is forked when all of its {self.length} tokens "
                f"are committed, not {self.committed_len}"
            )
        checkpoints = self._checkpoints
        state_id = checkpoints.allocate() if self._state != NO_STATE else NO_STATE
        try:
            forked = super().fork()
        except OutOfPages:
            if state_id != NO_STATE:
                checkpoints.pool.free(state_id)
            raise
        assert isinstance(forked, StatefulSequence)
        forked.begin_at(Checkpoint(self.length, self._begin_state, self._last_node), {})
        if state_id != NO_STATE:
            checkpoints.pool.copy(self._state, state_id)
            forked._state = state_id
        return forked

    def truncate(self, length: int) -> None:
        """Roll back to the deepest checkpoint at `length` or before it: see `length` afterwards."""
        self._check_open()
        length = check_int("length", length, 0)
        if length >= self.length:
            super().truncate(length)
            return
        checkpoints = self._checkpoints
        checkpoint = checkpoints.deepest(self._last_node, min(length, self._published))
        if checkpoint.state_id != NO_STATE:
            checkpoints.pin(checkpoint.state_id)
        try:
            super().truncate(checkpoint.length)
        except OutOfPages:
            if checkpoint.state_id != NO_STATE:
                checkpoints.unpin(checkpoint.state_id)
            raise
        self._drop_states()
        self._begin_state, self._last_kept = checkpoint.state_id, checkpoint.length

    def _publish(self) -> None:
        checkpoints = self._checkpoints
        checkpoints.collect(self._tokens)
        super()._publish()
        for length, state_id in checkpoints.collected().items():
            if length in self._taken:
                checkpoints.pool.free(state_id)
            else:
                self._taken[length] = state_id
                self._kinds[length] = SPACED
        if self._taken:
            self._publish_checkpoints()

    def _publish_checkpoints(self) -> None:
        published, is_stale = self._published, self.is_stale
        for length in [length for length in self._taken if length <= published or is_stale]:
            state_id, kind = self._taken.pop(length), self._kinds.pop(length, END)
            if is_stale:
                self._checkpoints.pool.free(state_id)
            else:
                node = node_covering(self._last_node, length)
                self._checkpoints.add(node, length, state_id, kind)

    def release(self) -> None:
        if self._is_open:
            length = self.committed_len
            is_kept = length > 0 and length not in self._taken
            if is_kept and length == self.length and self._state != NO_STATE:
                self._taken[length], self._state = self._state, NO_STATE
            elif is_kept and length == self._former_len and self._former != NO_STATE:
                self._checkpoints.reclaim(self._former)
                self._taken[length], self._former = self._former, NO_STATE
            self._publish_checkpoints()
            self._drop_states()
        super().release()

    def _drop_states(self) -> None:
        checkpoints = self._checkpoints
        for state_id in (*self._taken.values(), *self._spare_states, *self._draft_states.values()):
            checkpoints.pool.free(state_id)
        self._spare_states.clear()
        self._draft_states.clear()
        self._taken.clear()
        self._kinds.clear()
        if self._state != NO_STATE:
            checkpoints.pool.free(self._state)
            self._state = NO_STATE
        if self._former != NO_STATE:
            checkpoints.reclaim(self._former)
            checkpoints.pool.free(self._former)
            self._former = NO_STATE
        if self._begin_state != NO_STATE:
            checkpoints.unpin(self._begin_state)
            self._begin_state = NO_STATE
