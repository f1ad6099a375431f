"""A trace through a cache, one request after another, without a scheduler.

Every request acquires, computes and commits its prompt, then its output, and is released before the
next one begins: what overlaps in reality is put in order of arrival. `scheduled` has the overlap.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from radixserve.cache import CacheSession, OutOfPages, PrefixCache
from radixserve.replay.caches import CacheSpec, TraceClock
from radixserve.replay.trace import Bools, Ints, Trace, TraceRequest


@dataclass(frozen=True, slots=True)
class DirectResult:
    """What a cache did for a trace, in tokens of prompts unless the name says otherwise."""

    spec: CacheSpec
    hits: Ints  # [requests] reused tokens
    is_served: Bools  # [requests] False: did not fit, all of its prompt counts as not reused
    prompt_tokens: int  # of all requests
    evicted_tokens: int
    seconds: float  # that the replay took

    @property
    def hit_tokens(self) -> int:
        return int(self.hits.sum())

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens

    @property
    def num_too_large(self) -> int:
        """Requests that were passed over."""
        return int((~self.is_served).sum())


def replay_direct(
    trace: Trace,
    spec: CacheSpec,
    *,
    lease_s: float | None = None,
    requests: Iterable[TraceRequest] | None = None,
) -> DirectResult:
    """`lease_s`: of the sessions' holders, in time of the trace; None: the cache's own default.

    `requests`: the trace's own, in order, when somebody wants to see them pass (a progress bar).
    A request that does not fit alone, with its output, is passed over. The cache is audited at the
    end. O(tokens of the trace) in copies and comparisons of memory.
    """
    start, clock = time.perf_counter(), TraceClock()
    cache = spec.make(clock)
    sessions = _Sessions(trace, cache, lease_s) if spec.use_holders else None
    hits = np.zeros(len(trace), np.int64)
    is_served = np.zeros(len(trace), np.bool_)
    for request in trace if requests is None else requests:
        clock.now = request.time
        holder = None if sessions is None else sessions.holder_of(request)
        found = _serve(cache, request, holder)
        if found is not None:
            hits[request.index], is_served[request.index] = found, True
        if sessions is not None:
            sessions.note_end(request)
    cache.check()
    return DirectResult(
        spec=spec,
        hits=hits,
        is_served=is_served,
        prompt_tokens=trace.prompt_tokens,
        evicted_tokens=cache.stats()["evicted_tokens"],
        seconds=time.perf_counter() - start,
    )


def _serve(cache: PrefixCache, request: TraceRequest, holder: CacheSession | None) -> int | None:
    """Tokens reused; None when the request does not fit."""
    prompt, kept = request.prompt, request.kept
    if len(kept) > cache.num_pages * cache.page_size:
        return None
    sequence = cache.acquire(prompt, request.namespace, session=holder)
    try:
        cached = sequence.cached_len
        sequence.extend(prompt[cached:])
        sequence.commit(len(prompt))
        if len(kept) > len(prompt):
            sequence.extend(kept[len(prompt) :])
            sequence.commit(len(kept))
    except OutOfPages:  # the copy of a page's head was one page too many
        return None
    finally:
        sequence.release()
    return cached


class _Sessions:
    """A holder for each session, from its first request to the end of its last one."""

    def __init__(self, trace: Trace, cache: PrefixCache, lease_s: float | None) -> None:
        self._cache = cache
        self._lease_s = lease_s
        self._last = trace.last_of_session()
        self._open: dict[str, CacheSession] = {}

    def holder_of(self, request: TraceRequest) -> CacheSession | None:
        name = request.session
        if name is None:
            return None
        if name not in self._open:
            self._open[name] = self._cache.open_session(name, lease_s=self._lease_s)
        return self._open[name]

    def note_end(self, request: TraceRequest) -> None:
        if request.session is not None and request.index in self._last:
            self._open.pop(request.session).close()
