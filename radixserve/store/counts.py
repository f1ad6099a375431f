"""`StoreCounts`: what an engine's K/V store has done, counted and logged."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, fields

_log = logging.getLogger("radixserve")


@dataclass
class StoreCounts:
    """Counters since the start, in tokens unless the name says otherwise."""

    loaded_tokens: int = 0
    written_tokens: int = 0
    unwritten_tokens: int = 0  # the disk was too slow or refused
    skipped_tokens: int = 0  # evicted before the engine was idle, and not worth writing before
    returned_tokens: int = 0  # computed again after they had been evicted
    failed_reads: int = 0  # files that were damaged, gone or late
    failed_writes: int = 0  # files

    def __post_init__(self) -> None:
        self._logged_at = -math.inf

    def warn(self, message: str, every_s: float = 60.0) -> None:
        """Log a warning, at most one in `every_s`; the counters have the number of all."""
        now = time.monotonic()
        if now - self._logged_at >= every_s:
            self._logged_at = now
            _log.warning("kv_store: %s", message)

    def as_dict(self) -> dict[str, int]:
        return {one.name: getattr(self, one.name) for one in fields(self)}
