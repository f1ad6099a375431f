"""Events: numbered insertions and evictions of a cache, for routers and mirrors elsewhere.

    log = cache.open_events()
    log.snapshot()        all stored nodes, and the number of the next event
    log.take()            a batch of the events since the last call

A consumer follows with an `EventCursor`, which skips duplicates and detects missing events by their
numbers; then a new snapshot replaces the consumer's state. Events name nodes by ids that are never
reused, so that stored tokens are sent once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from radixserve.errors import InvalidRequest

ROOT = 0  # the parent of nodes that begin at position 0
_MAX_PENDING_BYTES = 1 << 26
_EVENT_BYTES = 64  # bytes counted per event, besides its tokens


class Stored(NamedTuple):
    """A new node: `tokens` follow those of `parent`."""

    node: int
    parent: int
    namespace: str
    tokens: bytes  # int32


class Appended(NamedTuple):
    """`tokens` were appended to a node without children."""

    node: int
    tokens: bytes  # int32


class Split(NamedTuple):
    """`node` was split: `upper`, its new parent, took all but its last `num_tokens` tokens."""

    node: int
    upper: int
    num_tokens: int


class Truncated(NamedTuple):
    """A node without children has lost its last `num_tokens` tokens, not all."""

    node: int
    num_tokens: int


class Removed(NamedTuple):
    """A node without children was removed. Its last `num_tokens` tokens are no longer cached; the
    tokens before these, less than a page, are still in a sibling. For a block of a hash cache
    `num_tokens` is the block size."""

    node: int
    num_tokens: int


class Reset(NamedTuple):
    """All nodes of a namespace were removed."""

    namespace: str


Event = Stored | Appended | Split | Truncated | Removed | Reset


class EventBatch(NamedTuple):
    """Consecutive events. An empty batch still tells the position in the stream."""

    epoch: int  # of the log; a later one's is greater
    first: int  # number of the first event
    events: Sequence[Event]

    @property
    def end(self) -> int:
        """The number of the event that comes next."""
        return self.first + len(self.events)


class EventSnapshot(NamedTuple):
    """The state after all events before number `end`."""

    epoch: int
    end: int
    nodes: Sequence[Stored]  # parents first


class EventLog:
    """Collects the events of one cache between two calls of `take`, in the cache's thread.

    Tokens appended to a node between two calls are one event. More than 64 MiB of pending events
    are discarded: their numbers are skipped, which consumers notice.
    """

    __slots__ = ("_growing", "_on_close", "_pending", "_size", "_stored_nodes", "epoch", "first")

    def __init__(
        self,
        stored_nodes: Callable[[], Iterator[Stored]],
        on_close: Callable[[], None],
        epoch: int | None = None,
    ) -> None:
        """`stored_nodes`: all nodes now, parents first. `epoch`: default nanoseconds of the clock,
        so that those of a restarted process are greater."""
        self.epoch = time.time_ns() if epoch is None else epoch
        self.first = 0  # number of the first event that was not taken
        self._stored_nodes = stored_nodes
        self._on_close = on_close
        self._pending: list[Event] = []
        self._growing: dict[int, int] = {}  # by node: the pending event that takes its next tokens
        self._size = 0  # bytes pending

    def take(self) -> EventBatch:
        """Returns the events since the last call. O(1)."""
        batch = EventBatch(self.epoch, self.first, self._pending)
        self._forget_pending()
        return batch

    def snapshot(self) -> EventSnapshot:
        """Returns a copy of all nodes; it includes the effect of pending events. O(tokens
        cached)."""
        self._growing.clear()
        end = self.first + len(self._pending)
        return EventSnapshot(self.epoch, end, [*self._stored_nodes()])

    def close(self) -> None:
        """Make the cache stop collecting events. Idempotent."""
        self._on_close()
        self._forget_pending()

    def add(self, event: Event) -> None:
        """Append an event; only the cache calls it."""
        if isinstance(event, Stored | Appended):
            index = self._growing.get(event.node)
            if index is not None:
                known = self._pending[index]
                assert isinstance(known, Stored | Appended)
                self._pending[index] = known._replace(tokens=known.tokens + event.tokens)
                self._size += len(event.tokens)
                return
            self._growing[event.node] = len(self._pending)
            self._size += len(event.tokens)
        elif not isinstance(event, Reset):
            self._growing.pop(event.node, None)
        self._pending.append(event)
        self._size += _EVENT_BYTES
        if self._size > _MAX_PENDING_BYTES:
            self._forget_pending()

    def _forget_pending(self) -> None:
        self.first += len(self._pending)
        self._pending, self._size = [], 0
        self._growing.clear()


class EventSource(Protocol):
    """What caches and evicts: it adds its events to `events`, if there is a log."""

    events: EventLog | None


def open_log(
    source: EventSource, stored_nodes: Callable[[], Iterator[Stored]], epoch: int | None
) -> EventLog:
    """Returns a new log of `source`, see `PrefixCache.open_events`. Raises InvalidRequest while it
    has one."""
    if source.events is not None:
        raise InvalidRequest("this cache's events are open already: close that log first")

    def close() -> None:
        if source.events is log:
            source.events = None

    log = source.events = EventLog(stored_nodes, close, epoch)
    return log


class EventCursor:
    """A consumer's position in the event stream of one cache."""

    __slots__ = ("end", "epoch", "is_lost")

    def __init__(self) -> None:
        self.epoch = -1
        self.end = 0  # number of the event that comes next
        self.is_lost = True  # events are missing: a snapshot is needed

    def accept(self, batch: EventBatch) -> Sequence[Event]:
        """Returns the events of `batch` to apply now, in order. Leaves out events that were applied
        before, and all while earlier ones are missing (`is_lost`)."""
        if batch.epoch > self.epoch or (batch.epoch == self.epoch and batch.first > self.end):
            self.is_lost = True
        if self.is_lost or batch.epoch < self.epoch or batch.end <= self.end:
            return ()
        events = batch.events[self.end - batch.first :]
        self.end = batch.end
        return events

    def restart(self, snapshot: EventSnapshot) -> bool:
        """Continue after `snapshot` if it is newer than the last event applied. Returns whether it
        is: then it replaces the consumer's state."""
        if (snapshot.epoch, snapshot.end) < (self.epoch, self.end):
            return False
        if (snapshot.epoch, snapshot.end) == (self.epoch, self.end) and not self.is_lost:
            return False
        self.epoch, self.end, self.is_lost = snapshot.epoch, snapshot.end, False
        return True
