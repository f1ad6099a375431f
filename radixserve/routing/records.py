"""Records of the token index: a replica, a prompt under way to one, the end of a walk."""

from __future__ import annotations

from typing import NamedTuple

from radixserve.cache.events import EventCursor
from radixserve.routing.index_node import IndexNode

NEVER = float("-inf")


class Reservation(NamedTuple):
    """A prompt that is under way to a replica: counts as cached there."""

    number: int
    node: IndexNode


class Matched(NamedTuple):
    """Where a walk down a prompt ended."""

    node: IndexNode
    pos: int  # bytes
    spread: int = 0  # leading tokens with fewer holders than their share of all work needs
    continued: IndexNode | None = None  # where the conversation ends that the prompt continues


class HoldingReplica:
    """One replica: its stream, and where its nodes end."""

    __slots__ = ("cursor", "ends", "evicted_at", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.cursor = EventCursor()
        self.ends: dict[int, IndexNode] = {}  # by the replica's node ids
        self.evicted_at = NEVER  # last use of what it evicted last
