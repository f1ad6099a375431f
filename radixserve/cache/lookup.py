"""`Lookup`: how much of a prompt is cached, and why not more."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache.child_index import common_head
from radixserve.cache.node import TOKEN_BYTES, Node, Space
from radixserve.cache.radix_tree import Match, RadixTree

_OTHER_SPACES = 64  # namespaces asked at most when explaining a miss


class Lookup(NamedTuple):
    """The answer of `RadixCache.lookup`.

    reason is one of
      full        all that may be reused is cached
      diverged    cached sequences go on with another token at `position`
      evicted     what follows was cached and has been dropped
      namespace   another namespace holds more of these tokens
      never_seen  nothing cached goes on from here, and nothing that is remembered did

    cached_len is less than position, by a part of a page, where no page can be had for the copy of
    that page's head. A reset forgets; what was evicted is remembered up to a bound.
    """

    cached_len: int  # tokens that acquire() would reuse now
    reason: str
    position: int  # where the prompt and the cached tokens stop agreeing
    expected: int | None = None  # for diverged: a token cached at that position
    found: int | None = None  # for diverged: the prompt's token there


_UNKNOWN = Lookup(0, "never_seen", 0)


def explain(tree: RadixTree, space: Space, match: Match, data: bytes, limit: int) -> Lookup:
    """Why `match` is not longer. `data`: the whole prompt; `limit`: tokens looked for."""
    length = match.length
    if length >= limit:
        return Lookup(length, "full", length)
    if _was_evicted(tree, match, data, limit):
        return Lookup(length, "evicted", length)
    if _is_elsewhere(tree, space, data, limit, length):
        return Lookup(length, "namespace", length)
    expected = _next_token(match) if length else None
    if expected is None:
        return Lookup(length, "never_seen", length)
    found = int(np.frombuffer(data, np.int32, 1, length * TOKEN_BYTES)[0])
    return Lookup(length, "diverged", length, expected, found)


def explain_miss(
    tree: RadixTree, space: Space, first_page: bytes, ids: IntArray, limit: int
) -> Lookup:
    """Why not even the first token is cached. `first_page`: at most a page of int32 bytes."""
    ghost = tree.ghosts.find((space.root.serial, 0, first_page[:TOKEN_BYTES]))
    if ghost and common_head(ghost, first_page):
        return Lookup(0, "evicted", 0)
    is_alone = len(tree.spaces) == 1 and space.name in tree.spaces
    if tree.spaces and not is_alone and _is_elsewhere(tree, space, ids.tobytes(), limit, 0):
        return Lookup(0, "namespace", 0)
    return _UNKNOWN


def _was_evicted(tree: RadixTree, match: Match, data: bytes, limit: int) -> bool:
    """Whether a dropped branch would have matched further than `match` does."""
    node, place = match.resume, match.resume.end
    if place > match.length:  # inside an edge, which may have been cut here and grown again
        place = match.length - match.length % tree.page_size
    at = place * TOKEN_BYTES
    page = data[at : min(limit * TOKEN_BYTES, at + tree.page_size * TOKEN_BYTES)]
    ghost = tree.ghosts.find((node.serial, place, page[:TOKEN_BYTES]))
    return common_head(ghost, page) > match.length - place


def _is_elsewhere(tree: RadixTree, space: Space, data: bytes, limit: int, length: int) -> bool:
    others = islice(tree.spaces.values(), _OTHER_SPACES)
    return any(
        tree.match(other, data, limit).length > length for other in others if other is not space
    )


def _next_token(match: Match) -> int | None:
    """A token that is cached where the match stopped."""
    node: Node | None = match.node
    if node is not None and node.end <= match.length:
        node = next(reversed(node.children.values()), None)  # the front is full of holes
    return None if node is None else node.token_at(match.length)
