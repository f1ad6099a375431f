"""`Engine`: builds each part once and runs the steps: schedule, launch, collect, update.

Synchronous, no I/O, one owner. It does not know text. With a runner of overlap depth 1 the host
schedules the next step while the device computes the present one:

    host     schedule 1, launch 1 | schedule 2, launch 2, update 1 | schedule 3, launch 3, update 2
    device                        | step 1                         | step 2

The token that a row of step 1 draws goes into step 2 on the device; the host sees it in update 1.
A step that cannot be planned before the answer to the one in flight waits for it.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from radixserve.arrays import IntArray
from radixserve.cache import HashBlockCache, Lookup, PrefixCache, RadixCache
from radixserve.config import EngineConfig
from radixserve.engine.beam_group import BeamGroup, StopCheck
from radixserve.errors import EngineDead
from radixserve.output import RequestOutput
from radixserve.request import Request
from radixserve.schedule import ModelRunnerOutput, SchedulerOutput
from radixserve.scheduler import Scheduler

_PARTS = ("schedule", "prepare", "forward", "sample", "commit", "overlapped")


class ModelRunner(Protocol):
    """The workers, as the engine sees them: a runner of `radixserve.runner`, or a fake in tests."""

    num_pages: int

    @property
    def overlap_depth(self) -> int:
        """Steps that may be in flight when the next one is launched: 0 or 1."""
        ...

    def launch(self, schedule: SchedulerOutput) -> Any:
        """Begin a step and return what `collect` needs; at depth 0 it may compute it at once.

        Where it raises, nothing of the step is computed.
        """
        ...

    def collect(self, pending: Any) -> ModelRunnerOutput:
        """Wait for the oldest launched step. Its seconds: prepare is what `launch` took."""
        ...

    def close(self) -> None:
        """Give back what it holds. Called once, after the last step."""
        ...


class Engine:
    """Requests in, tokens out, one step at a time."""

    def __init__(
        self, runner: ModelRunner, config: EngineConfig, cache: PrefixCache | None = None
    ) -> None:
        """`cache`: over the runner's pages, instead of the one that `config` names."""
        self._runner = runner
        self._overlap_depth = runner.overlap_depth if config.overlap else 0
        self._cache = make_cache(runner.num_pages, config) if cache is None else cache
        self.scheduler = Scheduler(
            self._cache,
            policy=config.schedule_policy,
            chunked_prefill_size=config.chunked_prefill_size,
            max_running_requests=config.max_running_requests,
            max_overtake=config.max_overtake,
        )
        self._searches: dict[str, BeamGroup] = {}  # beam searches by request id
        self._in_flight: list[tuple[SchedulerOutput, Any]] = []  # launched steps, the older first
        self._seconds = dict.fromkeys(_PARTS, 0.0)

    def add(self, request: Request, is_stopped: StopCheck | None = None) -> None:
        """Queue a checked request; it takes part from the next step on.

        `is_stopped` finds the stop strings of a beam search.
        """
        self.scheduler.add(request)
        if request.beams is not None:
            self._searches[request.request_id] = BeamGroup(request, is_stopped)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and free its resources; None if it has ended already."""
        return self.finish(request_id, "abort")

    def finish(
        self, request_id: str, reason: str, error: BaseException | None = None
    ) -> RequestOutput | None:
        """End a request for a reason from outside, such as a stop string in its text."""
        search = self._searches.pop(request_id, None)
        if search is None:
            return self.scheduler.finish(request_id, reason, error)
        answers = search.answers()
        lens = [len(answer.token_ids) for answer in answers]
        output = self.scheduler.finish(request_id, reason, error, lens)
        return None if output is None else output._replace(beams=answers)

    def fail_all(self, error: BaseException) -> list[RequestOutput]:
        """End everything with `error`; waits for the steps in flight."""
        outputs = self._without_searches(self.scheduler.fail_all(error))
        while self._in_flight:
            assert not self._collect(), "a request has not ended"
        return outputs

    def has_work(self) -> bool:
        """Requests are left, or a step is in flight."""
        return self.scheduler.has_work or bool(self._in_flight)

    def step(self) -> list[RequestOutput]:
        """Launch a step, and collect the oldest one beyond the overlap depth.

        When a step fails, its requests end with EngineDead and the others continue.
        """
        has_older = bool(self._in_flight)
        outputs = self._launch()
        if has_older or len(self._in_flight) > self._overlap_depth:
            outputs += self._collect()
            if self._overlap_depth and not self._in_flight:
                outputs += self._launch()
        return outputs

    def open_session(self, name: str, lease_s: float | None = None) -> None:
        """Open a session, see `Scheduler.open_session`."""
        self.scheduler.open_session(name, lease_s)

    def claim(self, name: str, tokens: IntArray, namespace: str = "") -> int:
        """Let a session claim the cached part of `tokens`; returns its length. Computes nothing."""
        return self.scheduler.claim(name, tokens, namespace)

    def close_session(self, name: str) -> None:
        """Close a session; an unknown name does nothing."""
        self.scheduler.close_session(name)

    def lookup(self, token_ids: IntArray, namespace: str = "") -> Lookup:
        """How much of a prompt is cached, and why not more. Changes nothing."""
        return self._cache.lookup(token_ids, namespace)

    def reset_cache(self, namespace: str | None = None) -> None:
        """Drop all cached prefixes; running requests continue."""
        self._cache.reset(namespace)

    def stats(self) -> dict[str, Any]:
        """The cache's and the scheduler's counters and gauges, and seconds spent by part.

        overlapped_s is the host's time in other parts while the device had a step to compute.
        """
        seconds = {f"{part}_s": spent for part, spent in self._seconds.items()}
        return {**self._cache.stats(), **self.scheduler.stats(), **seconds}

    def tree(self, max_nodes: int = 10_000) -> dict[str, object]:
        """A picture of the tree, see `RadixCache.dump`."""
        return self._cache.dump(max_nodes)

    def check(self) -> None:
        """Audit the cache; AssertionError names the first broken law."""
        self._cache.check()

    # -- one step -----------------------------------------------------------------------------

    def _launch(self) -> list[RequestOutput]:
        start = time.perf_counter()
        is_overlapped = bool(self._in_flight)
        schedule = self.scheduler.schedule()
        spent = time.perf_counter() - start
        self._seconds["schedule"] += spent
        if is_overlapped:
            self._seconds["overlapped"] += spent
        if schedule is None:
            return []
        try:
            pending = self._runner.launch(schedule)
        except Exception as error:
            return self._without_searches(self.scheduler.fail(schedule, _step_failed(error)))
        if is_overlapped:
            self._seconds["overlapped"] += time.perf_counter() - start - spent
        self._in_flight.append((schedule, pending))
        return []

    def _collect(self) -> list[RequestOutput]:
        schedule, pending = self._in_flight.pop(0)
        try:
            output = self._runner.collect(pending)
        except Exception as error:
            return self._without_searches(self.scheduler.fail(schedule, _step_failed(error)))
        for part, seconds in output.seconds.items():
            self._seconds[part] += seconds
        start = time.perf_counter()
        outputs = self._advance_searches(self.scheduler.update(schedule, output))
        spent = time.perf_counter() - start
        self._seconds["commit"] += spent
        if self._in_flight:
            self._seconds["overlapped"] += spent
        return outputs

    # -- beam searches ------------------------------------------------------------------------

    def _advance_searches(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """`outputs`, where those of beam searches that have drawn become their answers or go."""
        if not self._searches:
            return outputs
        found: list[RequestOutput] = []
        for output in outputs:
            last = self._advance_search(output) if output.draws else output
            if last is not None:
                found.append(last)
        return self._without_searches(found)

    def _advance_search(self, output: RequestOutput) -> RequestOutput | None:
        """Choose the next beams; the search's answers when it is over."""
        request_id = output.request_id
        search = self._searches[request_id]
        try:
            children = search.advance(output.draws)
        except Exception as cause:  # in the check for stop strings, which decodes text
            error = EngineDead(f"the next step of a beam search could not be chosen: {cause!r}")
            error.__cause__ = cause
            return self.finish(request_id, "error", error)
        if children:
            self.scheduler.continue_beams(request_id, children)
            return None
        answers = search.answers()
        if not answers:
            error = EngineDead("no token can be drawn: none is possible")
            return self.finish(request_id, "error", error)
        return self.finish(request_id, answers[0].reason)

    def _without_searches(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """`outputs`; forgets the searches that ended with them."""
        for output in outputs:
            if output.finish is not None:
                self._searches.pop(output.request_id, None)
        return outputs


def make_cache(num_pages: int, config: EngineConfig) -> PrefixCache:
    """The cache that the config names, over `num_pages` pages."""
    if config.cache == "hash":
        return HashBlockCache(num_pages, config.page_size)
    return RadixCache(num_pages, config.page_size, config.eviction, reuse=config.cache != "off")


def _step_failed(cause: BaseException) -> EngineDead:
    """The error that a request's caller sees when its step failed."""
    if isinstance(cause, EngineDead):  # the runner already raised the specific error
        return cause
    error = EngineDead(f"the step that computed this request failed: {cause!r}")
    error.__cause__ = cause
    return error
