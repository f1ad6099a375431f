"""`StatePool`: ids of recurrent states, and the copies between states that are still to be made.

A recurrent layer keeps one state a sequence instead of K/V a token. All such layers of a model
together have one state of fixed size, named by an id; the cache deals in ids alone.
"""

from __future__ import annotations

from array import array

StateCopy = tuple[int, int]  # source id, destination id


class StatePool:
    """State ids 0 .. num_states - 1; a state is free or allocated, never both."""

    __slots__ = ("_copies", "_free", "num_states")

    def __init__(self, num_states: int) -> None:
        self.num_states = num_states
        self._free = array("i", range(num_states - 1, -1, -1))
        self._copies: list[StateCopy] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """A free state; there must be one."""
        return self._free.pop()

    def free(self, state_id: int) -> None:
        self._free.append(state_id)

    def copy(self, source: int, destination: int) -> None:
        """To be made before the next step."""
        self._copies.append((source, destination))

    def take_copies(self) -> list[StateCopy]:
        """The copies to be made before the next step, one after the other in this order."""
        copies, self._copies = self._copies, []
        return copies

    def free_ids(self) -> list[int]:
        """A copy of the free list, for audits."""
        return list(self._free)
