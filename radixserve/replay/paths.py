"""`PathTable`: a whole trace as paths in the tree of all token prefixes, without evictions.

The sequences are the prompts, each with the part of its output that is kept. The tree is cut into
segments where sequences diverge, where one ends, and before the last token of a prompt, which is
always computed and never reused. So all tokens of a segment are used by exactly the same requests,
in the same way, and past or future uses of tokens can be computed segment by segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixserve.replay.trace import Ints, Trace

_BYTES = 4  # per token: edges are the bytes of int32, which memcmp compares


@dataclass(frozen=True, slots=True)
class PathTable:
    """The segments of the tree, and the path of each request through them, root first."""

    lengths: Ints  # [segments] tokens
    starts: Ints  # [segments] position of the first token in its sequences
    segments: NDArray[np.int32]  # the paths of all requests, one after another
    bounds: Ints  # [requests + 1] the begin and end of each request's path in `segments`
    num_usable: Ints  # [requests] leading segments: the prompt without its last token
    reusable: Ints  # [requests] leading prompt tokens of earlier requests, without the last token

    def __len__(self) -> int:
        return len(self.num_usable)

    def path(self, request: int) -> NDArray[np.int32]:
        """The segments of one request, a view. O(1)."""
        return self.segments[self.bounds[request] : self.bounds[request + 1]]

    def first_users(self) -> NDArray[np.int64]:
        """[segments] the first request that uses each; 0 for those of roots, which none uses."""
        users = np.zeros(len(self.lengths), np.int64)
        for request in range(len(self) - 1, -1, -1):
            users[self.path(request)] = request
        return users

    @property
    def distinct_tokens(self) -> int:
        """The number of token prefixes in prompts and kept outputs; each is computed at least
        once."""
        return int(self.lengths.sum())

    @property
    def reusable_tokens(self) -> int:
        """The prompt tokens that an unlimited cache would have reused."""
        return int(self.reusable.sum())


def build_paths(trace: Trace, *, on_request: Callable[[], object] = lambda: None) -> PathTable:
    """Build the table of a trace. `on_request` is called after each request.

    O(tokens of the trace) in comparisons of memory. Needs memory for the distinct tokens meanwhile.
    """
    tree = _Tree()
    ends, limits, reusable = [], [], []
    for request in trace:
        data = request.kept.tobytes()
        limit = len(request.prompt) - 1
        node, num_matched = tree.insert(tree.root(request.namespace), data, 0, limit * _BYTES)
        last, _ = tree.insert(node, data, limit * _BYTES, len(data))
        ends.append(last)
        limits.append(limit)
        reusable.append(num_matched // _BYTES)
        on_request()
    return tree.table(ends, limits, reusable)


class _Tree:
    """The tree under construction. Segments have numbers; those of roots are empty.

    When a segment is split, the upper part gets a new number, so that the segment in which a
    request ends keeps its number.
    """

    def __init__(self) -> None:
        self._roots: dict[str, int] = {}
        self._parents: list[int] = []
        self._starts: list[int] = []  # bytes
        self._edges: list[bytes] = []
        self._children: list[dict[bytes, int]] = []

    def root(self, namespace: str) -> int:
        if namespace not in self._roots:
            self._roots[namespace] = self._add(-1, 0, b"")
        return self._roots[namespace]

    def insert(self, node: int, data: bytes, pos: int, stop: int) -> tuple[int, int]:
        """Insert data[pos:stop] below `node`.

        Returns the segment that ends at `stop`, and the length of `data` that was known before, in
        bytes.
        """
        while pos < stop:
            child = self._children[node].get(data[pos : pos + _BYTES])
            if child is None:
                child = self._add(node, pos, data[pos:stop])
                self._children[node][data[pos : pos + _BYTES]] = child
                return child, pos
            edge = self._edges[child]
            if not data.startswith(edge, pos, stop):
                child = self._split(child, _common(edge, data, pos, stop))
                edge = self._edges[child]
            node, pos = child, pos + len(edge)
        return node, pos

    def table(self, ends: list[int], limits: list[int], reusable: list[int]) -> PathTable:
        """The table of the paths to `ends`. Releases the tree."""
        lengths = np.asarray([len(edge) // _BYTES for edge in self._edges], np.int64)
        starts = np.asarray(self._starts, np.int64) // _BYTES
        self._edges, self._children = [], []
        paths = [self._path(end) for end in ends]
        segments = np.concatenate([*paths, np.empty(0, np.int32)])
        bounds = np.cumsum([0, *map(len, paths)])
        usable = [
            int(np.searchsorted(starts[path], limit))
            for path, limit in zip(paths, limits, strict=True)
        ]
        return PathTable(
            lengths, starts, segments, bounds, np.asarray(usable), np.asarray(reusable, np.int64)
        )

    def _path(self, node: int) -> NDArray[np.int32]:
        path = []
        parents = self._parents
        while parents[node] >= 0:
            path.append(node)
            node = parents[node]
        return np.asarray(path[::-1], np.int32)

    def _add(self, parent: int, start: int, edge: bytes) -> int:
        self._parents.append(parent)
        self._starts.append(start)
        self._edges.append(edge)
        self._children.append({})
        return len(self._edges) - 1

    def _split(self, node: int, cut: int) -> int:
        """Cut a segment after `cut` bytes. Returns the upper part."""
        edge, parent, start = self._edges[node], self._parents[node], self._starts[node]
        upper = self._add(parent, start, edge[:cut])
        self._children[parent][edge[:_BYTES]] = upper
        self._children[upper][edge[cut : cut + _BYTES]] = node
        self._parents[node] = upper
        self._starts[node] = start + cut
        self._edges[node] = edge[cut:]
        return upper


def _common(edge: bytes, data: bytes, pos: int, stop: int) -> int:
    """The number of bytes that `edge` and data[pos:stop] have in common, in whole tokens; the first
    token is known to be the same."""
    count = min(len(edge), stop - pos) // _BYTES
    left: NDArray[Any] = np.frombuffer(edge, np.int32, count)
    differs = left != np.frombuffer(data, np.int32, count, pos)
    first = int(differs.argmax())
    return (first if differs[first] else count) * _BYTES
