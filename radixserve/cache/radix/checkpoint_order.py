"""Where sequences leave checkpoints of recurrent states, and which checkpoint is evicted first.

A state of a large model takes the memory of thousands of tokens' K/V, one of a small model that of
ten. `CheckpointSpacing` follows this ratio. `CheckpointOrder` evicts by the tokens that a state
saves: all states of a model have one size.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Container
from typing import NamedTuple

from radixserve.config import LEAST_CHECKPOINT_INTERVAL, choose_checkpoint_interval

LEAST_APART = 16  # tokens: a message that ends nearer to the checkpoint before gets none
_PER_OCTAVE = 4  # checkpoints while the prefix doubles, below the interval
_PER_PREFIX = 64  # steps of a longer prefix, rounded down to a power of two
_MAX_SHARE = 8  # ends of messages that may get a checkpoint within one step of the spacing
_MAX_USES = 2  # further uses of a checkpoint are not counted


class CheckpointSpacing:
    """The lengths at which a sequence leaves a checkpoint though nothing says that others will
    continue there."""

    def __init__(self, interval: int | None, state_tokens: float = 0.0) -> None:
        """`interval`: tokens from one to the next. None: by `state_tokens`, the K/V that takes the
        memory of a state. The step is then a quarter of the prefix, at most that ratio; on long
        prefixes it is a 64th of the prefix."""
        self._is_fixed = interval is not None
        self.interval = choose_checkpoint_interval(interval, state_tokens)

    def step(self, length: int) -> int:
        """Returns the tokens from one checkpoint to the next after `length` tokens."""
        if self._is_fixed:
            return self.interval
        size = 1 << length.bit_length() >> 1  # the power of two at or below
        near = max(LEAST_CHECKPOINT_INTERVAL, size // _PER_OCTAVE)
        return max(min(self.interval, near), size // _PER_PREFIX)

    def lengths(self, start: int, end: int) -> list[int]:
        """Returns the lengths in (start, end] at which to take checkpoints, ascending. They do not
        depend on how a prompt is divided into chunks."""
        lengths = []
        while (start := start + self._to_next(start)) <= end:
            lengths.append(start)
        return lengths

    def least_apart(self, length: int) -> int:
        """Returns the least distance in tokens between a checkpoint at the end of a message and the
        checkpoint before it."""
        return max(LEAST_APART, self.step(length) // _MAX_SHARE)

    def _to_next(self, length: int) -> int:
        step = self.step(length)
        return step - length % step


class _Entry(NamedTuple):
    kind: str
    uses: int
    base: float  # the age of the cache at its last use
    priority: float


class CheckpointOrder:
    """The order of eviction: by the tokens that a checkpoint is expected to save, with ageing
    (GreedyDual-Size with frequency).

    A checkpoint saves the tokens since the one before it on its path, times the probability that
    it is used again. That is estimated from the checkpoints of its kind with as many uses. A
    priority is the age of the cache at the last use plus these tokens; the age is the priority of
    the checkpoint evicted last.
    """

    def __init__(self, tokens_saved: Callable[[int], int]) -> None:
        """`tokens_saved(state_id)`: tokens since the checkpoint before it."""
        self._tokens_saved = tokens_saved
        self._entries: dict[int, _Entry] = {}  # by state id
        self._heap: list[tuple[float, int, int]] = []  # priority, tick, state id; some outdated
        self._ticks: dict[int, int] = {}  # of the valid item of each state
        self._tick = 0
        self._age = 0.0
        self._num_seen: Counter[tuple[str, int]] = Counter()  # by kind and uses
        self._num_used: Counter[tuple[str, int]] = Counter()  # of these, used once more

    def __contains__(self, state_id: int) -> bool:
        return state_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, state_id: int, kind: str) -> None:
        self._num_seen[kind, 0] += 1
        self._put(state_id, kind, 0, self._age)

    def kind(self, state_id: int) -> str:
        return self._entries[state_id].kind

    def use(self, state_id: int) -> None:
        """Note that a sequence continues from a checkpoint. O(log checkpoints + nodes between it
        and the checkpoint before)."""
        kind, uses, _, _ = self._entries[state_id]
        self._num_used[kind, uses] += 1
        uses = min(uses + 1, _MAX_USES)
        self._num_seen[kind, uses] += 1
        self._put(state_id, kind, uses, self._age)

    def discard(self, state_id: int) -> None:
        """Forget a state that is no longer a checkpoint. O(1)."""
        del self._entries[state_id], self._ticks[state_id]

    def first(self, kept: Container[int] = ()) -> int | None:
        """Returns the checkpoint to evict, leaving out those in `kept`; None if there is no other.

        What a checkpoint saves grows when the one before it goes, so a priority is computed again
        before its checkpoint is chosen. O(log checkpoints), amortised, and O(kept).
        """
        passed, heap = [], self._heap
        victim = None
        while heap:
            priority, tick, state_id = heap[0]
            if self._ticks.get(state_id) != tick:
                heapq.heappop(heap)
            elif state_id in kept:
                passed.append(heapq.heappop(heap))
            else:
                kind, uses, base, _ = self._entries[state_id]
                if (now := base + self._value(state_id, kind, uses)) <= priority:
                    victim = state_id
                    break
                heapq.heappop(heap)
                self._push(state_id, _Entry(kind, uses, base, now))
        for item in passed:
            heapq.heappush(heap, item)
        return victim

    def evict(self, state_id: int) -> None:
        """Forget an evicted checkpoint; the age becomes its priority."""
        self._age = max(self._age, self._entries[state_id].priority)
        self.discard(state_id)

    def outlives(self, state_id: int, kind: str, tokens_saved: int) -> bool:
        """Whether a new checkpoint of that kind would be kept longer than this one."""
        value = self._age + tokens_saved * self._rate(kind, 0)
        return value > self._entries[state_id].priority

    def _put(self, state_id: int, kind: str, uses: int, base: float) -> None:
        value = self._value(state_id, kind, uses)
        self._push(state_id, _Entry(kind, uses, base, base + value))

    def _push(self, state_id: int, entry: _Entry) -> None:
        self._tick += 1
        self._entries[state_id], self._ticks[state_id] = entry, self._tick
        if len(self._heap) > 4 * len(self._entries) + 64:
            self._heap = [item for item in self._heap if self._ticks.get(item[2]) == item[1]]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (entry.priority, self._tick, state_id))

    def _value(self, state_id: int, kind: str, uses: int) -> float:
        return self._tokens_saved(state_id) * self._rate(kind, uses)

    def _rate(self, kind: str, uses: int) -> float:
        """Returns the probability that a checkpoint of this kind with as many uses is used
        again."""
        return (self._num_used[kind, uses] + 1) / (self._num_seen[kind, uses] + 2)

    def check(self) -> None:
        """AssertionError unless each checkpoint has one valid item of the heap."""
        valid = [state_id for _, tick, state_id in self._heap if self._ticks.get(state_id) == tick]
        assert sorted(valid) == sorted(self._entries), "a checkpoint cannot be evicted"
