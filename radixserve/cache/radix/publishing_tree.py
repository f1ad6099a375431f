"""`PublishingTree`: a `RadixTree` that tells its changes to an event log."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

from radixserve.cache.events import (
    ROOT,
    Appended,
    EventLog,
    Removed,
    Reset,
    Split,
    Stored,
    Truncated,
)
from radixserve.cache.radix.child_index import closest_child
from radixserve.cache.radix.node import Node
from radixserve.cache.radix.radix_tree import RadixTree
from radixserve.errors import InvalidRequest


class PublishingTree(RadixTree):
    """What a tree becomes while its log is open, so that one without a log pays nothing."""

    events: EventLog

    def attach(self, *args: Any, **named: Any) -> Node:
        leaf = super().attach(*args, **named)
        if not leaf.namespace.is_dead:
            self.events.add(_stored(leaf))
        return leaf

    def split(self, node: Node, at: int) -> Node:
        upper = super().split(node, at)
        if not node.namespace.is_dead:
            self.events.add(Split(int(node.node_id), int(upper.node_id), node.num_tokens))
        return upper

    def extend(self, leaf: Node, tokens: bytearray, pages: array[int]) -> None:
        super().extend(leaf, tokens, pages)
        if not leaf.namespace.is_dead:
            self.events.add(Appended(int(leaf.node_id), bytes(tokens)))

    def append_listener(self) -> Callable[[Node, bytes], None] | None:
        return self._note_appended

    def _note_appended(self, leaf: Node, tokens: bytes) -> None:
        super()._note_appended(leaf, tokens)
        if not leaf.namespace.is_dead:
            self.events.add(Appended(int(leaf.node_id), tokens))

    def cut(self, leaf: Node, keep: int) -> array[int]:
        before = leaf.num_tokens
        pages = super().cut(leaf, keep)
        if not leaf.namespace.is_dead:
            self.events.add(Truncated(int(leaf.node_id), before - leaf.num_tokens))
        return pages

    def remove(self, node: Node) -> array[int]:
        parent = node.parent
        pages = super().remove(node)
        if not node.namespace.is_dead and parent is not None:
            shared = closest_child(parent, node.key)[1] if self.page_size > 1 else 0
            self.events.add(Removed(int(node.node_id), node.num_tokens - shared))
        return pages

    def reset(self, name: str | None) -> None:
        gone = [one for one in self.namespaces if name in (None, one)]
        super().reset(name)
        for one in gone:
            self.events.add(Reset(one))

    def stored_nodes(self) -> Iterator[Stored]:
        """All nodes of live namespaces, parents first."""
        for space in self.namespaces.values():
            queue = deque(space.root.children.values())
            while queue:
                node = queue.popleft()
                yield _stored(node)
                queue.extend(node.children.values())


def open_log(tree: RadixTree, epoch: int | None) -> EventLog:
    """See `PrefixCache.open_events`."""
    if isinstance(tree, PublishingTree):
        raise InvalidRequest("this cache's events are open already: close that log first")
    tree.__class__ = PublishingTree  # it has the same fields
    assert isinstance(tree, PublishingTree)
    publishing, plain = tree, cast(RadixTree, tree)

    def close() -> None:
        if publishing.events is log:
            plain.__class__ = RadixTree

    log = publishing.events = EventLog(publishing.stored_nodes, close, epoch)
    return log


def _stored(node: Node) -> Stored:
    parent = node.parent
    assert parent is not None
    above = ROOT if parent.parent is None else int(parent.node_id)
    return Stored(int(node.node_id), above, node.namespace.name, bytes(node.tokens))
