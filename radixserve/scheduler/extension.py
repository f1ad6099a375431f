"""`SchedulerExtension`: the plug point for features that act between steps."""

from __future__ import annotations

from typing import Any

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence


class SchedulerExtension:
    """Plugged in by `Scheduler.plug_in`; the scheduler makes all calls, in the order of plugging
    in. Each method does nothing unless it is overridden."""

    is_due = False  # whether `begin_step` has something to do; it is not called otherwise

    def begin_step(self) -> None:
        """A step is about to be scheduled, and none is in flight. O(1), amortised."""

    def extend_prefix(self, sequence: CacheSequence, tokens: IntArray) -> int:
        """Returns how many tokens of a request were added to its new sequence without computing
        them. `tokens`: the prompt, and what follows it."""
        del sequence, tokens
        return 0

    def make_room(self) -> bool:
        """No request can continue: give up pages that the extension holds. False if it holds
        none."""
        return False

    def stats(self) -> dict[str, Any]:
        """Returns its figures of `Scheduler.stats`."""
        return {}

    def check(self) -> None:
        """AssertionError at the first broken invariant."""
