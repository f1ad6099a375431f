"""`CacheStats`: what a cache has counted, in tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStats:
    """Tokens since the cache was made."""

    acquired_tokens: int = 0  # asked for by acquire
    matched_tokens: int = 0  # of those, found
    copied_tokens: int = 0  # of those, in page heads that had to be copied
    committed_tokens: int = 0  # whose K/V was published
    duplicate_tokens: int = 0  # of those, published by another first; whole pages only
    num_acquired: int = 0  # sequences
    num_resets: int = 0
