"""`GarbageFreezer`: keeps a large cache out of Python's full garbage collections.

A full collection visits every container object of the process: 0.5 s with a million nodes. Nodes
are freed by reference counting, so the collector never frees any. They are frozen as the cache
grows: a collection first frees existing garbage, then `gc.freeze` exempts the remaining objects
from later collections.
"""

from __future__ import annotations

import gc

EVERY = 4096  # nodes made between two freezes; a collection visits about two objects for each
LEAST_NODES = 16_384  # a smaller cache is not worth it: nothing is frozen


class GarbageFreezer:
    """Freezes the objects of the process (`gc.freeze`) while one cache grows.

    An object that is alive at a freeze and later becomes part of a garbage cycle is collected only
    after `thaw`.
    """

    __slots__ = ("_has_frozen", "due")

    def __init__(self) -> None:
        self.due = LEAST_NODES  # nodes made since the start of the cache; then `note` is called
        self._has_frozen = False

    def note(self, num_created: int, num_nodes: int) -> None:
        """Freeze if the cache has enough nodes; to be called when `due` is reached. Costs a garbage
        collection of the objects made since the last call, a few ms."""
        self.due = num_created + EVERY
        if num_nodes >= LEAST_NODES:
            gc.collect()
            gc.freeze()
            self._has_frozen = True

    def thaw(self) -> None:
        """Return all frozen objects to the garbage collector; the cache is no longer used."""
        if self._has_frozen:
            gc.unfreeze()
            self._has_frozen = False
