"""`StoreHealth`: leaves a store alone that was late or broken several times."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from radixserve.store.limits import StoreLimits

_log = logging.getLogger("radixserve")


class StoreHealth:
    """Counts failures in a row. After `max_failures` of them the store is left alone for a pause;
    then it is tried again, and one more failure doubles the pause. Any thread may call."""

    def __init__(
        self, what: str, limits: StoreLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`what`: what the store is asked for, in the log: "reading"."""
        self.num_pauses = 0
        self._what, self._limits, self._clock = what, limits, clock
        self._num_failures = 0  # since the last success
        self._until = 0.0  # by the clock: not asked before
        self._pause_s = 0.0  # the last pause, 0 since the last success

    @property
    def may_try(self) -> bool:
        """Whether the store may be asked now."""
        return self._until <= self._clock()

    def note_success(self) -> None:
        """It has answered: what failed before is forgotten."""
        if self._pause_s:
            _log.warning("kv_store: %s works again", self._what)
        self._num_failures, self._pause_s = 0, 0.0

    def note_failure(self, reason: object) -> None:
        """It was late or broken. What had begun before a pause and fails in it does not count."""
        self._num_failures += 1
        limits = self._limits
        if self._num_failures < limits.max_failures or not self.may_try:
            return
        if not self._pause_s:
            _log.warning(
                "kv_store: %s has failed %d times in a row and is left alone for %g s, then "
                "tried again with growing pauses: %s",
                *(self._what, self._num_failures, limits.first_pause_s, reason),
            )
        self.num_pauses += 1
        self._pause_s = min(max(limits.first_pause_s, 2 * self._pause_s), limits.last_pause_s)
        self._until = self._clock() + self._pause_s
