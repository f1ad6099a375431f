"""The prefix cache, usable alone: numpy and sortedcontainers, no torch."""

from radixserve.cache.hash_cache import HashBlockCache
from radixserve.cache.hash_sequence import HashSequence
from radixserve.cache.interface import CacheSequence, CacheSession, PrefixCache, PrefixWatch
from radixserve.cache.lookup import Lookup
from radixserve.cache.watch import RadixPrefixWatch
from radixserve.cache.radix_cache import RadixCache
from radixserve.cache.sequence import CachedSequence
from radixserve.errors import OutOfPages

__all__ = [
    "CacheSequence",
    "CacheSession",
    "CachedSequence",
    "HashBlockCache",
    "HashSequence",
    "Lookup",
    "OutOfPages",
    "PrefixCache",
    "PrefixWatch",
    "Probe",
    "RadixCache",
]
