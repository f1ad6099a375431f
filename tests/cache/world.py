"""A cache under an oracle so plain that it is obviously right.

Every page slot holds the token prefix whose K/V it stands for. A step that would read a slot checks
it first. What the cache may hold is followed as a plain set of token tuples.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from radixserve.cache import (
    Lookup,
    OutOfPages,
    PrefixCache,
    PrefixWatch,
    RadixCache,
    RadixSequence,
)
from radixserve.retention.sessions import RadixSession as CacheSession

Prefix = tuple[int, ...]


def picture(cache: PrefixCache) -> dict[str, Any]:
    """All that a cache shows and that time alone does not change."""
    stats = cache.stats()
    del stats["last_minute"]
    return {**cache.dump(), "stats": stats}


class World:
    def __init__(
        self, num_pages: int, page_size: int, *, reuse: bool = True, eviction: str = "lru"
    ) -> None:
        self.now = 0.0
        self.has_sessions = True  # what random programs ask
        self.cache = self.make_cache(num_pages, page_size, reuse=reuse, eviction=eviction)
        self.page_size = page_size
        self.sessions: list[CacheSession] = []  # open and closed ones
        self.owner: dict[int, CacheSession | None] = {}  # id(sequence) -> its session
        self.ends: dict[
            tuple[str, Prefix], list[CacheSession | None]
        ] = {}  # where sequences let go
        self.cells: dict[tuple[int, int], Prefix] = {}  # (page, slot) -> the prefix it stands for
        self.open: list[RadixSequence] = []
        self.spaces: dict[int, str] = {}  # id(sequence) -> namespace; "" of a reset one is kept
        self.watches: list[tuple[PrefixWatch, Prefix, str]] = []
        self.stale: set[int] = set()  # sequences that were open at a reset of their namespace

    def make_cache(
        self, num_pages: int, page_size: int, *, reuse: bool, eviction: str
    ) -> RadixCache:
        return RadixCache(
            num_pages,
            page_size,
            eviction,
            reuse=reuse,
            max_lease_share=0.4,
            clock=lambda: self.now,
        )

    # -- what a user does ---------------------------------------------------------------------

    def open_session(self, lease_s: float) -> None:
        self.sessions.append(self.cache.open_session(f"h{len(self.sessions)}", lease_s=lease_s))

    def acquire(
        self,
        tokens: Prefix,
        namespace: str = "",
        *,
        allow_full: bool = False,
        session: CacheSession | None = None,
        priority: int = 0,
        old_watch: PrefixWatch | None = None,
    ) -> None:
        """`old_watch`: of these tokens; its match is taken, however the cache has changed since."""
        before = self.cache.dump()
        answer = self.cache.lookup(tokens, namespace, allow_full=allow_full)
        watch = self.cache.watch(_array(tokens), namespace)
        assert self.cache.dump() == before, "lookup changed something"
        limit = len(tokens) if allow_full else max(0, len(tokens) - 1)
        true = self.longest_cached(tokens[:limit], namespace)
        self.check_lookup(answer, tokens[:limit], namespace)
        if not allow_full and self.cache.sharing_enabled:
            assert watch.cached_len == true
        self.watches.append((watch, tokens, namespace))
        if old_watch is None:
            seq = self.cache.acquire(
                tokens, namespace, allow_full=allow_full, session=session, priority=priority
            )
        else:
            assert not allow_full
            assert self.cache.resumable_len(old_watch) == answer.cached_len
            seq, lookup = self.cache.acquire_watched(old_watch, session=session, priority=priority)
            assert lookup == answer
        assert seq.cached_len == seq.length == answer.cached_len
        assert tuple(seq.tokens) == tokens[: seq.cached_len]
        self.owner[id(seq)] = session
        self.add_sequence(seq, namespace)

    def extend(self, seq: RadixSequence, tokens: Prefix) -> bool:
        before = self.cache.dump(), self.cache.stats()["pages_free"]
        length = seq.length
        wanted = -(-(length + len(tokens)) // self.cache.page_size) - seq.num_pages
        available = self.cache.num_obtainable(wanted)
        try:
            seq.extend(tokens)
        except OutOfPages:
            assert wanted > available or self.is_short_of_states()
            assert seq.length == length
            assert self.cache.stats()["pages_free"] >= before[1]
            return False
        self.copy_page_prefixes(seq)
        self.write(seq, length)
        return True

    def commit(self, seq: RadixSequence, length: int) -> None:
        seq.commit(length)
        self.verify(seq)
        if self.cache.sharing_enabled and id(seq) not in self.stale:
            cached = self.longest_cached(tuple(seq.tokens[:length]), self.spaces[id(seq)])
            assert cached == length, "published tokens are not in the tree"

    def fork(self, seq: RadixSequence) -> None:
        try:
            fork = seq.fork()
        except OutOfPages:
            return
        assert tuple(fork.tokens) == tuple(seq.tokens[: seq.committed_len])
        if id(seq) in self.stale:
            self.stale.add(id(fork))
        self.owner[id(fork)] = self.owner[id(seq)]
        self.add_sequence(fork, self.spaces[id(seq)])

    def truncate(self, seq: RadixSequence, length: int) -> None:
        tokens = tuple(seq.tokens[:length])
        try:
            seq.truncate(length)
        except OutOfPages:
            return
        assert tuple(seq.tokens) == tokens
        self.copy_page_prefixes(seq)
        self.verify(seq)

    def release(self, seq: RadixSequence) -> None:
        if id(seq) not in self.stale:
            end = self.spaces[id(seq)], tuple(seq.tokens[: seq.committed_len].tolist())
            self.ends.setdefault(end, []).append(self.owner[id(seq)])
        seq.release()
        self.open.remove(seq)
        self.stale.discard(id(seq))

    def evict(self, num_tokens: int) -> None:
        free = self.cache.stats()["pages_free"]
        could = (self.cache.num_available - free) * self.page_size
        rounded = -(-num_tokens // self.page_size) * self.page_size
        kept = {name: self.cached_prefixes(name) for name in ("", "b")}
        freed = self.cache.evict(num_tokens)
        self.check_order_of_loss(kept)
        assert freed == min(rounded, could)
        assert freed == (self.cache.stats()["pages_free"] - free) * self.page_size
        for seq in self.open:
            self.verify(seq)

    def reset(self, namespace: str | None) -> None:
        self.cache.reset(namespace)
        for seq in self.open:
            if namespace is None or self.spaces[id(seq)] == namespace:
                self.stale.add(id(seq))
        self.ends = {e: h for e, h in self.ends.items() if namespace not in (None, e[0])}

    # -- what the device would do -------------------------------------------------------------

    def copy_page_prefixes(self, seq: RadixSequence) -> None:
        for source, target, count in seq.cow_copies:
            for slot in range(count):
                self.cells[target, slot] = self.cells[source, slot]

    def write(self, seq: RadixSequence, start: int) -> None:
        tokens = tuple(seq.tokens)
        shared = self.shared_cells()
        for position in range(start, seq.length):
            cell = int(seq.pages[position // self.page_size]), position % self.page_size
            assert cell not in shared, "a slot that others may read would be overwritten"
            self.cells[cell] = tokens[: position + 1]

    def verify(self, seq: RadixSequence) -> None:
        """Everything that this sequence's next step would read is what it should be."""
        tokens = tuple(seq.tokens)
        heads = {target: source for source, target, _ in seq.cow_copies}
        for position in range(seq.committed_len):
            page, slot = int(seq.pages[position // self.page_size]), position % self.page_size
            page = heads.get(page, page)  # not copied yet
            assert self.cells[page, slot] == tokens[: position + 1], f"position {position} of {seq}"

    # -- the oracle ---------------------------------------------------------------------------

    def paths(self, namespace: str) -> Iterator[tuple[Prefix, list[tuple[int, int]]]]:
        """Every path of the tree from its root: tokens and the cells that hold them."""
        root = self.cache.dump()["namespaces"].get(namespace)
        stack: list[tuple[dict[str, Any], Prefix, list[tuple[int, int]]]] = []
        if root is not None:
            stack.append((root, (), []))
        while stack:
            node, tokens, cells = stack.pop()
            for child in node["children"]:
                more = [
                    (child["pages"][index // self.page_size], index % self.page_size)
                    for index in range(child["num_tokens"])
                ]
                stack.append((child, tokens + tuple(child["tokens"]), cells + more))
            yield tokens, cells

    def longest_cached(self, tokens: Prefix, namespace: str) -> int:
        longest = 0
        for path, cells in self.paths(namespace):
            agreed = 0
            while agreed < min(len(path), len(tokens)) and path[agreed] == tokens[agreed]:
                agreed += 1
            for index in range(len(path)):
                assert self.cells[cells[index]] == path[: index + 1], (
                    "a cached page holds something else"
                )
            longest = max(longest, agreed)
        return longest

    def check_lookup(self, answer: Lookup, tokens: Prefix, namespace: str) -> None:
        true = self.longest_cached(tokens, namespace)
        assert true - true % self.page_size <= answer.cached_len <= true
        if self.cache.stats()["pages_free"]:
            assert answer.cached_len == true

    def is_short_of_states(self) -> bool:
        return False

    def cached_prefixes(self, namespace: str) -> set[Prefix]:
        paths = self.paths(namespace)
        return {tokens[:end] for tokens, _ in paths for end in range(1, len(tokens) + 1)}

    def check_order_of_loss(self, before: dict[str, set[Prefix]]) -> None:
        """Prefixes that an open session or a plain request may continue are evicted only when no
        closed ones are left.

        Compared in whole pages: the start of a page may be left in a sibling's page alone.
        """
        if not self.sessions:
            return
        for name, prefixes in before.items():
            lost = prefixes - self.cached_prefixes(name)
            wanted = {
                end[1][: len(end[1]) - len(end[1]) % self.page_size]
                for end, sessions in self.ends.items()
                if end[0] == name and any(h is None or h.is_open for h in sessions)
            }
            if any(end[: len(prefix)] == prefix for prefix in lost for end in wanted):
                assert self.cache.stats()["pages_closed"] == 0

    def shared_cells(self) -> set[tuple[int, int]]:
        spaces = self.cache.dump()["namespaces"]
        return {cell for name in spaces for _, cells in self.paths(name) for cell in cells}

    def check(self) -> None:
        self.cache.check()
        stats = self.cache.stats()
        parts = stats["pages_free"] + stats["pages_tree"] + stats["pages_private"]
        assert parts == stats["pages_total"]
        assert stats["sessions"] == sum(session.is_open for session in self.sessions)
        self.check_watches()

    def check_watches(self) -> None:
        """Every open watch knows what a fresh look-up would find, however the tree changed."""
        self.cache.changed_watches()
        for watch, tokens, namespace in self.watches:
            fresh = self.cache.watch(_array(tokens), namespace)
            assert watch.cached_len == fresh.cached_len
            size = self.page_size  # a head of a page may be found in several siblings
            assert watch.locked_len // size == fresh.locked_len // size
            if size == 1:
                assert watch.path()[-1:] == fresh.path()[-1:]
            fresh.close()
        while len(self.watches) > 6:
            self.watches.pop(0)[0].close()

    def drain(self) -> None:
        for seq in list(self.open):
            self.release(seq)
        self.check()
        for watch, _, _ in self.watches:
            watch.close()
        self.watches.clear()
        assert self.cache.stats()["watches"] == 0, "a closed watch is still concerned"
        self.cache.reset()
        assert self.cache.changed_watches() == []
        self.check()
        stats = self.cache.stats()
        assert stats["pages_free"] == stats["pages_total"]
        assert self.cache.evict(stats["pages_total"] * self.page_size) >= 0
        self.check()

    def add_sequence(self, seq: RadixSequence, namespace: str) -> None:
        self.spaces[id(seq)] = namespace
        self.open.append(seq)
        self.verify(seq)
        self.copy_page_prefixes(seq)
        self.verify(seq)


def _array(tokens: Prefix) -> Any:
    import numpy as np

    return np.asarray(tokens, np.int32)


def random_step(world: World, rng: random.Random, max_len: int) -> None:
    """One random thing that a user of the cache may do."""
    action = rng.choices(
        ["acquire", "extend", "commit", "fork", "truncate", "release", "evict", "reset", "session"],
        [8, 10, 10, 3, 3, 5, 2, 0.2, 2],
    )[0]
    seq = rng.choice(world.open) if world.open else None
    world.now += rng.choice([0.0, 0.5, 3.0])
    if action == "acquire" and len(world.open) < 12:
        use = {
            "session": rng.choice([None, *world.sessions[-6:]]),
            "priority": rng.choice([-1, 0, 0, 2]),
        }
        if world.watches and rng.random() < 0.3:
            watch, tokens, namespace = rng.choice(world.watches)
            world.acquire(tokens, namespace, old_watch=watch, **use)
        else:
            tokens, namespace = random_tokens(world, rng, max_len), rng.choice(["", "", "b"])
            world.acquire(tokens, namespace, allow_full=rng.random() < 0.2, **use)
    elif action == "session":
        random_session_step(world, rng)
    elif action == "evict":
        world.evict(rng.randrange(2 * world.page_size + 8))
    elif action == "reset":
        world.reset(rng.choice([None, "", "b"]))
    elif seq is None:
        return
    elif action == "extend":
        world.extend(seq, tuple(rng.randrange(2) for _ in range(rng.randrange(1, 6))))
    elif action == "commit":
        world.commit(seq, rng.randint(seq.committed_len, seq.length))
    elif action == "fork":
        world.fork(seq)
    elif action == "truncate":
        world.truncate(seq, rng.randint(0, seq.length))
    else:
        world.release(seq)


def random_session_step(world: World, rng: random.Random) -> None:
    """Open or close a session; most worlds have none."""
    if world.has_sessions and rng.random() < 0.5:
        world.open_session(rng.choice([0.0, 2.0, 20.0, 1e9]))
    elif world.sessions:
        rng.choice(world.sessions).close()


def random_tokens(world: World, rng: random.Random, max_len: int) -> Prefix:
    """Often a head of something open, so that prefixes are shared at every offset."""
    head: Prefix = ()
    if world.open and rng.random() < 0.7:
        seq = rng.choice(world.open)
        other = tuple(seq.tokens[: seq.length - seq.num_placeholders].tolist())
        head = other[: rng.randint(0, len(other))]
    return head + tuple(rng.randrange(2) for _ in range(rng.randrange(max_len)))
