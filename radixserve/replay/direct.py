"""`replay_direct`: a trace through a cache, one request after another, without a scheduler.

Each request acquires, computes and commits its prompt, then its output, and is released before the
next one begins. Requests that overlapped in time are served in order of arrival; `scheduled.py`
models the overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from radixserve.cache import CacheSession, OutOfPages, PrefixCache
from radixserve.replay.caches import CacheSpec, ReplayResult, TraceClock
from radixserve.replay.trace import Trace, TraceRequest
from radixserve.schedule import ScheduledRows

CHUNK_TOKENS = 512  # computed at a time in a cache with windows, which drops those before a window


def replay_direct(
    trace: Trace,
    spec: CacheSpec,
    *,
    lease_s: float | None = None,
    on_request: Callable[[], object] = lambda: None,
) -> ReplayResult:
    """Replay a trace. A request that alone, with its output, exceeds the cache is skipped.

    lease_s     of the cache's sessions, in seconds of the trace; None: the cache's default
    on_request  is called after each request

    The cache is audited at the end. O(tokens of the trace) in copies and comparisons of memory.
    """
    start, clock = time.perf_counter(), TraceClock()
    cache = spec.make(clock)
    hits = np.zeros(len(trace), np.int64)
    is_served = np.zeros(len(trace), np.bool_)
    sessions: dict[str, CacheSession] = {}
    num_left = trace.session_sizes()
    for request in trace:
        clock.now, name = request.time, request.session
        session = None
        if spec.use_sessions and name is not None:
            if name not in sessions:
                sessions[name] = cache.open_session(name, lease_s=lease_s)
            session = sessions[name]
        cached = serve(cache, request, session)
        if cached is not None:
            hits[request.index], is_served[request.index] = cached, True
        if name is not None:
            num_left[name] -= 1
            if session is not None and not num_left[name]:
                sessions.pop(name).close()
        on_request()
    cache.check()
    return ReplayResult(
        spec=spec,
        hits=hits,
        is_served=is_served,
        prompt_tokens=trace.prompt_tokens,
        evicted_tokens=cache.stats()["evicted_tokens"],
        seconds=time.perf_counter() - start,
    )


def serve(cache: PrefixCache, request: TraceRequest, session: CacheSession | None) -> int | None:
    """Serve a request. Returns the number of reused tokens; None if the request does not fit."""
    prompt, kept, layers = request.prompt, request.kept, cache.layers
    if len(kept) > cache.num_pages * cache.page_size:
        return None
    sequence = cache.acquire(prompt, request.namespace, session=session)
    try:
        cached = sequence.cached_len
        chunk = CHUNK_TOKENS if layers is not None and layers.pages_at_once else len(kept)
        for tokens in (prompt, kept):
            while (start := sequence.length) < len(tokens):
                sequence.extend(tokens[start : start + chunk])
                if layers is not None:
                    rows = ScheduledRows()
                    rows.starts.append(start)
                    layers.plan_step([sequence], rows)
                sequence.commit(sequence.length)
    except OutOfPages:  # copying the beginning of a page needed one page more
        return None
    finally:
        sequence.release()
    return cached
