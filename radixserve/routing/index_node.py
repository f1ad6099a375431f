"""`IndexNode`: an edge of the token index, and the replicas that hold it."""

from __future__ import annotations

from radixserve.cache.tokens import TOKEN_BYTES


class Reserved:
    """Requests under way whose prompts go through a node, by replica."""

    __slots__ = ("counts", "mask")

    def __init__(self, mask: int, counts: dict[int, int]) -> None:
        self.mask = mask  # bit r: there are some that went to replica r
        self.counts = counts

    def add(self, replica: int) -> None:
        self.mask |= 1 << replica
        self.counts[replica] = self.counts.get(replica, 0) + 1

    def drop(self, replica: int) -> bool:
        """Whether none is left."""
        left = self.counts[replica] - 1
        if left:
            self.counts[replica] = left
        else:
            del self.counts[replica]
            self.mask &= ~(1 << replica)
        return not self.counts


class IndexNode:
    """Where an edge ends. 80 bytes, its tokens, and its place among the parent's children."""

    __slots__ = ("children", "holders", "parent", "reserved", "tokens")

    def __init__(self, parent: IndexNode | None, tokens: bytes, holders: int) -> None:
        self.parent = parent
        self.tokens = tokens  # int32
        self.holders = holders  # bit r: replica r has all tokens from the root to here
        self.reserved: Reserved | None = None
        self.children = NO_CHILDREN

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


class Root(IndexNode):
    """The empty edge at the top of a namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str) -> None:
        super().__init__(None, b"", 0)
        self.namespace = namespace


NO_CHILDREN: dict[bytes, IndexNode] = {}  # by first token; shared by all leaves, stays empty
