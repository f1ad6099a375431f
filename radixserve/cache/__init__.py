"""The prefix caches, which need neither the engine nor torch.

`RadixCache` and `HashBlockCache` share the interface `PrefixCache`. The package needs numpy and
sortedcontainers.
"""

from radixserve.cache.events import EventBatch, EventCursor, EventLog, EventSnapshot
from radixserve.cache.hash.hash_cache import HashBlockCache
from radixserve.cache.hash.sequence import HashSequence
from radixserve.cache.interface import CacheSession, PrefixCache
from radixserve.cache.radix.radix_cache import RadixCache
from radixserve.cache.radix.sequence import RadixSequence
from radixserve.cache.sequence import MESSAGE, PROMPT, CacheSequence, ReturnEstimate
from radixserve.cache.snapshot import SnapshotView
from radixserve.cache.watch import PrefixWatch
from radixserve.errors import OutOfPages
from radixserve.output import Lookup
from radixserve.schedule import WindowLayers

__all__ = [
    "MESSAGE",
    "PROMPT",
    "CacheSequence",
    "CacheSession",
    "EventBatch",
    "EventCursor",
    "EventLog",
    "EventSnapshot",
    "HashBlockCache",
    "HashSequence",
    "Lookup",
    "OutOfPages",
    "PrefixCache",
    "PrefixWatch",
    "RadixCache",
    "RadixSequence",
    "ReturnEstimate",
    "SnapshotView",
    "WindowLayers",
]
