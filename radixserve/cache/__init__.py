"""The prefix cache, usable alone: numpy and sortedcontainers, no torch."""

from radixserve.cache.lookup import Lookup
from radixserve.cache.probe import Probe
from radixserve.cache.radix_cache import RadixCache
from radixserve.cache.sequence import CachedSequence
from radixserve.errors import OutOfPages

__all__ = ["CachedSequence", "Lookup", "OutOfPages", "Probe", "RadixCache"]
