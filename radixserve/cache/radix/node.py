"""`Node` and `NamespaceTree`: the records of a tree. `RadixTree` alone changes them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.namespace import Namespace
from radixserve.cache.sequence import NO_PAGES, NamespaceEntry
from radixserve.cache.tokens import TOKEN_BYTES, as_view

if TYPE_CHECKING:
    from sortedcontainers import SortedList


_UNSET = array("i", (0,))
NO_CHILDREN: dict[bytes, Node] = {}  # shared by all leaves; stays empty


class NamespaceTree(NamespaceEntry):
    """One namespace's tree in one epoch of the weights. Dead after a reset: released pages are not
    cached."""

    __slots__ = ("epoch", "num_locked", "num_pages", "root")

    def __init__(self, key: Namespace, epoch: int = 0, *, is_dead: bool = False) -> None:
        super().__init__(key, is_dead=is_dead)
        self.epoch = epoch  # see `RadixTree.begin_epoch`
        self.num_pages = 0  # in its nodes
        self.num_locked = 0  # in its locked nodes
        root_id = f"\0{epoch}\0{self.text}" if epoch else self.text
        self.root = Node(self, None, 0, b"", bytearray(), array("i"), node_id=root_id)


class TokenValues(Protocol):
    """What a plug-in keeps of a node's tokens, from the first one on; see `Node.token_values`."""

    def split(self, num_tokens: int) -> TokenValues:
        """Returns the values of the first `num_tokens` tokens, and keeps the others."""

    def cut(self, num_tokens: int) -> None:
        """Drop the values after the first `num_tokens` tokens."""


class Node:
    """An edge of the tree and the point where it ends."""

    __slots__ = (
        "children",
        "first_token_index",
        "key",
        "last_use",
        "lock_ref",
        "namespace",
        "node_id",
        "pages",
        "parent",
        "policy_key",
        "retention",
        "start",
        "token_values",
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
        self.node_id = node_id  # never used again; the root's is a text, that of its namespace
        self.lock_ref = 0  # sequences that end in this node + locked children
        self.policy_key: Any = 0  # set by the eviction policy
        self.last_use = 0.0  # the tree's `now` when its last lock was released
        self.retention: Any = None  # of the `RetentionPolicy`, if it knows the node
        self.token_values: TokenValues | None = None  # of a plug-in: they live as long as tokens
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


def path_pages(node: Node, count: int, more: array[int] = NO_PAGES) -> array[int]:
    """Returns the first `count` page ids on the path from the root to `node`, and `more`.
    O(count)."""
    parent = node.parent
    if parent is None or parent.parent is None:  # one node, as of most paths
        pages = node.pages
        if len(pages) > count or not more:
            pages = pages[:count]
        return pages + more if more else pages
    pages = _UNSET * count + more
    begin, room = 0, as_view(pages)
    for piece in reversed([part.pages for part in path(node)]):
        end = min(begin + len(piece), count)
        room[begin:end] = as_view(piece)[: end - begin]
        begin = end
    return pages


def path_tokens(node: Node, length: int, more: bytes = b"") -> bytearray:
    """Returns the first `length` tokens (int32 bytes) on the path from the root to `node`, and
    `more`. O(length)."""
    tokens, count, parent = node.tokens, length * TOKEN_BYTES, node.parent
    if parent is None or parent.parent is None:
        if len(tokens) > count or not more:
            tokens = tokens[:count]
        return tokens + more if more else tokens
    nodes = [part for part in path(node) if part.start < length]  # it may begin after them
    last = as_view(nodes[0].tokens)[: count - nodes[0].start * TOKEN_BYTES] if nodes else b""
    return bytearray().join((*[part.tokens for part in nodes[:0:-1]], last, more))


def prefix_of(node: Node) -> tuple[str, IntArray]:
    """Returns the namespace of a node, and the tokens from the root to its end."""
    edges = [bytes(ancestor.tokens) for ancestor in path(node)]
    return node.namespace.text, np.frombuffer(b"".join(edges[::-1]), np.int32)


# A plain tuple: as a NamedTuple it would cost each acquired sequence 4 % of its time (case D of
# benchmarks/bench_cache.py). Every user unpacks it by name.
Match = tuple[int, Node, Node, bytes]
"""(length, node, resume, page): where the walk along a prompt stopped.

`length` tokens agree, the last of them in `node`. `resume` is the deepest node whose tokens agree
from its start on whole pages; it differs from `node` when only a prefix of a child's first page
agrees. `page` is the first page looked for below `resume` that is not a child's; b"" where the walk
stopped for another reason.
"""
