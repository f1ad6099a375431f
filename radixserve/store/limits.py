"""`StoreLimits`: how long and how much an engine with a K/V store waits, keeps and tries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreLimits:
    """Of times in seconds, each has a reason in docs/store.md."""

    min_tokens: int = 16  # fewer are neither written nor loaded
    # deadlines
    lookup_s: float = 1.0  # of the search for a prompt's stored prefix
    read_s: float = 2.0  # of a load, beside four times its expected time
    write_s: float = 10.0  # of one run
    bulk_s: float = 120.0  # of a call of `save_cache` or `load_cache`
    check_s: float = 60.0  # of an audit, which waits for writes
    close_s: float = 30.0  # of the writes of an engine that is closed
    # a store that is late or broken
    max_failures: int = 3  # in a row, before it is left alone
    first_pause_s: float = 5.0  # then doubled each time
    last_pause_s: float = 300.0
    # loads
    read_ahead: int = 2  # runs that are read while another is put into pages
    step_s: float = 0.005  # time per step for filling pages
    # writes
    backlog_bytes: int = 256 << 20  # most K/V that waits to be written; the rest is not stored
    idle_s: float = 0.05  # without requests, until K/V is copied that is written when idle
    pacing_s: float = 0.2  # most that the writer waits for each run of such K/V, while requests run
    unsaved_s: float = 5.0  # K/V is copied after so long even while the engine is busy


LIMITS = StoreLimits()
