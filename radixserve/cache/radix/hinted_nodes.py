"""What hints are about: the nodes that sessions reach, and those that a prefix alone reaches."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.radix.match import Match
from radixserve.cache.radix.node import Node, path
from radixserve.cache.radix.session import RadixSession


def held_nodes(sessions: Iterable[RadixSession]) -> set[Node]:
    """The nodes on the way to where sequences of these sessions ended."""
    found: set[Node] = set()
    for session in sessions:
        for end in session.end_nodes:
            for node in path(end):
                if node in found:
                    break
                found.add(node)
    return found


def num_demoted(nodes: Iterable[Node]) -> int:
    """Tokens in those of `nodes` that are dropped first, or will be when they are unlocked."""
    return sum(
        node.num_tokens
        for node in nodes
        if node.session_refs is not None
        and not node.session_refs.is_public
        and not node.session_refs.num_open
    )


def paths_of(session: RadixSession) -> list[tuple[str, IntArray]]:
    """The namespace and the tokens of each of the session's end nodes, from the root."""
    return [
        (end.namespace.name, np.frombuffer(b"".join([*_edges(end)][::-1]), np.int32))
        for end in session.end_nodes
        if not end.namespace.is_dead
    ]


def _edges(node: Node) -> Iterable[bytes]:
    return (bytes(at.tokens) for at in path(node))


def demotable(match: Match, num_tokens: int) -> list[Node]:
    """The nodes that only a prefix of `num_tokens` and what goes on from it need: each before its
    parent. Empty where other prefixes go on from the node in which its match ends."""
    length, node, _, _ = match
    if node.parent is None:
        return []
    if length < num_tokens and (length < node.end or node.children):
        return []  # what comes after the match is another prefix's
    found: list[Node] = [node]
    for at in found:  # grows: the nodes below, level by level
        found.extend(at.children.values())
    found.reverse()
    above = node.parent
    while above.parent is not None and all(map(_is_demoted, _others(above, found[-1]))):
        found.append(above)
        above = above.parent
    return found


def _others(parent: Node, child: Node) -> Iterable[Node]:
    return (one for one in parent.children.values() if one is not child)


def _is_demoted(node: Node) -> bool:
    refs = node.session_refs
    return refs is not None and not refs.is_public
