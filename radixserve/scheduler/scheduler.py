"""`Scheduler`: selects the requests of each step and processes its results.

It owns the queues, every request's status and all sequences: `schedule` takes pages, `update`
publishes and unlocks them. A request is waiting (no sequence) or running (a locked path in the
tree); a running one is prefilling until only its last token is uncomputed, then decoding.

A step in flight has been dispatched and not updated: its K/V is written to the pages but not
committed. At most one further step may be scheduled after it (`_schedule_ahead`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from radixserve.cache import PrefixCache
from radixserve.errors import InvalidRequest, OutOfPages, request_failed
from radixserve.hint import HintLimits
from radixserve.output import Finish, RequestOutput
from radixserve.request import Request
from radixserve.schedule import ModelRunnerOutput, SampleOutput, ScheduledRequest, SchedulerOutput
from radixserve.scheduler import audit, request_snapshots
from radixserve.scheduler.admission import Admission
from radixserve.scheduler.batch_builder import BatchBuilder
from radixserve.scheduler.beam_searches import BeamSearches, Child
from radixserve.scheduler.commit_rows import commit_rows
from radixserve.scheduler.hints import Hints
from radixserve.scheduler.in_batch_sharing import wake_waiters
from radixserve.scheduler.in_flight_step import InFlightStep, plan_ahead
from radixserve.scheduler.page_budget import PageBudget
from radixserve.scheduler.request_state import BeamSearch, RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.sessions import Sessions
from radixserve.scheduler.stats import RecentTokens, SchedulerStats
from radixserve.scheduler.waiting_queue import WaitingQueue


class Scheduler:
    """One step is `schedule()`, the runner's work, `update()`; `add` and `abort` come between."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        policy: str = "lpm",
        chunked_prefill_size: int = 512,
        max_running_requests: int = 64,
        max_overtake: int = 64,
        hint_limits: HintLimits | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cache = cache
        self._chunked_prefill_size = chunked_prefill_size
        self._clock = clock
        self._requests: dict[str, RequestState] = {}
        self.snapshot_requests = request_snapshots.RequestSnapshots(self._requests, clock).take
        self._waiting = WaitingQueue(cache, policy, max_overtake)
        self._running = RunningRequests(max_running_requests)
        self.page_tables = self._running.page_tables
        self._page_budget = PageBudget(cache, self._running, self._waiting, max_running_requests)
        self._sessions = sessions = Sessions(cache)
        self.open_session, self.close_session = sessions.open, sessions.close
        self.claim = sessions.claim
        self._hints = Hints(cache, sessions, hint_limits or HintLimits())
        self.hint, self.forget_hints = self._hints.apply, self._hints.forget
        self.held_by_hints = self._hints.held
        parts = cache, self._waiting, self._running, self._page_budget, self._hints.shared
        self._admission = Admission(*parts, max_running_requests, clock)
        queues = self._requests, self._running, self._waiting
        self._beams = BeamSearches(*queues, self._requeue, self._page_budget.num_startable)
        self._in_flight: list[InFlightStep] = []  # at most two, the older one first
        self._num_arrived = 0
        self.counts = SchedulerStats()
        self._recent = RecentTokens(self.counts, clock())

    # -- requests and sessions ----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request, and open the session that it names, with the cache's own lease, unless
        it is open. InvalidRequest if the id is in use or the request could never fit."""
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        capacity = self._cache.num_pages * self._cache.page_size
        if not 0 < len(request.token_ids) < request.max_len <= capacity:
            raise InvalidRequest(
                f"a prompt of {len(request.token_ids)} tokens needs max_len between "
                f"{len(request.token_ids) + 1} and the cache's {capacity} tokens, "
                f"got {request.max_len}"
            )
        session = self._sessions.get(request.session) if request.session else None
        wanted = request.token_ids[: request.score_start + 1]  # see `RequestState.match_tokens`
        prefix_watch = self._cache.watch(wanted, request.params.namespace)
        state = RequestState(request, self._num_arrived, prefix_watch, self._clock(), session)
        self._num_arrived += 1 if request.beams is None else request.beams.width
        self._requests[request.request_id] = state
        if request.beams is not None:
            self._beams.begin(state)
        self._waiting.add(state, is_returning=False)

    def finish(
        self,
        request_id: str,
        reason: str,
        error: BaseException | None = None,
        answer_lens: Sequence[int] = (),
    ) -> RequestOutput | None:
        """End a request from outside, for instance at a stop string; None if it has ended.

        All that it holds is freed. `answer_lens`: tokens of each answer of a beam search.
        """
        state = self._requests.get(request_id)
        if state is None:
            return None
        if state.search is not None:
            return self._end_search(state.search, reason, error, answer_lens)
        return self._end(state, reason, error)

    def fail(self, schedule: SchedulerOutput, error: BaseException) -> list[RequestOutput]:
        """The step failed: end its requests with `error`. Committed tokens stay cached.

        In a step scheduled after it, rows of other requests continue.
        """
        step = next(one for one in self._in_flight if one.schedule is schedule)
        self._in_flight.remove(step)
        return [self._end(state, "error", error) for state in step.active_rows()]

    def fail_all(self, error: BaseException) -> list[RequestOutput]:
        """End everything with `error`."""
        ids, living = list(self._requests), self._requests
        return [self._end(living[one], "error", error) for one in ids if one in living]

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def stats(self) -> dict[str, Any]:
        """See `SchedulerStats.report`."""
        num_open, num_running = len(self._requests), len(self._running)
        depths = {"waiting": num_open - num_running, "waiting_tokens": self._waiting.num_tokens}
        report = self.counts.report(self._recent.gains(self._clock()))
        return {**depths, "running": num_running, **report, **self._hints.stats()}

    def check(self) -> None:
        """Audit the queues; AssertionError names the first broken invariant. O(requests)."""
        audit.check(self._requests, self._waiting, self._running, self._beams.parked)
        self._hints.check(self._cache.stats()["sessions"])

    # -- a step -------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step's work, or None when there is nothing to do.

        While a step is in flight: what can be scheduled after it, or None when `update` or `fail`
        must come first.
        """
        if self._in_flight:
            return self._schedule_ahead()
        self._hints.expire()
        batch = self._new_batch()
        if self._beams.parked and self._admission.has_slots(batch):
            self._beams.unpark_out_of_turn()
            batch = self._new_batch() if batch.is_empty else batch
            self._admission.admit(batch)
        while batch.is_empty and self._beams.parked:  # they hold pages that the others need
            self._preempt_parked(max(self._beams.parked.values(), key=lambda s: s.priority_key))
            batch = self._new_batch()
        while batch.is_empty and self._requests and self._give_up_hints():
            batch = self._new_batch()
        if batch.is_empty:
            assert not self._requests, "requests are left but none can continue"
            return None
        return self._dispatch(batch)

    def _schedule_ahead(self) -> SchedulerOutput | None:
        assert len(self._in_flight) == 1, "two steps are in flight"
        batch = BatchBuilder(self.counts.steps, self._chunked_prefill_size)
        if not plan_ahead(self._in_flight[0], batch, self._running, self._cache):
            return None
        self._admission.admit(batch)
        if batch.is_empty:
            return None
        self.counts.steps_ahead += 1
        return self._dispatch(batch)

    def _dispatch(self, batch: BatchBuilder) -> SchedulerOutput:
        if self._cache.num_states:
            batch.add_states(self._cache)
        schedule = batch.build(self._cache)
        self.counts.steps += 1
        self._in_flight.append(InFlightStep(schedule, batch))
        return schedule

    def _new_batch(self) -> BatchBuilder:
        batch = BatchBuilder(self.counts.steps, self._chunked_prefill_size)
        self._plan_running(batch)
        self._admission.admit(batch)
        return batch

    def update(self, schedule: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestOutput]:
        """The step was computed: publish its tokens, append sampled tokens, end finished requests.

        Steps are updated in the order in which they were dispatched.
        """
        assert schedule is self._in_flight[0].schedule
        self._recent.note(self._clock())
        step = self._in_flight.pop(0)
        rows = commit_rows(step, output.outputs, self._cache, self._waiting, self.counts)
        outputs: list[RequestOutput] = []
        for state, one in rows.failed:
            if state.sequence is not None:  # else another row has ended its search
                error = request_failed(str(one.error), one.cause)
                outputs.append(self._end(state, "error", error))
        for state, row, one in rows.scored:
            outputs += self._note_scores(state, row, one)
        searches: dict[int, BeamSearch] = {}
        for state, one in zip(rows.states, rows.samples, strict=True):
            if (search := state.search) is not None:
                searches[search.leader.arrival] = search
                samples = self._beams.note_sample(state, one)
                if samples:
                    leader_id = search.leader.request_id
                    outputs.append(RequestOutput(leader_id, (), (), (), None, (), samples))
            elif state.sequence is not None:  # else another row has ended its search
                outputs.append(self._append(state, one))
                self.counts.generated_tokens += 1
        for search in searches.values():
            assert not self._in_flight, "beams are chosen while a step is in flight"
            if search.leader.times.first_token is None:
                search.leader.times.first_token = self._clock()
            self._beams.park_sampled(search)
        return outputs

    def continue_beams(self, request_id: str, children: Sequence[Child]) -> None:
        """The next beams of a search, best first, whose samples the last `update` returned."""
        search = self._requests[request_id].search
        assert search is not None
        self._beams.replace(search, children)

    def _requeue(self, state: RequestState) -> None:
        state.prefix_watch = self._cache.watch(state.match_tokens(), state.request.params.namespace)
        self._waiting.add(state, is_returning=True)

    def _note_scores(
        self, state: RequestState, row: ScheduledRequest, sampled: SampleOutput
    ) -> list[RequestOutput]:
        assert state.scores is not None
        state.scores.note(sampled, keep=state.request.also_generate)
        if state.request.also_generate:  # reported when the request finishes
            return []
        finish = self._close(state, "stop") if row.end == state.num_prompt else None
        return [RequestOutput(state.request_id, (), sampled.scores, (), finish)]

    def _append(self, state: RequestState, sampled: SampleOutput) -> RequestOutput:
        if sampled.forced_ids:
            sampled, reason = state.append_forced(sampled)
            self.counts.generated_tokens += len(sampled.forced_ids)
        else:
            reason = state.append(sampled.token_id, is_complete=sampled.is_complete)
        if state.times.first_token is None:
            state.times.first_token = self._clock()
        return state.output(sampled, None if reason is None else self._close(state, reason))

    # -- running requests ---------------------------------------------------------------------

    def _plan_running(self, batch: BatchBuilder) -> None:
        """Decodes first, then prefill chunks, each by priority and arrival.

        A request without pages preempts unplanned ones of lower priority, else skips the step. The
        highest in priority can preempt all others, so at least one request always continues.
        """
        decodes: list[RequestState] = []
        prefills: list[RequestState] = []
        for state in self._running.by_priority():
            (decodes if state.is_decoding else prefills).append(state)
        for at, state in enumerate((*decodes, *prefills)):
            if state.sequence is None:  # preempted for one before it
                continue
            is_prefill = at >= len(decodes)
            wanted = 1
            if is_prefill:
                wanted = min(batch.token_budget, len(state.tokens) - state.committed)
            if wanted:
                count = self._allocate(state, wanted, batch)
                if count:
                    batch.add(state, count, is_decode=not is_prefill)

    def _allocate(self, state: RequestState, wanted: int, batch: BatchBuilder) -> int:
        """Allocate up to `wanted` tokens, preempting if none fits; returns how many."""
        sequence = state.sequence
        assert sequence is not None
        start = sequence.length
        while True:
            count = 1 if wanted == 1 else max(1, self._page_budget.num_fitting(state, wanted))
            try:
                sequence.extend(state.tokens.view(start, start + count))
                return count
            except OutOfPages:
                batch.is_out_of_pages = True
                parked = self._beams.victim(state) if self._beams.parked else None
                if parked is not None:
                    self._preempt_parked(parked)
                    continue
                victim = self._running.lowest_below(state, batch.has)
                if victim is None:
                    return 0
                self._preempt(victim)

    def _give_up_hints(self) -> bool:
        """Nothing can go on: end prefetches, else unlock a pin. False where there is neither."""
        prefetches = [one for one in self._requests.values() if one.request.is_prefetch]
        for state in prefetches:
            self._end(state, "abort")
        return bool(prefetches) or self._hints.break_pin()

    def _preempt(self, state: RequestState) -> None:
        """Requeue a running request; its computed K/V stays cached until evicted."""
        assert state.sequence is not None
        assert not self._in_flight, "a row in flight would be lost"
        state.sequence.release()
        state.sequence = None
        self._running.remove(state)
        self.counts.preemptions += 1
        self._waiting.note_woken(wake_waiters(state))
        self._requeue(state)

    def _preempt_parked(self, state: RequestState) -> None:
        self._beams.unpark(state)
        self.counts.preemptions += 1

    # -- the end ------------------------------------------------------------------------------

    def _end(
        self, state: RequestState, reason: str, error: BaseException | None = None
    ) -> RequestOutput:
        if state.search is not None:
            return self._end_search(state.search, reason, error, ())
        return state.output(None, self._close(state, reason, error))

    def _end_search(
        self, search: BeamSearch, reason: str, error: BaseException | None, lens: Sequence[int]
    ) -> RequestOutput:
        """The usage is that of the first answer; the others count the prompt as cached."""
        leader, stats = search.leader, self.counts
        for state in search.beams:
            if state is not leader:
                self._remove(state)
            state.search = None
        finish = self._close(leader, reason, error)
        usage = finish.usage.with_answer(lens[0] if lens else 0)
        for num_tokens in lens[1:]:
            stats.count_prompt(usage.of_other_answer(num_tokens), leader.cached_on_arrival)
        stats.generated_tokens += sum(lens)
        return RequestOutput(leader.request_id, (), (), (), replace(finish, usage=usage))

    def _close(
        self, state: RequestState, reason: str, error: BaseException | None = None
    ) -> Finish:
        """Take a request out of every queue, free its private pages, and add up its numbers."""
        self._remove(state)
        usage = state.usage()
        is_prefetch, on_arrival = state.request.is_prefetch, state.cached_on_arrival
        self.counts.count_finished(reason, usage, on_arrival, is_prefetch=is_prefetch)
        scores = () if state.scores is None else tuple(state.scores.of_prompt)
        metrics = state.times.metrics(self._clock())
        return Finish(reason, usage, metrics, state.lookup, error, scores)

    def _remove(self, state: RequestState) -> None:
        """Take a request out of every queue and free its private pages."""
        if state.sequence is None:
            if state.producer is not None:
                state.producer.waiters.remove(state)
            if state in self._waiting:  # else: a beam that has sampled
                self._waiting.remove(state)
        elif state in self._running:
            state.sequence.release()
            state.sequence = None
            self._running.remove(state)
            self._waiting.note_woken(wake_waiters(state))
        else:
            self._beams.unpark(state)
        del self._requests[state.request_id]
