"""A plain mirror of a cache, fed by its events alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from radixserve.cache import EventBatch, EventCursor, EventSnapshot
from radixserve.cache.events import ROOT, Appended, Event, Removed, Reset, Split, Stored, Truncated

Prefix = tuple[int, ...]


@dataclass
class Edge:
    namespace: str
    parent: int
    tokens: Prefix


@dataclass
class Mirror:
    """Follows one stream; `edges` by the ids of nodes."""

    cursor: EventCursor = field(default_factory=EventCursor)
    edges: dict[int, Edge] = field(default_factory=dict)

    def take(self, batch: EventBatch) -> None:
        for event in self.cursor.accept(batch):
            self.apply(event)

    def restart(self, snapshot: EventSnapshot) -> None:
        if self.cursor.restart(snapshot):
            self.edges.clear()
            for node in snapshot.nodes:
                self.apply(node)

    def apply(self, event: Event) -> None:
        edges = self.edges
        if isinstance(event, Reset):
            for node in [n for n, edge in edges.items() if edge.namespace == event.namespace]:
                del edges[node]
            return
        if isinstance(event, Stored):
            assert event.node not in edges
            assert event.parent == ROOT or event.parent in edges
            edges[event.node] = Edge(event.namespace, event.parent, _ids(event.tokens))
            return
        edge = edges[event.node]
        if isinstance(event, Split):
            assert 0 < event.num_tokens < len(edge.tokens)
            upper = Edge(edge.namespace, edge.parent, edge.tokens[: -event.num_tokens])
            edges[event.upper] = upper
            edge.parent, edge.tokens = event.upper, edge.tokens[-event.num_tokens :]
            return
        assert not any(other.parent == event.node for other in edges.values())
        if isinstance(event, Appended):
            edge.tokens += _ids(event.tokens)
        elif isinstance(event, Truncated):
            assert 0 < event.num_tokens < len(edge.tokens)
            edge.tokens = edge.tokens[: -event.num_tokens]
        else:
            assert isinstance(event, Removed)
            gone = self.path(event.node)
            del edges[event.node]
            covered = max((_common(gone, path) for path in self.paths(edge.namespace)), default=0)
            start = len(gone) - len(edge.tokens)
            whole_block = len(edge.tokens)  # a hash cache says so whatever siblings hold
            assert event.num_tokens in (len(gone) - max(start, covered), whole_block)

    def path(self, node: int) -> Prefix:
        """All tokens from the root to the end of that node."""
        edge = self.edges[node]
        above = () if edge.parent == ROOT else self.path(edge.parent)
        return above + edge.tokens

    def paths(self, namespace: str) -> list[Prefix]:
        return [self.path(n) for n, edge in self.edges.items() if edge.namespace == namespace]

    def contents(self) -> dict[str, list[Prefix]]:
        names = {edge.namespace for edge in self.edges.values()}
        return {name: sorted(self.paths(name)) for name in names}


def contents(cache: Any) -> dict[str, list[Prefix]]:
    """The same of the cache itself."""
    paths_by_namespace: dict[str, list[Prefix]] = {}
    for name, root in cache.dump()["namespaces"].items():
        stack: list[tuple[dict[str, Any], Prefix]] = [(root, ())]
        while stack:
            node, above = stack.pop()
            for child in node["children"]:
                path = above + tuple(child["tokens"])
                paths_by_namespace.setdefault(name, []).append(path)
                stack.append((child, path))
    return {name: sorted(paths) for name, paths in paths_by_namespace.items()}


def ids(values: Iterable[int]) -> bytes:
    return np.asarray([*values], np.int32).tobytes()


def _ids(tokens: bytes) -> Prefix:
    return tuple(np.frombuffer(tokens, np.int32).tolist())


def _common(left: Prefix, right: Prefix) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count
