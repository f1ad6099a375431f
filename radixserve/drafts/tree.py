"""`CachedContinuation`: what follows the request's tokens in the tree of the cache, since another
request had them before: the same question again, further samples of a prompt, retries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from operator import attrgetter

import numpy as np

from radixserve.cache.radix.node import Node
from radixserve.cache.radix.sequence import RadixSequence
from radixserve.cache.tokens import TOKEN_BYTES
from radixserve.drafts.source import DraftContext, DraftSource

MOST_CHILDREN = 16  # of a node, the latest ones, of which the last used is followed
_LAST_USE = attrgetter("last_use")


class CachedContinuation(DraftSource):
    """Drafts from the node where the request's tokens end, and from those below it."""

    name = "tree"
    first_odds = 0.8

    def draft(self, context: DraftContext, most: int) -> Sequence[int] | None:
        sequence = context.sequence
        if not isinstance(sequence, RadixSequence):
            return None
        node = sequence.last_node
        offset = sequence.committed_len - node.start
        if offset > node.num_tokens:  # the last tokens are in no node of this path yet
            return ()
        last = context.tokens[-1:].tobytes()
        found = bytearray()  # what follows the committed tokens: first of all the last token
        for tokens in _texts_below(node, offset * TOKEN_BYTES, last):
            found += tokens[: (most + 1) * TOKEN_BYTES - len(found)]
            if len(found) > most * TOKEN_BYTES:
                break
        if not found.startswith(last):
            return None  # the request has left what others had: it is the first here
        token_ids: list[int] = np.frombuffer(found, np.int32)[1:].tolist()
        return token_ids


def _texts_below(node: Node, start: int, last: bytes) -> Iterator[bytes]:
    """Yields the tokens of `node` from its byte `start` on, and those of one descendant after the
    other; the first of all begins with the token `last` if there is one that does."""
    if start < len(node.tokens):
        yield bytes(node.tokens[start:])
        last = b""
    while node.children:
        child = node.children.get(last)  # pages of one token
        if child is None:
            latest = islice(reversed(node.children.values()), MOST_CHILDREN)
            fitting = (each for each in latest if each.key.startswith(last))
            child = max(fitting, key=_LAST_USE, default=None)
        if child is None:
            return
        yield bytes(child.tokens)
        node, last = child, b""
