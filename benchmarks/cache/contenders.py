"""The contenders: caches that every case runs on, behind one small interface.

A `Tree` is one cache with its own form of a prompt. Cases call nothing else, so that a line of the
table says the same thing in every column:

    lookup    how much of a prompt is cached (ours also says why not more)
    lock      lock that prefix, unlock
    take      the same, and name its pages
    request   all that an engine asks for one request: match, lock, room for the rest (by eviction
              when there is none), publish, unlock
    evict     free the room of some tokens
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from radixserve.arrays import IntArray
from radixserve.cache import HashBlockCache, RadixCache


class Tree(Protocol):
    def prompt(self, tokens: IntArray) -> Any:
        """`tokens` as the engine around this cache holds them; never timed."""

    def lookup(self, prompt: Any) -> int: ...

    def lock(self, prompt: Any) -> None: ...

    def take(self, prompt: Any) -> object: ...

    def request(self, prompt: Any) -> None: ...

    def evict(self, num_tokens: int) -> int: ...

    def num_nodes(self) -> int: ...

    def hidden_bytes(self) -> int:
        """Bytes that this tree keeps where tracemalloc does not see them."""


@dataclass(frozen=True)
class Contender:
    """One column of the table."""

    name: str
    make: Callable[[int], Tree]  # with room for that many pages
    page_size: int = 1
    max_leaves: int = 10**9  # the largest tree of small leaves that it builds in reasonable time
    is_native: bool = False  # keeps its nodes in memory that only malloc knows

    def tree(self, *lengths: int) -> Tree:
        """An empty cache with just enough room for branches of those many tokens."""
        return self.make(sum(-(-length // self.page_size) for length in lengths) + 64)


class PagedTree:
    """`RadixCache` or `HashBlockCache`; their prompts are int32 arrays."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def prompt(self, tokens: IntArray) -> IntArray:
        return tokens

    def lookup(self, prompt: IntArray) -> int:
        return int(self.cache.lookup(prompt).cached_len)

    def lock(self, prompt: IntArray) -> None:
        self.cache.acquire(prompt).release()

    def take(self, prompt: IntArray) -> int:
        with self.cache.acquire(prompt) as sequence:
            return len(sequence.pages)

    def request(self, prompt: IntArray) -> None:
        sequence = self.cache.acquire(prompt)
        sequence.extend(prompt[sequence.cached_len :])
        sequence.commit(len(prompt))
        sequence.release()

    def evict(self, num_tokens: int) -> int:
        return int(self.cache.evict(num_tokens))

    def num_nodes(self) -> int:
        return int(self.cache.stats().get("nodes", 0))

    def hidden_bytes(self) -> int:
        return 0


def radix(page_size: int, name: str = "radix") -> Contender:
    return Contender(name, lambda pages: PagedTree(RadixCache(pages, page_size)), page_size)


def hash_blocks(size: int) -> Contender:
    max_leaves = 100_000 if size <= 16 else 0  # a small leaf is a block, or it is not kept
    make = partial(HashBlockCache, block_size=size)
    return Contender(f"hash-{size}", lambda pages: PagedTree(make(pages)), size, max_leaves)


def peers() -> tuple[list[Contender], list[str]]:
    """The other caches that can be imported here, and a line for each that cannot."""
    contenders = [hash_blocks(16), hash_blocks(256)]
    if importlib.util.find_spec("sglang") is None:
        return contenders, ["sglang: skipped, not installed"]
    try:
        engine = importlib.import_module("cache.sglang").SGLang()
        for build in (engine.rust_tree, engine.core_tree, engine.python_tree):
            build(1)  # raises now what it would raise in the middle of a run
    except Exception as error:
        why = f"{type(error).__name__}: {error}".split("\n")[0]
        return contenders, [f"sglang: skipped, import failed: {why}"]
    contenders += [
        Contender("sglang-rust", engine.rust_tree, max_leaves=100_000, is_native=True),
        Contender("sglang-core", engine.core_tree, max_leaves=100_000, is_native=True),
        Contender("sglang-python", engine.python_tree, max_leaves=10_000),
    ]
    return contenders, []
