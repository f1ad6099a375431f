"""The implementations of a prefix cache, for the tests of what all of them promise."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from radixserve.cache import CacheSequence, HashBlockCache, PrefixCache, RadixCache


@dataclass(frozen=True)
class Kind:
    """One implementation at one page size."""

    name: str
    page_size: int
    grain: int
    make: Callable[..., Any]  # number of pages, options of both -> PrefixCache

    def for_tokens(self, num_tokens: int, **options: Any) -> PrefixCache:
        cache: PrefixCache = self.make(-(-num_tokens // self.page_size), **options)
        return cache

    def cached_len(self, length: int) -> int:
        """What is found of a cached prefix of that length."""
        return length - length % self.grain


def radix(size: int) -> Kind:
    def make(pages: int, **options: Any) -> RadixCache:
        return RadixCache(pages, size, **options)

    return Kind(f"radix-{size}", size, 1, make)


def hashed(size: int, hash_algorithm: str) -> Kind:
    def make(pages: int, **options: Any) -> HashBlockCache:
        return HashBlockCache(pages, size, hash_algorithm=hash_algorithm, **options)

    return Kind(f"{hash_algorithm}-{size}", size, size, make)


SIZES = (1, 2, 16)
HASHES = ["sha256", *(["xxh3"] if importlib.util.find_spec("xxhash") else [])]
KINDS = [radix(p) for p in SIZES] + [hashed(p, name) for name in HASHES for p in SIZES]


def put(cache: PrefixCache, tokens: list[int], namespace: str = "") -> CacheSequence:
    """A sequence with all of `tokens` committed, still held."""
    seq = cache.acquire(tokens, namespace)
    seq.extend(tokens[seq.cached_len :])
    seq.commit(len(tokens))
    cache.check()
    return seq
