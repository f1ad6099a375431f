"""`Node` and `Space`: the records that a tree is made of. `RadixTree` alone changes them."""

from __future__ import annotations

from array import array

import numpy as np
from sortedcontainers import SortedList

TOKEN_BYTES = 4  # tokens are kept as int32 bytes: one memcmp compares an edge


class Watcher:
    """Somebody whose match ends in a node; compared by identity."""

    __slots__ = ()


NOBODY: dict[bytes, set[Watcher]] = {}  # shared by all nodes that nobody watches; stays empty


class Space:
    """One namespace's tree. Dead after a reset: nobody new finds it, what it frees is not kept."""

    __slots__ = ("is_dead", "name", "num_locked", "num_pages", "root")

    def __init__(self, name: str, *, is_dead: bool = False) -> None:
        self.name = name
        self.is_dead = is_dead
        self.num_pages = 0  # in its nodes
        self.num_locked = 0  # in its locked nodes
        self.root = Node(self, None, 0, bytearray(), array("i"), serial=name)


class Node:
    """An edge of the tree and the point where it ends."""

    __slots__ = (
        "children",
        "keys",
        "pages",
        "parent",
        "refs",
        "serial",
        "space",
        "start",
        "tokens",
        "watchers",
    )

    def __init__(
        self,
        space: Space,
        parent: Node | None,
        start: int,
        tokens: bytearray,
        pages: array[int],
        serial: int | str,
    ) -> None:
        self.space = space
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.pages = pages
        self.serial = serial  # names the node for the memory of evictions
        self.watchers: dict[bytes, set[Watcher]] = NOBODY  # by the token that they look for next
        self.refs = 0  # sequences that hold this very node + locked children
        self.children: dict[bytes, Node] = {}
        self.keys: SortedList | None = None  # of the children, once there are many (P > 1)

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
