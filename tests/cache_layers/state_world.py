"""The worlds of `world` with recurrent states.

Every state holds the token prefix that it stands for. Copies are made as late as they may be: right
before tokens are computed.
"""

from __future__ import annotations

from typing import Any

import pytest

from radixserve.cache import Lookup, RadixCache
from radixserve.cache.radix.node import path
from radixserve.cache_layers import RecurrentLayers
from radixserve.cache_layers.recurrent import StateCheckpoints
from radixserve.errors import InvalidRequest, OutOfPages
from tests.cache.hash_world import LateWorld
from tests.cache.world import Prefix, World


class StateWorld(World):
    num_states = 40
    interval = 3

    def make_cache(self, num_pages: int, page_size: int, **options: Any) -> RadixCache:
        self.states: dict[int, Prefix] = {}
        self.copies: list[tuple[int, int]] = []
        return RadixCache(
            num_pages,
            page_size,
            options["eviction"],
            reuse=options["reuse"],
            layers=RecurrentLayers(self.num_states, self.interval),
            max_lease_share=0.4,
            clock=lambda: self.now,
        )

    @property
    def checkpoints(self) -> StateCheckpoints:
        layers = self.cache.layers
        assert isinstance(layers, RecurrentLayers)
        return layers.checkpoints

    def acquire(self, tokens: Prefix, namespace: str = "", **options: Any) -> None:
        super().acquire(tokens, namespace, **options)
        seq: Any = self.open[-1]
        _, begins_at = seq.owned_states()
        assert bool(begins_at) == (seq.cached_len > 0)
        if begins_at:
            assert self.states_now()[begins_at[0]] == tokens[: seq.cached_len]

    def extend(self, seq: Any, tokens: Prefix) -> bool:
        start = seq.length
        if not super().extend(seq, tokens):
            return False
        self.states, self.copies = self.states_now(), []
        if start:
            assert self.states[seq.state_id] == tuple(seq.tokens[:start]), "another state"
        for length, state_id in seq.take_checkpoints(start):
            assert start < length <= seq.length
            self.states[state_id] = tuple(seq.tokens[:length])
        self.states[seq.state_id] = tuple(seq.tokens)
        return True

    def fork(self, seq: Any) -> None:
        if seq.length == seq.committed_len:
            super().fork(seq)
        else:
            with pytest.raises(InvalidRequest, match="are committed"):
                seq.fork()

    def truncate(self, seq: Any, length: int) -> None:
        tokens, before = tuple(seq.tokens), seq.length
        try:
            seq.truncate(length)
        except OutOfPages:
            return
        assert seq.length <= length
        assert tuple(seq.tokens) == tokens[: seq.length]
        assert seq.committed_len == seq.length or seq.length == before
        self.copy_page_prefixes(seq)
        self.verify(seq)

    def states_now(self) -> dict[int, Prefix]:
        """What the states hold when the copies have been made."""
        self.copies += self.checkpoints.pool.take_copies()
        states = dict(self.states)
        for source, target in self.copies:
            states[target] = states[source]
        return states

    def check_lookup(self, answer: Lookup, tokens: Prefix, namespace: str) -> None:
        cached = self.longest_cached(tokens, namespace)
        best = self.deepest_checkpoint(tokens[:cached], namespace)
        assert answer.cached_len <= best
        if self.page_size == 1:  # else a sibling's first page may begin with the same tokens
            assert answer.cached_len == best
            assert (answer.reason == "no_checkpoint") == (best < cached)
        if answer.reason == "no_checkpoint":
            assert answer.position == cached

    def deepest_checkpoint(self, tokens: Prefix, namespace: str) -> int:
        lengths = [
            length
            for node, kept in self.checkpoints.by_node.items()
            for length in kept
            if node.namespace.text == namespace and not node.namespace.is_dead
            if self.prefix_of(node, length) == tokens[:length]
        ]
        return max(lengths, default=0)

    def prefix_of(self, node: Any, length: int) -> Prefix:
        held = b"".join([bytes(ancestor.tokens) for ancestor in path(node)][::-1])
        return tuple(memoryview(held).cast("i").tolist()[:length])

    def is_short_of_states(self) -> bool:
        return not self.checkpoints.has_room

    def check(self) -> None:
        super().check()
        states = self.states_now()
        for node, kept in self.checkpoints.by_node.items():
            if node.namespace.is_dead:
                continue
            for length, state_id in kept.items():
                assert states[state_id] == self.prefix_of(node, length), "a checkpoint is wrong"
        for seq in self.open:
            if seq.state_id >= 0:
                assert states[seq.state_id] == tuple(seq.tokens), "a running state is wrong"

    def drain(self) -> None:
        super().drain()
        stats = self.cache.stats()
        assert stats["states_private"] == 0
        assert stats["states_tree"] <= stats["states_total"]


class LateStateWorld(LateWorld, StateWorld):
    pass


class CrowdedStateWorld(StateWorld):
    """Fewer states than sequences."""

    num_states = 5
