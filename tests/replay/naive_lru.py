"""LRU on the level of single tokens or blocks, as plainly as it can be written."""

from __future__ import annotations

from collections import OrderedDict

from radixserve.replay.trace import Trace


class NaiveLRU:
    """Named blocks in order of use. A block is named by its parent's name and its own tokens.

    A request touches its blocks from the last one to the first: what lies above is always younger,
    so the oldest has nothing below it.

    `whole_edges`: as a radix tree does it, which locks a whole edge when a request stops inside it.
    Where the request parts from the edge, the rest of the edge counts as used, too, just before
    the request's own tokens. An edge ends where it parted once, for as long as something is below.
    """

    def __init__(self, cache_tokens: int, block: int, *, whole_edges: bool) -> None:
        self._room = cache_tokens // block
        self._block = block
        self._whole_edges = whole_edges
        self._names: dict[tuple[int, bytes], int] = {}  # of every block ever seen
        self._parents: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._below: dict[int, set[int]] = {}  # cached children
        self._parted: set[int] = set()  # blocks after which an edge ends

    def serve(self, kept: list[bytes], num_usable: int, num_prompt: int, num_kept: int) -> int:
        """Blocks found among the first `num_usable`. Room is made for the `num_prompt` tokens of
        the prompt and then for all of the `num_kept`; a last block that is not full is private."""
        path = self._path(kept)
        done = 0
        while done < num_usable and path[done] in self._cached:
            done += 1
        found = done
        if self._whole_edges and found:
            self._touch(self._rest_of_edge(path[found - 1]))
        self._touch(path[:found])
        for tokens in (num_prompt, num_kept):
            while len(self._cached) - (-tokens // self._block) - done > self._room:
                self._forget(next(iter(self._cached)))
            done = tokens // self._block
            self._touch(path[:done])
        return found

    def _path(self, blocks: list[bytes]) -> list[int]:
        path, name = [], -1
        for data in blocks:
            key = name, data
            name = self._names.setdefault(key, len(self._names))
            if name == len(self._parents):
                self._parents.append(key[0])
            path.append(name)
        return path

    def _rest_of_edge(self, name: int) -> list[int]:
        rest = []
        while name not in self._parted and (below := self._below.get(name)):
            (name,) = below
            rest.append(name)
        return rest

    def _touch(self, path: list[int]) -> None:
        for name in reversed(path):
            self._cached[name] = None
            self._cached.move_to_end(name)
            below = self._below.setdefault(self._parents[name], set())
            below.add(name)
            if len(below) > 1:
                self._parted.add(self._parents[name])

    def _forget(self, name: int) -> None:
        del self._cached[name]
        parent = self._parents[name]
        self._below[parent].discard(name)
        if not self._below[parent]:
            self._parted.discard(parent)


def naive_lru_hits(
    trace: Trace, cache_tokens: int, block: int = 1, *, whole_edges: bool = False
) -> list[int]:
    """Reused tokens of each request. One that does not fit alone is passed over."""
    cache = NaiveLRU(cache_tokens, block, whole_edges=whole_edges)
    hits = []
    for request in trace:
        kept = request.kept
        if len(kept) > cache_tokens:
            hits.append(0)
            continue
        blocks = [kept[at : at + block].tobytes() for at in range(0, len(kept) - block + 1, block)]
        usable = (len(request.prompt) - 1) // block
        hits.append(block * cache.serve(blocks, usable, len(request.prompt), len(kept)))
    return hits
