"""`tree_edges`: the edges of a trace's prefix tree, how often each is read, and what is computed
again because an LRU cache of a given size had evicted it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from radixserve.replay.paths import PathTable
from radixserve.replay.report import Finding
from radixserve.replay.trace import Ints, Trace

_MOST_CHARS = 60


class TreeEdges(NamedTuple):
    """Runs of prompt tokens that the same requests use, as columns; parents come first."""

    starts: Ints  # [n] position of the first token
    lengths: Ints  # [n] tokens
    parents: Ints  # [n] the edge above; -1: none
    requests: Ints  # [n] that use it
    firsts: Ints  # [n] the first one of them
    hit_tokens: Ints  # [n] read from the cache
    lost_tokens: Ints  # [n] computed again, though they had been computed before

    def largest(self, count: int, tokens: Ints) -> list[int]:
        """The edges with most of these tokens."""
        order = np.argsort(-tokens, kind="stable")[:count]
        return [int(edge) for edge in order if tokens[edge] > 0]


def tree_edges(trace: Trace, paths: PathTable, hits: Ints) -> TreeEdges:
    """The edges of the prompts. `hits`: reused tokens of each request. O(segments on all paths)."""
    num = len(paths.lengths)
    parents, firsts = np.full(num, -1, np.int64), np.full(num, -1, np.int64)
    requests, hit_tokens, lost = (np.zeros(num, np.int64) for _ in range(3))
    for request in range(len(trace)):
        path = paths.path(request)[: int(paths.num_usable[request])]
        lengths, starts = paths.lengths[path], paths.starts[path]
        is_new = requests[path] == 0
        firsts[path[is_new]] = request
        parents[path[1:]] = path[:-1]
        requests[path] += 1
        read = np.clip(int(hits[request]) - starts, 0, lengths)
        known = np.clip(int(paths.reusable[request]) - starts, 0, lengths)
        hit_tokens[path] += read
        lost[path] += np.maximum(0, known - read)
    order = np.flatnonzero(requests)
    order = order[np.argsort(paths.starts[order], kind="stable")]
    places = np.full(num + 1, -1, np.int64)  # the last one: of no parent
    places[order] = np.arange(len(order))
    columns = paths.starts, paths.lengths, parents, requests, firsts, hit_tokens, lost
    edges = TreeEdges(*(column[order] for column in columns))
    return edges._replace(parents=places[edges.parents])


def edge_finding(
    trace: Trace,
    edges: TreeEdges,
    decode: Callable[[Sequence[int]], str] | None,
    count: int = 10,
) -> Finding:
    """A table of the edges that are read most, and of those that are most often computed again."""
    hot = edges.largest(count, edges.hit_tokens)
    lost = edges.largest(count, edges.lost_tokens)
    heads = ["at token", "tokens", "requests", "read", "computed again", "begins"]
    rows = []
    for edge in dict.fromkeys([*hot, *lost]):
        start, length = int(edges.starts[edge]), int(edges.lengths[edge])
        prompt = trace.request(int(edges.firsts[edge])).prompt[start : start + min(length, 40)]
        text = "" if decode is None else decode(prompt.tolist())
        counts = (start, length, edges.requests[edge], edges.hit_tokens[edge])
        rows.append(
            [
                *(f"{int(value):,}" for value in (*counts, edges.lost_tokens[edge])),
                repr(text[:_MOST_CHARS])[1:-1],
            ]
        )
    title = f"{trace.name}: edges of the tree that are read most, or computed again most"
    return Finding(title, heads, rows)
