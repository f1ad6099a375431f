"""The records of the token index: its nodes, a replica, an open prompt, the end of a walk."""

from __future__ import annotations

from typing import NamedTuple

from radixserve.cache.events import EventCursor
from radixserve.cache.tokens import TOKEN_BYTES

NEVER = float("-inf")


class Reserved:
    """Requests under way whose prompts go through a node, by replica. Not changed once made: nodes
    share those of one request."""

    __slots__ = ("counts", "mask")

    def __init__(self, counts: dict[int, int]) -> None:
        self.mask = sum(1 << number for number in counts)  # bit r: some went to replica r
        self.counts = counts

    def with_one(self, number: int) -> Reserved:
        return Reserved({**self.counts, number: self.counts.get(number, 0) + 1})

    def without_one(self, number: int) -> Reserved | None:
        """None where that was the only one."""
        counts = {**self.counts, number: self.counts[number] - 1}
        if not counts[number]:
            del counts[number]
        return Reserved(counts) if counts else None


class Conversation(NamedTuple):
    """A prompt that later ones may continue."""

    number: int  # of its replica
    expected_s: float  # work of the requests that continue it, when it was last used
    used_at: float


class IndexNode:
    """Where an edge ends. 104 bytes, its tokens, and its place among the parent's children."""

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
        self.used_at = used_at  # when a prompt last went through it, to whatever replica
        self.work_s = 0.0  # recent work of all requests whose prompts go through it, at `used_at`
        self.conversation: Conversation | None = None  # whose last prompt ends here
        self.children = NO_CHILDREN

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class Root(IndexNode):
    """The empty edge at the top of a namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(None, b"", 0, 0.0)
        self.namespace = namespace


NO_CHILDREN: dict[bytes, IndexNode] = {}  # by first token; shared by all leaves, stays empty


class Reservation(NamedTuple):
    """An open prompt, which counts as cached on its replica until the replica's events arrive."""

    number: int
    node: IndexNode


class Matched(NamedTuple):
    """Where a walk down a prompt ended."""

    node: IndexNode
    pos: int  # bytes
    spread: int = 0  # leading tokens with fewer holders than their share of all work needs
    continued: IndexNode | None = None  # where the conversation ends that the prompt continues


class HoldingReplica:
    """A replica: its position in the stream of events, and the ends of its nodes."""

    __slots__ = ("cursor", "ends", "evicted_at", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.cursor = EventCursor()
        self.ends: dict[int, IndexNode] = {}  # by the replica's node ids
        self.evicted_at = NEVER  # last use of the tokens that it evicted last
