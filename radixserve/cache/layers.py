"""`CacheLayers`: layers beside a cache's K/V pages, as the scheduler sees them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from radixserve.cache.sequence import CacheSequence


class CacheLayers(ABC):
    """Layers of a model whose memory is not in K/V pages, or not in them alone."""

    pages_at_once = 0  # pages of their own that one request uses at a time, at most
    # Whether a sequence has work of its own in each `extend` and `commit`, so that the cache must
    # not append to several sequences in one loop.
    needs_each_call = False

    def note_turns(self, sequence: CacheSequence, turn_starts: Sequence[int]) -> None:  # noqa: B027
        """Note the positions at which a conversation may be continued or edited later."""

    @abstractmethod
    def plan_step(self, sequences: Sequence[CacheSequence], rows: Any) -> dict[str, Any]:
        """Plan what the runner has to do for these layers in a step. Fills their column of `rows`,
        the step's `ScheduledRows`; returns their fields of `SchedulerOutput`. Called once a step,
        after all its sequences were extended."""
