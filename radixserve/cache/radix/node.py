"""`Node` and `NamespaceTree`: the records of a tree. `RadixTree` alone changes them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from radixserve.cache.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from sortedcontainers import SortedList


class Watcher:
    """Somebody whose match ends in a node; compared by identity."""

    __slots__ = ()


class SessionRefs:
    """Who may come back to a node. None in its place means: sequences without a session only."""

    __slots__ = ("is_public", "num_leased", "num_open", "sessions")

    def __init__(self, *, is_public: bool) -> None:
        self.is_public = is_public  # a sequence without a session reached it
        self.num_open = 0  # open sessions anchored here + children that are claimed
        self.num_leased = 0  # of both, the leased ones
        self.sessions: set[object] = set()  # open ones, anchored in this very node


# Shared by all nodes that nobody watches, and by all leaves; they stay empty.
NO_WATCHERS: dict[bytes, set[Watcher]] = {}
NO_CHILDREN: dict[bytes, Node] = {}


class NamespaceTree:
    """One namespace's tree. Dead after a reset: nobody new finds it, what it frees is not kept."""

    __slots__ = ("is_dead", "name", "num_locked", "num_pages", "root")

    def __init__(self, name: str, *, is_dead: bool = False) -> None:
        self.name = name
        self.is_dead = is_dead
        self.num_pages = 0  # in its nodes
        self.num_locked = 0  # in its locked nodes
        self.root = Node(self, None, 0, b"", bytearray(), array("i"), node_id=name)


class Node:
    """An edge of the tree and the point where it ends."""

    __slots__ = (
        "children",
        "first_token_index",
        "key",
        "lock_ref",
        "namespace",
        "node_id",
        "pages",
        "parent",
        "policy_key",
        "session_refs",
        "start",
        "tokens",
        "watchers",
    )

    def __init__(
        self,
        namespace: NamespaceTree,
        parent: Node | None,
        start: int,
        key: bytes,
        tokens: bytearray,
        pages: array[int],
        node_id: int | str,
    ) -> None:
        self.namespace = namespace
        self.parent = parent
        self.start = start
        self.key = key  # the bytes of its first page, fewer if shorter: among the parent's children
        self.tokens = tokens
        self.pages = pages
        self.node_id = node_id  # names the node for the memory of evictions
        self.watchers: dict[bytes, set[Watcher]] = (
            NO_WATCHERS  # by the token that they look for next
        )
        self.lock_ref = 0  # sequences that hold this very node + locked children
        self.policy_key = 0  # the eviction policy's own
        self.session_refs: SessionRefs | None = None
        self.children = NO_CHILDREN
        self.first_token_index: dict[bytes, list[bytes] | SortedList] | None = (
            None  # see child_index
        )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // TOKEN_BYTES

    def token_at(self, position: int) -> int:
        """The token id at an absolute position inside the edge."""
        at = (position - self.start) * TOKEN_BYTES
        return int(np.frombuffer(self.tokens, np.int32, 1, at)[0])


def path(node: Node) -> Iterator[Node]:
    """`node` and all above it, without the root."""
    at = node
    while at.parent is not None:
        yield at
        at = at.parent
