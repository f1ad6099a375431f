"""Where sequences leave checkpoints of recurrent states, and which checkpoint is evicted first.

A state of a large model takes the memory of thousands of tokens' K/V, one of a small model that of
ten. `CheckpointSpacing` follows this ratio. `CheckpointOrder` evicts by the tokens that a state
saves: all states of a model have one size.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Container

from radixserve.cache.radix.child_index import siblings_with_head
from radixserve.cache.radix.node import Node, path
from radixserve.config import LEAST_CHECKPOINT_INTERVAL, choose_checkpoint_interval

NO_STATE = -1  # instead of a state id
LEAST_APART = 16  # tokens: a message that ends nearer to the checkpoint before gets none
_PER_OCTAVE = 4  # checkpoints while the prefix doubles, below the interval
_PER_PREFIX = 64  # steps of a longer prefix, rounded down to a power of two
_MAX_SHARE = 8  # ends of messages that may get a checkpoint within one step of the spacing
_MAX_USES = 2  # further uses of a checkpoint are not counted
_FIRST_STAGE = 4  # acquired sequences
_LAST_STAGE = 20
_FIRST_WAIT = 8.0  # acquired sequences until a use, as long as nothing is known

_Class = tuple[str, int, int]  # kind, uses and stage
_NO_RECORDS: dict[int, CheckpointRecord] = {}  # of a node; stays empty


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


class CheckpointRecord:
    """A checkpoint and its uses. The record outlives the eviction of its state as long as the K/V
    is cached, so that prompts that would have continued there are counted."""

    __slots__ = (
        "kind",
        "last_use",
        "length",
        "node",
        "priority",
        "stage",
        "state_id",
        "tokens_saved",
        "uses",
    )

    def __init__(self, node: Node, length: int, kind: str, time: int) -> None:
        self.node = node  # holds token length - 1
        self.length = length
        self.kind = kind
        self.uses = 0
        self.last_use = time  # of `CheckpointOrder`
        self.stage = 0  # see `ReuseRates`; -1: forgotten
        self.state_id = NO_STATE  # its state was evicted
        self.tokens_saved = 0  # when this was computed last; it may have grown since
        self.priority = 0.0


class ReuseRates:
    """Estimates whether and when a checkpoint is used again, from the checkpoints of its kind with
    as many uses that were unused for as long.

    Time is counted in acquired sequences. A checkpoint is in stage 0 until _FIRST_STAGE sequences
    after its last use; each further stage ends after twice that time.
    """

    def __init__(self) -> None:
        self._num_seen: Counter[_Class] = Counter()  # checkpoints that reached it
        self._num_used: Counter[_Class] = Counter()  # of these, used once more, then or later
        self._waits: Counter[_Class] = Counter()  # of these, time from its begin to the use

    def note_stage(self, record: CheckpointRecord) -> None:
        """Note that a record reached its stage."""
        self._num_seen[record.kind, record.uses, record.stage] += 1

    def note_use(self, record: CheckpointRecord, time: int) -> None:
        """Note that a record, which is still unchanged, is used at `time`."""
        for stage in range(record.stage + 1):
            key = record.kind, record.uses, stage
            self._num_used[key] += 1
            self._waits[key] += time - record.last_use - (stage_end(stage - 1) if stage else 0)

    def score(self, kind: str, uses: int, stage: int) -> float:
        """Returns the probability of a further use, divided by the root of the expected time until
        then. (Divided by the time itself, it would favour what is used soon over long prefixes.)"""
        key = kind, uses, 0
        rate = (self._num_used[key] + 1) / (self._num_seen[key] + 2)
        for later in range(1, stage + 1):
            key = kind, uses, later
            rate = (self._num_used[key] + rate) / (self._num_seen[key] + 1)
        wait = (self._waits[key] + _FIRST_WAIT) / (self._num_used[key] + 1)
        return rate / math.sqrt(max(1.0, wait))


def stage_end(stage: int) -> int:
    """Returns the time after a checkpoint's last use at which a stage ends."""
    return _FIRST_STAGE << stage


