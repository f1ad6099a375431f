"""`Engine`: builds each part once and turns the crank: schedule, execute, update.

Synchronous, no I/O, one owner. It does not know text. With a runner that can overlap a `Pipeline`
turns the crank.
"""

from __future__ import annotations

import time
from typing import Any

from radixserve.arrays import IntArray
from radixserve.cache import HashBlockCache, Lookup, PrefixCache, RadixCache
from radixserve.config import EngineConfig
from radixserve.engine.pipeline import Pipeline, Runner, is_overlapping, step_failed
from radixserve.output import RequestOutput
from radixserve.request import Request
from radixserve.scheduler import Scheduler

_PARTS = ("schedule", "prepare", "forward", "sample", "commit", "hidden")


class Engine:
    """Requests in, tokens out, one step at a time."""

    def __init__(self, runner: Runner, config: EngineConfig) -> None:
        self._runner = runner
        self._cache = make_cache(runner.num_pages, config)
        self._scheduler = Scheduler(
            self._cache,
            policy=config.schedule_policy,
            chunked_prefill_size=config.chunked_prefill_size,
            max_running_requests=config.max_running_requests,
            max_overtake=config.max_overtake,
        )
        self._seconds = dict.fromkeys(_PARTS, 0.0)
        self._pipeline: Pipeline | None = None
        if config.overlap and is_overlapping(runner):
            self._pipeline = Pipeline(self._scheduler, runner, self._seconds)

    def add(self, request: Request) -> None:
        """Queue a checked request; it takes part from the next step on."""
        self._scheduler.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and free what it holds; None if it has ended already."""
        return self._scheduler.abort(request_id)

    def finish(self, request_id: str, reason: str) -> RequestOutput | None:
        """End a request for a reason that only its text shows."""
        return self._scheduler.finish(request_id, reason)

    def fail_all(self, error: BaseException) -> list[RequestOutput]:
        """End everything with `error`; a step in flight is waited for."""
        outputs = self._scheduler.fail_all(error)
        if self._pipeline is not None:
            self._pipeline.drain()
        return outputs

    def has_work(self) -> bool:
        """Requests are left, or a step is in flight."""
        is_idle = self._pipeline is None or self._pipeline.is_idle
        return self._scheduler.has_work or not is_idle

    def step(self) -> list[RequestOutput]:
        """Run one step: schedule, execute, update.

        When it fails, its requests end with EngineDead and the others go on.
        """
        if self._pipeline is not None:
            return self._pipeline.step()
        start = time.perf_counter()
        schedule = self._scheduler.schedule()
        self._seconds["schedule"] += time.perf_counter() - start
        if schedule is None:
            return []
        try:
            output = self._runner.execute(schedule)
        except Exception as error:
            return self._scheduler.fail(schedule, step_failed(error))
        for part, seconds in output.seconds.items():
            self._seconds[part] += seconds
        start = time.perf_counter()
        news = self._scheduler.update(schedule, output)
        self._seconds["commit"] += time.perf_counter() - start
        return news

    def open_session(self, name: str, lease_s: float | None = None) -> None:
        """Somebody who will come back until it is closed; see `Scheduler.open_session`."""
        self._scheduler.open_session(name, lease_s)

    def claim(self, name: str, tokens: IntArray, namespace: str = "") -> int:
        """Let a session claim the cached part of `tokens`; returns its length. Computes nothing."""
        return self._scheduler.claim(name, tokens, namespace)

    def close_session(self, name: str) -> None:
        """It will not come back; an unknown name is fine."""
        self._scheduler.close_session(name)

    def lookup(self, token_ids: IntArray, namespace: str = "") -> Lookup:
        """How much of a prompt is cached, and why not more. Changes nothing."""
        return self._cache.lookup(token_ids, namespace)

    def reset_cache(self, namespace: str | None = None) -> None:
        """Forget what is cached; running requests go on undisturbed."""
        self._cache.reset(namespace)

    def stats(self) -> dict[str, Any]:
        """The cache's and the scheduler's counters and gauges, and seconds spent by part.

        hidden_s is what the host did of the other parts while the device had a step to compute.
        """
        seconds = {f"{part}_s": spent for part, spent in self._seconds.items()}
        return {**self._cache.stats(), **self._scheduler.stats(), **seconds}

    def tree(self, max_nodes: int = 10_000) -> dict[str, object]:
        """A picture of the tree, see `RadixCache.dump`."""
        return self._cache.dump(max_nodes)

    def check(self) -> None:
        """Audit the cache; AssertionError names the first broken law."""
        self._cache.check()


def make_cache(num_pages: int, config: EngineConfig) -> PrefixCache:
    """The cache that the config names, over `num_pages` pages."""
    if config.cache == "hash":
        return HashBlockCache(num_pages, config.page_size)
    return RadixCache(num_pages, config.page_size, config.eviction, reuse=config.cache != "off")
