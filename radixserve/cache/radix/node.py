"""`Node` and `NamespaceTree`: the records of a tree. `RadixTree` alone changes them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from radixserve.cache.sequence import Namespace, ReturnEstimate
from radixserve.cache.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from sortedcontainers import SortedList


class SessionRefs:
    """The sessions that reach a node. `Node.session_refs` is None if only sequences without a
    session used the node."""

    __slots__ = ("num_leased", "num_open", "num_retained", "sessions", "used_without_session")

    def __init__(self, *, used_without_session: bool) -> None:
        # a sequence without a session reached it, and it has not been demoted since
        self.used_without_session = used_without_session
        self.num_open = 0  # open sessions that end here + children that open sessions reach
        self.num_leased = 0  # of both, the leased ones
        self.num_retained = 0  # of both, those that a retaining session reaches
        self.sessions: set[object] = set()  # open ones that end in this node


NO_CHILDREN: dict[bytes, Node] = {}  # shared by all leaves; stays empty


class NamespaceTree(Namespace):
    """One namespace's tree. Dead after a reset: released pages are not cached."""

    __slots__ = ("num_locked", "num_pages", "root")

    def __init__(self, name: str, *, is_dead: bool = False) -> None:
        super().__init__(name, is_dead=is_dead)
        self.num_pages = 0  # in its nodes
        self.num_locked = 0  # in its locked nodes
        self.root = Node(self, None, 0, b"", bytearray(), array("i"), node_id=name)


class Node:
    """An edge of the tree and the point where it ends."""

    __slots__ = (
        "children",
        "expected",
        "first_token_index",
        "key",
        "last_use",
        "lock_ref",
        "namespace",
        "node_id",
        "pages",
        "parent",
        "policy_key",
        "session_refs",
        "start",
        "tokens",
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
        self.start = start  # position of its first token
        self.key = key  # the bytes of its first page, fewer if shorter: among the parent's children
        self.tokens = tokens  # int32 bytes
        self.pages = pages
        self.node_id = node_id  # never used again; the root's is its namespace's name
        self.lock_ref = 0  # sequences that end in this node + locked children
        self.policy_key = 0  # set by the eviction policy
        self.last_use = 0.0  # the tree's `now` when its last lock was released
        self.session_refs: SessionRefs | None = None
        self.expected: ReturnEstimate | None = None  # its next use; see `ExpectedReturn`
        self.children = NO_CHILDREN
        # see child_index; None while a scan of all children is faster
        self.first_token_index: dict[bytes, list[bytes] | SortedList] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // TOKEN_BYTES

    def token_at(self, position: int) -> int:
        """Returns the token id at an absolute position inside the edge."""
        offset = (position - self.start) * TOKEN_BYTES
        return int(np.frombuffer(self.tokens, np.int32, 1, offset)[0])


def path(node: Node) -> Iterator[Node]:
    """Yields `node` and its ancestors, without the root."""
    ancestor = node
    while ancestor.parent is not None:
        yield ancestor
        ancestor = ancestor.parent


def path_pages(node: Node, count: int) -> array[int]:
    """Returns the first `count` page ids on the path from the root to `node`. O(count)."""
    parent = node.parent
    if parent is None or parent.parent is None:
        return node.pages[:count]
    path = [node.pages]
    ancestor: Node | None = parent
    while ancestor is not None:
        path.append(ancestor.pages)
        ancestor = ancestor.parent
    path.reverse()
    pages = array("i")
    for piece in path:
        pages += piece
    del pages[count:]
    return pages
