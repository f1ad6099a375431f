"""The records of `TokenIndex`: nodes, replicas, reservations of open requests, and matches."""

from __future__ import annotations

from typing import NamedTuple

from radixserve.cache.events import EventCursor
from radixserve.cache.tokens import TOKEN_BYTES

NEVER = float("-inf")


class Reserved:
    """The number of open requests whose prompts pass through a node, by replica. Immutable, since
    the nodes of one prompt share it."""

    __slots__ = ("counts", "mask")

    def __init__(self, counts: dict[int, int]) -> None:
        self.mask = sum(1 << number for number in counts)  # bit r: replica r has one of them
        self.counts = counts

    def with_one(self, number: int) -> Reserved:
        return Reserved({**self.counts, number: self.counts.get(number, 0) + 1})

    def without_one(self, number: int) -> Reserved | None:
        """Without one request of replica `number`; None if no request is left."""
        counts = {**self.counts, number: self.counts[number] - 1}
        if not counts[number]:
            del counts[number]
        return Reserved(counts) if counts else None


class Conversation(NamedTuple):
    """A prompt that later prompts may continue."""

    number: int  # of its replica
    expected_s: float  # at `used_at`: expected work of the requests that continue it, in seconds
    used_at: float


class IndexNode:
    """The end of an edge. Memory: 104 bytes, the edge's tokens, and an entry in the parent's
    children."""

    __slots__ = (
        "children",
        "conversation",
        "holders",
        "parent",
        "reserved",
        "tokens",
        "used_at",
        "work_s",
    )

    def __init__(
        self, parent: IndexNode | None, tokens: bytes, holders: int, used_at: float
    ) -> None:
        self.parent = parent
        self.tokens = tokens  # int32
        self.holders = holders  # bit r: replica r has all tokens from the root to here
        self.reserved: Reserved | None = None
        self.used_at = used_at  # when a prompt last passed through it, on any replica
        self.work_s = 0.0  # at `used_at`: recent work of requests whose prompts pass through it
        self.conversation: Conversation | None = None  # the one whose last prompt ends here
        self.children = NO_CHILDREN

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class Root(IndexNode):
    """The root of a namespace, with an empty edge."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(None, b"", 0, 0.0)
        self.namespace = namespace


NO_CHILDREN: dict[bytes, IndexNode] = {}  # shared by all leaves; always empty


class Reservation(NamedTuple):
    """An open prompt, which counts as cached on its replica until the replica's events arrive."""

    number: int
    node: IndexNode


class Matched(NamedTuple):
    """The end of the longest match of a prompt."""

    node: IndexNode
    pos: int  # bytes of the prompt that match
    spread: int = 0  # leading tokens that should be computed on another replica, too: see `match`
    continued: IndexNode | None = None  # the end of the conversation that the prompt continues


class HoldingReplica:
    """The index's record of a replica: its position in the stream of events, and its nodes."""

    __slots__ = ("cursor", "ends", "evicted_at", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.cursor = EventCursor()
        self.ends: dict[int, IndexNode] = {}  # by the replica's node ids
        self.evicted_at = NEVER  # the last use of the tokens that it evicted last
