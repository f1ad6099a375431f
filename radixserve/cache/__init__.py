"""The prefix cache, usable alone: numpy and sortedcontainers, no torch."""

from radixserve.cache.hash_cache import HashBlockCache
from radixserve.cache.hash_sequence import HashSequence
from radixserve.cache.interface import CacheProbe, CacheSequence, Holder, PrefixCache
from radixserve.cache.lookup import Lookup
from radixserve.cache.probe import Probe
from radixserve.cache.radix_cache import RadixCache
from radixserve.cache.sequence import CachedSequence
from radixserve.errors import OutOfPages

__all__ = [
    "CacheProbe",
    "CacheSequence",
    "CachedSequence",
    "HashBlockCache",
    "HashSequence",
    "Holder",
    "Lookup",
    "OutOfPages",
    "PrefixCache",
    "Probe",
    "RadixCache",
]