class CheckpointOrder:
    """The order of eviction: by the tokens that a checkpoint is expected to save.

    A checkpoint saves the tokens since the one before it on its path, times its score, see
    `ReuseRates`. Evicted checkpoints count as used where a prompt would have continued at them:
    otherwise a kind that is evicted early would appear to be useless, and be evicted early.
    """

    def __init__(self, tokens_saved: Callable[[int], int], max_evicted: int) -> None:
        """`tokens_saved(state_id)`: tokens since the checkpoint before it. `max_evicted`: records
        of evicted checkpoints that are kept."""
        self._tokens_saved = tokens_saved
        self._max_evicted = max_evicted
        self._records: dict[Node, dict[int, CheckpointRecord]] = {}  # by length
        self._by_state: dict[int, CheckpointRecord] = {}
        self._evicted: dict[CheckpointRecord, None] = {}  # the oldest first
        self._rates = ReuseRates()
        self._time = 0  # acquired sequences
        self._stage_ends: list[tuple[int, int, CheckpointRecord]] = []  # heap: time, tick, record
        self._heap: list[tuple[float, int, int]] = []  # priority, tick, state id; some outdated
        self._ticks: dict[int, int] = {}  # of the valid item of each state
        self._tick = 0

    def __contains__(self, state_id: int) -> bool:
        return state_id in self._by_state

    def __len__(self) -> int:
        return len(self._by_state)

    def place(self, state_id: int) -> tuple[Node, int]:
        """Returns the node and the length of a checkpoint."""
        record = self._by_state[state_id]
        return record.node, record.length

    def kind(self, state_id: int) -> str:
        return self._by_state[state_id].kind

    def advance(self) -> None:
        """Note that a sequence is acquired: the time of `ReuseRates`. O(log records), amortised."""
        self._time += 1
        ends = self._stage_ends
        while ends and ends[0][0] <= self._time:
            _, _, record = heapq.heappop(ends)
            if record.stage >= 0 and record.last_use + stage_end(record.stage) <= self._time:
                record.stage += 1
                self._begin_stage(record)

    def add(self, node: Node, length: int, state_id: int, kind: str) -> None:
        """Add a checkpoint. One that was evicted keeps its kind and its uses."""
        records = self._records.setdefault(node, {})
        record = records.get(length)
        if record is None:
            records[length] = record = CheckpointRecord(node, length, kind, self._time)
            self._rates.note_stage(record)
            self._await_stage_end(record)
        else:
            del self._evicted[record]
        record.state_id = state_id
        self._by_state[state_id] = record
        record.tokens_saved = self._tokens_saved(state_id)
        self._put(record)

    def use(self, state_id: int) -> None:
        """Note that a sequence continues from a checkpoint. O(log checkpoints)."""
        self._use(self._by_state[state_id])

    def miss(self, node: Node, start: int, end: int) -> dict[int, tuple[str, int]]:
        """Note that a prompt that matches `end` tokens, the last of them in `node`, continues from
        `start`. The deepest evicted checkpoint between them counts as used. Returns kind and uses
        of those that prompts asked for, by length. O(nodes between them)."""
        if start == end or not self._evicted:
            return {}
        parent = node.parent
        levels = [[node]] if parent is None else [siblings_with_head(node, end)]
        levels += [[ancestor] for ancestor in path(parent)] if parent is not None else []
        missed: list[CheckpointRecord] = []
        for nodes in levels:
            for node in nodes:
                missed += [
                    record
                    for length, record in self._records.get(node, _NO_RECORDS).items()
                    if start < length <= end and record.state_id == NO_STATE
                ]
            if any(node.start <= start for node in nodes):
                break
        if missed:
            self._use(max(missed, key=lambda record: record.length))
        return {record.length: (record.kind, record.uses) for record in missed if record.uses}

    def split(self, upper: Node, lower: Node) -> None:
        """Move the records of `lower` that belong to `upper`, its new upper part."""
        records = self._records.get(lower)
        if records is None:
            return
        moved = {length: records.pop(length) for length in list(records) if length <= upper.end}
        for record in moved.values():
            record.node = upper
        if moved:
            self._records[upper] = moved
        if not records:
            del self._records[lower]

    def forget_after(self, node: Node, end: int) -> None:
        """Forget the evicted checkpoints of `node` after position `end`."""
        records = self._records.get(node, _NO_RECORDS).values()
        for record in [record for record in records if record.length > end]:
            if record.state_id == NO_STATE:
                del self._evicted[record]
                self._forget(record)

    def discard(self, state_id: int) -> None:
        """Forget a state that is no longer a checkpoint. O(1)."""
        record = self._by_state.pop(state_id)
        del self._ticks[state_id]
        self._forget(record)

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
                record = self._by_state[state_id]
                record.tokens_saved = self._tokens_saved(state_id)
                if self._value(record) <= priority:
                    victim = state_id
                    break
                heapq.heappop(heap)
                self._put(record)
        for item in passed:
            heapq.heappush(heap, item)
        return victim

    def evict(self, state_id: int) -> None:
        """Remove a checkpoint and keep its record."""
        record = self._by_state.pop(state_id)
        del self._ticks[state_id]
        record.state_id = NO_STATE
        self._evicted[record] = None
        if len(self._evicted) > self._max_evicted:
            oldest = next(iter(self._evicted))
            del self._evicted[oldest]
            self._forget(oldest)

    def outlives(self, state_id: int, kind: str, tokens_saved: int, uses: int) -> bool:
        """Whether a new checkpoint of that kind would be kept longer than this one."""
        value = tokens_saved * self._rates.score(kind, uses, 0)
        return value > self._by_state[state_id].priority

    def _use(self, record: CheckpointRecord) -> None:
        self._rates.note_use(record, self._time)
        record.uses = min(record.uses + 1, _MAX_USES)
        record.last_use, record.stage = self._time, 0
        self._begin_stage(record)

    def _begin_stage(self, record: CheckpointRecord) -> None:
        self._rates.note_stage(record)
        self._await_stage_end(record)
        if record.state_id != NO_STATE:
            self._put(record)

    def _await_stage_end(self, record: CheckpointRecord) -> None:
        if record.stage < _LAST_STAGE:
            self._tick += 1
            end = record.last_use + stage_end(record.stage)
            heapq.heappush(self._stage_ends, (end, self._tick, record))

    def _forget(self, record: CheckpointRecord) -> None:
        records = self._records[record.node]
        del records[record.length]
        if not records:
            del self._records[record.node]
        record.stage = -1
        del record.node  # the heap of stages keeps the record for a while

    def _put(self, record: CheckpointRecord) -> None:
        record.priority = self._value(record)
        self._tick += 1
        self._ticks[record.state_id] = self._tick
        if len(self._heap) > 4 * len(self._by_state) + 64:
            self._heap = [item for item in self._heap if self._ticks.get(item[2]) == item[1]]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (record.priority, self._tick, record.state_id))

    def _value(self, record: CheckpointRecord) -> float:
        return record.tokens_saved * self._rates.score(record.kind, record.uses, record.stage)

    def check(self, nodes: Container[Node]) -> None:
        """AssertionError unless each checkpoint has one valid item of the heap, and each record
        belongs to one of these nodes."""
        valid = [state_id for _, tick, state_id in self._heap if self._ticks.get(state_id) == tick]
        assert sorted(valid) == sorted(self._by_state), "a checkpoint cannot be evicted"
        num_records = 0
        for node, records in self._records.items():
            assert records, f"node {node.node_id} has an empty record of checkpoints"
            assert node in nodes, f"node {node.node_id} is gone and has records of checkpoints"
            for length, record in records.items():
                assert (record.node, record.length) == (node, length), "a record is misplaced"
                assert node.start < length <= node.end, f"record {length} of another node"
                is_kept = self._by_state.get(record.state_id) is record
                assert is_kept != (record in self._evicted), "a record has no owner"
            num_records += len(records)
        assert num_records == len(self._by_state) + len(self._evicted), "a record has no node"
        assert len(self._evicted) <= self._max_evicted, "too many records of evicted checkpoints"
