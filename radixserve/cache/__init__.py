"""The prefix caches, which need neither the engine nor torch.

`RadixCache` and `HashBlockCache` share the interface `PrefixCache`. The package needs numpy and
sortedcontainers. `HashBlockCache` is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from radixserve.cache.events import EventBatch, EventCursor, EventLog, EventSnapshot
from radixserve.cache.interface import CacheSession, PrefixCache
from radixserve.cache.lookup import Lookup
from radixserve.cache.namespace import Namespace
from radixserve.cache.radix.radix_cache import RadixCache
from radixserve.cache.radix.sequence import RadixSequence
from radixserve.cache.sequence import CacheSequence, ReturnEstimate
from radixserve.cache.snapshot import SnapshotView
from radixserve.cache.watch import PrefixWatch
from radixserve.errors import OutOfPages

if TYPE_CHECKING:
    from radixserve.cache.hash.hash_cache import HashBlockCache
    from radixserve.cache.hash.sequence import HashSequence

__all__ = [
    "CacheSequence",
    "CacheSession",
    "EventBatch",
    "EventCursor",
    "EventLog",
    "EventSnapshot",
    "HashBlockCache",
    "HashSequence",
    "Lookup",
    "Namespace",
    "OutOfPages",
    "PrefixCache",
    "PrefixWatch",
    "RadixCache",
    "RadixSequence",
    "ReturnEstimate",
    "SnapshotView",
]

_LAZY = {"HashBlockCache": "hash.hash_cache", "HashSequence": "hash.sequence"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'radixserve.cache' has no attribute {name!r}")
    return getattr(import_module(f"radixserve.cache.{_LAZY[name]}"), name)
