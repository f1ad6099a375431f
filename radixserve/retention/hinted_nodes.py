"""Finds the nodes that a hint applies to: those that sessions reach, and those of one prefix."""

from __future__ import annotations

from collections.abc import Iterable

from radixserve.cache.radix.node import Match, Node, path


def nodes_above(ends: Iterable[Node]) -> set[Node]:
    """Returns the nodes on the paths from the root to these nodes, themselves included."""
    reached: set[Node] = set()
    for end in ends:
        for node in path(end):
            if node in reached:
                break
            reached.add(node)
    return reached


def num_demoted(nodes: Iterable[Node]) -> int:
    """Returns the number of tokens in those of `nodes` that are demoted."""
    return sum(
        node.num_tokens
        for node in nodes
        if node.retention is not None
        and not node.retention.used_without_session
        and not node.retention.num_open
    )


def demotable(match: Match, num_tokens: int) -> list[Node]:
    """Returns the nodes that only a prefix of `num_tokens` tokens and its continuations use, each
    before its parent. Empty if other prefixes continue from the node in which the match ends."""
    length, node, _, _ = match
    if node.parent is None:
        return []
    if length < num_tokens and (length < node.end or node.children):
        return []  # what comes after the match is another prefix's
    nodes: list[Node] = [node]
    for below in nodes:  # grows: the nodes below, level by level
        nodes.extend(below.children.values())
    nodes.reverse()
    above = node.parent
    while above.parent is not None and all(map(_is_demoted, _others(above, nodes[-1]))):
        nodes.append(above)
        above = above.parent
    return nodes


def _others(parent: Node, child: Node) -> Iterable[Node]:
    return (sibling for sibling in parent.children.values() if sibling is not child)


def _is_demoted(node: Node) -> bool:
    refs = node.retention
    return refs is not None and not refs.used_without_session
