"""`StatefulSequence`: a cached sequence with a recurrent state of its own.

The state stands at `length`: tokens that the sequence is extended by are computed in the next step.
It begins as a copy of a checkpoint, leaves checkpoints in the tree on its way, and becomes one
itself when the sequence is released.

A step launched ahead computes a token before which the sequence may turn out to end. It reads one
state and writes another, as long as there is room, so that the one at the end is still there; the
step after it writes the first one again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixserve.cache.radix.sequence import CachedSequence, node_covering
from radixserve.cache.radix.state_checkpoints import Checkpoint, CheckpointTree, StateCheckpoints
from radixserve.cache.sequence import NO_STATE, CacheSequence
from radixserve.checks import check_int
from radixserve.errors import InvalidRequest, OutOfPages


class StatefulSequence(CachedSequence):
    """Made by a `RadixCache` with states."""

    __slots__ = ("_begin_state", "_former", "_former_len", "_state", "_taken", "_wanted")

    _begin_state: int  # checkpoint to copy before the next token, pinned
    _state: int  # of this sequence alone
    _former: int  # stands at _former_len, one token before the last step ahead; others may take it
    _former_len: int
    _taken: dict[int, int]  # length -> state: checkpoints that are still to be published
    _wanted: set[int]  # lengths to take one at, beside the multiples of the interval

    def begin_at(self, checkpoint: Checkpoint, wanted: set[int]) -> None:
        """Start a new sequence at a checkpoint."""
        self._state, self._begin_state = NO_STATE, checkpoint.state_id
        self._former, self._former_len = NO_STATE, -1
        self._taken, self._wanted = {}, wanted
        if checkpoint.state_id != NO_STATE:
            self._checkpoints.pin(checkpoint.state_id)

    @property
    def _checkpoints(self) -> StateCheckpoints:
        if TYPE_CHECKING:
            assert isinstance(self._tree, CheckpointTree)
        return self._tree.checkpoints

    @property
    def state_id(self) -> int:
        return self._state

    def owned_states(self) -> tuple[list[int], list[int]]:
        """Its own states, and those that it has pinned, for audits."""
        own = [self._state, self._former, *self._taken.values()]
        pinned = [self._begin_state] if self._begin_state != NO_STATE else []
        return [one for one in own if one != NO_STATE], pinned

    def step_states(self, *, is_ahead: bool) -> tuple[int, int]:
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

    def want_checkpoint(self, length: int) -> None:
        self._wanted.add(length)

    def take_checkpoints(self, start: int) -> tuple[tuple[int, int], ...]:
        if self.is_stale:
            return ()
        checkpoints, end = self._checkpoints, self.length
        step = checkpoints.interval
        lens = {one for one in self._wanted if start < one <= end}
        lens.update(range(start - start % step + step, end + 1, step))
        self._wanted = {one for one in self._wanted if one > end}
        taken = []
        for length in sorted(lens - self._taken.keys()):
            try:
                state_id = self._taken[length] = checkpoints.allocate()
            except OutOfPages:
                break
            taken.append((length, state_id))
        return tuple(taken)

    def _append(self, data: bytes) -> None:
        if self._state != NO_STATE:
            super()._append(data)
            return
        checkpoints, begin_state = self._checkpoints, self._begin_state
        is_own = not checkpoints.has_room and checkpoints.is_only_pin(begin_state)
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
        """Nothing: the state belongs to the other namespace."""
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
        forked.begin_at(Checkpoint(self.length, self._begin_state, self._last_node), set())
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
        found = checkpoints.deepest(self._last_node, min(length, self._published))
        if found.state_id != NO_STATE:
            checkpoints.pin(found.state_id)
        try:
            super().truncate(found.length)
        except OutOfPages:
            if found.state_id != NO_STATE:
                checkpoints.unpin(found.state_id)
            raise
        self._drop_states()
        self._begin_state = found.state_id

    def _publish(self) -> None:
        checkpoints = self._checkpoints
        checkpoints.collect(self._tokens)
        super()._publish()
        for length, state_id in checkpoints.collected().items():
            if length in self._taken:
                checkpoints.pool.free(state_id)
            else:
                self._taken[length] = state_id
        if self._taken:
            self._publish_checkpoints()

    def _publish_checkpoints(self) -> None:
        published, is_stale = self._published, self.is_stale
        for length in [length for length in self._taken if length <= published or is_stale]:
            state_id = self._taken.pop(length)
            if is_stale:
                self._checkpoints.pool.free(state_id)
            else:
                node = node_covering(self._last_node, length)
                self._checkpoints.add(node, length, state_id)

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
        for state_id in self._taken.values():
            checkpoints.pool.free(state_id)
        self._taken.clear()
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
