"""A retention policy of one's own: what a tree keeps longer, in about thirty lines."""

from __future__ import annotations

from radixserve.cache import RadixCache
from radixserve.cache.radix.node import Node
from radixserve.retention import SessionRetention


class KeepsLongPrompts(SessionRetention):
    """Evicts paths of eight tokens or more after all shorter ones, whoever used them."""

    def victim(self) -> Node | None:
        order = [node for node, _ in self.preview() if not node.children]
        short = [leaf for leaf in order if leaf.end < 8]
        return next(iter(short or order), None)

    def state(self, node: Node) -> str:
        return "retained" if node.end >= 8 else super().state(node)


def fill(cache: RadixCache, tokens: list[int]) -> None:
    with cache.acquire(tokens) as sequence:
        sequence.extend(tokens[sequence.cached_len :])
        sequence.commit(sequence.length)


def cached_len(cache: RadixCache, tokens: list[int]) -> int:
    return cache.lookup(tokens, allow_full=True).cached_len


def test_a_policy_of_ones_own_keeps_what_it_wants() -> None:
    long, short = list(range(100, 112)), list(range(200, 206))
    for retention, kept in ((None, short), (KeepsLongPrompts, long)):
        cache = RadixCache(20, retention=retention)
        cache.open_session("any").close()  # a retention policy is made with the first session
        fill(cache, long)
        fill(cache, short)
        cache.evict(len(short))
        cache.check()
        assert cached_len(cache, kept) == len(kept)
