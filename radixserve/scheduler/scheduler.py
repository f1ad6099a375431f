"""`Scheduler`: selects the requests of each step and processes its results.

It owns the queues and every request's status. It alone calls the cache: `schedule` takes pages,
`update` publishes and unlocks them. A request is waiting (no sequence) or running (a locked path in
the tree); a running one is prefilling until only its last token is uncomputed, then decoding.

A step in flight has been dispatched and not updated: its K/V is written to the pages but not
committed. At most one further step may be scheduled after it (`_schedule_ahead`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from radixserve.arrays import IntArray
from radixserve.cache import PrefixCache
from radixserve.errors import EngineDead, InvalidRequest, OutOfPages
from radixserve.output import Finish, PromptScore, RequestOutput
from radixserve.request import Request
from radixserve.schedule import ModelRunnerOutput, SampleOutput, ScheduledRequest, SchedulerOutput
from radixserve.scheduler.batch_builder import BatchBuilder
from radixserve.scheduler.beam_searches import BeamSearches, Child
from radixserve.scheduler.in_batch_sharing import InBatchSharing, wake_waiters
from radixserve.scheduler.in_flight_step import InFlightStep, plan_ahead
from radixserve.scheduler.page_budget import PageBudget
from radixserve.scheduler.request_state import BeamSearch, RequestState
from radixserve.scheduler.running_requests import RunningRequests
from radixserve.scheduler.sessions import Sessions
from radixserve.scheduler.stats import SchedulerStats
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cache = cache
        self._chunked_prefill_size = chunked_prefill_size
        self._max_running_requests = max_running_requests
        self._clock = clock
        self._requests: dict[str, RequestState] = {}
        self._waiting = WaitingQueue(cache, policy, max_overtake)
        self._running = RunningRequests(max_running_requests)
        self._page_budget = PageBudget(cache, self._running, self._waiting, max_running_requests)
        queues = self._requests, self._running, self._waiting
        self._beams = BeamSearches(*queues, self._requeue, self._page_budget.num_startable)
        self._sessions = Sessions(cache)
        self._in_flight: list[InFlightStep] = []  # at most two, the older one first
        self._num_arrived = 0
        self._stats = SchedulerStats()

    # -- requests and sessions ----------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. InvalidRequest if its id is in use or it could never fit.

        A session that it names and that is not open is opened, with the cache's own lease.
        """
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
        wanted = request.token_ids[: request.score_start + 1]  # see `RequestState.wanted`
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
        return [self._end(state, "error", error) for state in step.living_rows()]

    def fail_all(self, error: BaseException) -> list[RequestOutput]:
        """End everything with `error`."""
        states = list(self._requests.values())
        return [
            self._end(j, "error", error) for j in states if j.request.request_id in self._requests
        ]

    def open_session(self, name: str, lease_s: float | None = None) -> None:
        """Open a session, or do nothing where one of that name is open; see the cache's own.

        It is remembered until `close_session`: close what you name.
        """
        self._sessions.open(name, lease_s)

    def claim(self, name: str, tokens: IntArray, namespace: str = "") -> int:
        """Let a session, opened if need be, claim what is cached of `tokens`; returns how many."""
        return self._sessions.claim(name, tokens, namespace)

    def close_session(self, name: str) -> None:
        """Close a session: pages that only closed sessions reach are evicted first. Idempotent.

        Running requests continue. A queued request loses the session, even if the name is
        reopened.
        """
        self._sessions.close(name)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def stats(self) -> dict[str, int]:
        """SchedulerStats since the start and the queue depths now."""
        counters = {name: getattr(self._stats, name) for name in self._stats.__slots__}
        num_waiting = len(self._requests) - len(self._running)
        return {"waiting": num_waiting, "running": len(self._running), **counters}

    # -- a step -------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step's work, or None when there is nothing to do.

        While a step is in flight: what can be scheduled after it, or None when `update` or `fail`
        must come first.
        """
        if self._in_flight:
            return self._schedule_ahead()
        plan = self._plan()
        while plan.is_empty and self._beams.parked:  # they hold pages that the others need
            self._preempt_parked(max(self._beams.parked.values(), key=lambda state: state.rank))
            plan = self._plan()
        if plan.is_empty:
            assert not self._requests, "requests are left but none can continue"
            return None
        return self._hand_out(plan)

    def _schedule_ahead(self) -> SchedulerOutput | None:
        assert len(self._in_flight) == 1, "two steps are in flight"
        step = self._in_flight[0]
        plan = BatchBuilder(self._stats.steps, self._chunked_prefill_size)
        if not plan_ahead(step, plan, self._running, self._cache):
            return None
        self._admit(plan)
        if plan.is_empty:
            return None
        self._stats.steps_ahead += 1
        return self._hand_out(plan)

    def _hand_out(self, plan: BatchBuilder) -> SchedulerOutput:
        schedule = plan.build()
        self._stats.steps += 1
        self._in_flight.append(InFlightStep(schedule, plan))
        return schedule

    def _plan(self) -> BatchBuilder:
        plan = BatchBuilder(self._stats.steps, self._chunked_prefill_size)
        self._plan_running(plan)
        self._admit(plan)
        return plan

    def _is_short(self, spare: int) -> bool:
        """Whether no queued request fits into `spare` pages. O(preempted requests)."""
        waiting = self._waiting
        return bool(self._running) and waiting.least_need > spare and waiting.barrier == math.inf

    def update(self, schedule: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestOutput]:
        """The step was computed: publish its tokens, append drawn tokens, end finished requests.

        Steps are updated in the order in which they were dispatched.
        """
        assert schedule is self._in_flight[0].schedule
        step = self._in_flight.pop(0)
        drawing, outputs = self._commit_rows(step, output.outputs)
        searches: dict[int, BeamSearch] = {}
        for state, drawn in drawing:
            search = state.search
            if search is not None:
                searches[search.leader.arrival] = search
                draws = self._beams.note_draw(state, drawn)
                if draws:
                    outputs.append(
                        RequestOutput(search.leader.request_id, (), (), (), None, (), draws)
                    )
            elif state.sequence is not None:  # else another row has ended its search
                outputs.append(self._append(state, drawn))
        for search in searches.values():
            assert not self._in_flight, "beams are chosen while a step is in flight"
            if search.leader.first_token_at is None:
                search.leader.first_token_at = self._clock()
            self._beams.park_drawn(search)
        return outputs

    def continue_beams(self, request_id: str, children: Sequence[Child]) -> None:
        """The next beams of a search, best first, whose draws the last `update` returned."""
        search = self._requests[request_id].search
        assert search is not None
        self._beams.replace(search, children)

    def _commit_rows(
        self, step: InFlightStep, drawn: tuple[SampleOutput | None, ...]
    ) -> tuple[list[tuple[RequestState, SampleOutput]], list[RequestOutput]]:
        """Publish what the rows computed. Returns the requests that drew, and outputs of others."""
        drawing: list[tuple[RequestState, SampleOutput]] = []
        outputs: list[RequestOutput] = []
        rows = zip(step.rows, step.schedule.rows, drawn, strict=True)
        for (state, sequence), row, one in rows:
            if state.sequence is not sequence:  # it has ended
                self._stats.discarded_tokens += len(row.token_ids)
                continue
            if one is not None and one.error is not None:
                outputs.append(self._end(state, "error", EngineDead(one.error)))
                continue
            sequence.commit(row.end)
            if state.waiters:
                self._waiting.note_woken(wake_waiters(state))
            self._count_row(state, row)
            if one is None:
                continue
            if row.logprob_targets is not None:
                outputs += self._note_scores(state, row, one)
                if row.sample is None:
                    continue
            drawing.append((state, one))
        return drawing, outputs

    def _requeue(self, state: RequestState) -> None:
        state.prefix_watch = self._cache.watch(state.wanted(), state.request.params.namespace)
        self._waiting.add(state, is_returning=True)

    def _count_row(self, state: RequestState, row: ScheduledRequest) -> None:
        counters, num_tokens = self._stats, len(row.token_ids)
        if num_tokens == 1 and row.start >= state.num_prompt:  # after the prompt
            counters.decoded_tokens += 1
            return
        counters.prefilled_tokens += num_tokens
        again = min(row.end, state.num_prompt_done) - row.start
        counters.recomputed_tokens += max(0, again)
        state.note_committed(row.end)

    def _note_scores(
        self, state: RequestState, row: ScheduledRequest, drawn: SampleOutput
    ) -> list[RequestOutput]:
        state.num_scored += len(drawn.scores)
        if state.request.also_generate:  # reported when the request finishes
            tops = drawn.top_scores or ((),) * len(drawn.scores)
            state.prompt_scores += map(PromptScore, drawn.scores, tops)
            return []
        finish = self._close(state, "stop") if row.end == state.num_prompt else None
        return [RequestOutput(state.request_id, (), drawn.scores, (), finish)]

    def _append(self, state: RequestState, drawn: SampleOutput) -> RequestOutput:
        state.tokens.append(drawn.token_id)
        self._stats.generated_tokens += 1
        if state.first_token_at is None:
            state.first_token_at = self._clock()
        reason = self._end_reason(state, drawn.token_id)
        if self._in_flight and reason is None and state.sequence is not None and state.is_drawing:
            # Its row in flight computes it already.
            state.sequence.fill(state.tokens.view(len(state.tokens) - 1))
        return self._output(state, drawn, None if reason is None else self._close(state, reason))

    def _end_reason(self, state: RequestState, token_id: int) -> str | None:
        request, length = state.request, len(state.tokens)
        num_output = length - state.num_prompt
        if token_id in request.end_ids and num_output > request.params.min_tokens:
            return "stop"
        if num_output >= request.params.max_tokens or length >= request.max_len:
            return "length"
        return None

    # -- running requests ---------------------------------------------------------------------

    def _plan_running(self, plan: BatchBuilder) -> None:
        """Decodes first, then prefill chunks, each in order of rank.

        A request without pages preempts unplanned ones of lower rank, else skips the step. The
        highest in rank can preempt all others, so at least one request always continues.
        """
        states = [(not state.is_decoding, state.rank, state) for state in self._running]
        states.sort()  # ranks differ: requests are never compared
        for is_prefill, _, state in states:
            if state.sequence is None:  # preempted for one before it
                continue
            wanted = min(plan.budget, len(state.tokens) - state.committed) if is_prefill else 1
            if wanted:
                count = self._grow(state, wanted, plan)
                if count:
                    plan.add(state, count, is_decode=not is_prefill)

    def _grow(self, state: RequestState, wanted: int, plan: BatchBuilder) -> int:
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
                plan.is_out_of_pages = True
                parked = self._beams.victim(state) if self._beams.parked else None
                if parked is not None:
                    self._preempt_parked(parked)
                    continue
                victim = self._victim(state, plan)
                if victim is None:
                    return 0
                self._preempt(victim)

    def _victim(self, state: RequestState, plan: BatchBuilder) -> RequestState | None:
        """The lowest in rank below `state` that is not part of this step."""
        others = [j for j in self._running if j.rank > state.rank and not plan.has(j)]
        return max(others, key=lambda j: j.rank, default=None)

    def _preempt(self, state: RequestState) -> None:
        """Requeue a running request; its computed K/V stays cached until evicted."""
        assert state.sequence is not None
        assert not self._in_flight, "a row in flight would be lost"
        state.sequence.release()
        state.sequence = None
        self._running.remove(state)
        self._stats.preemptions += 1
        self._waiting.note_woken(wake_waiters(state))
        self._requeue(state)

    def _preempt_parked(self, state: RequestState) -> None:
        self._beams.unpark(state)
        self._stats.preemptions += 1

    # -- waiting requests ---------------------------------------------------------------------

    def _admit(self, plan: BatchBuilder) -> None:
        """Start waiting requests in order, looking past those that cannot start now."""
        waiting, room = self._waiting, self._page_budget
        if plan.is_out_of_pages or not waiting or not self._has_slots(plan):
            return
        waiting.refresh()
        outstanding = room.num_outstanding()
        spare = self._cache.num_available - outstanding
        if self._is_short(spare):
            return  # no need to scan the queue
        sharing = InBatchSharing(self._running if self._cache.sharing_enabled else ())
        for state in waiting.candidates():
            if self._cache.sharing_enabled and sharing.must_wait(state):
                waiting.note_waits(state)
                continue
            if room.fits(state, spare) and self._start(state, plan):
                sharing.add(state)
                if not self._has_slots(plan):
                    return
                outstanding += room.pages_ahead(state)
                spare = self._cache.num_available - outstanding
            if self._running and waiting.least_need > spare:
                return  # no later candidate fits either

    def _has_slots(self, plan: BatchBuilder) -> bool:
        num_running = len(self._running) - plan.num_ending
        return plan.budget > 0 and num_running < self._max_running_requests

    def _start(self, state: RequestState, plan: BatchBuilder) -> bool:
        """Lock its cached prefix, plan its first chunk; False and no change if pages are short."""
        namespace, prefix = state.request.params.namespace, state.wanted()
        lookup = self._cache.lookup(prefix, namespace)
        session = state.session if state.session is not None and state.session.is_open else None
        sequence = self._cache.acquire(
            prefix, namespace, session=session, priority=state.request.params.priority
        )
        wanted = min(plan.budget, len(state.tokens) - sequence.cached_len)
        state.sequence = sequence
        count = max(1, self._page_budget.num_fitting(state, wanted))
        try:
            sequence.extend(state.tokens.view(sequence.length, sequence.length + count))
        except OutOfPages:
            sequence.release()
            state.sequence = None
            return False
        self._waiting.remove(state)
        self._waiting.note_admitted(state)
        self._running.add(state)
        state.admit(sequence, lookup, self._clock())
        if state.search is not None:
            leader = state.search.leader
            leader.num_reused = min(leader.num_reused, state.num_reused)
        plan.add(state, count, is_decode=False)
        return True

    # -- the end ------------------------------------------------------------------------------

    def _end(
        self, state: RequestState, reason: str, error: BaseException | None = None
    ) -> RequestOutput:
        if state.search is not None:
            return self._end_search(state.search, reason, error, ())
        return self._output(state, None, self._close(state, reason, error))

    def _end_search(
        self,
        search: BeamSearch,
        reason: str,
        error: BaseException | None,
        answer_lens: Sequence[int],
    ) -> RequestOutput:
        """The usage is that of the first answer; the others count the prompt as cached."""
        leader, stats = search.leader, self._stats
        for state in search.beams:
            if state is not leader:
                self._remove(state)
            state.search = None
        finish = self._close(leader, reason, error)
        usage = replace(finish.usage, completion_tokens=answer_lens[0] if answer_lens else 0)
        for _ in answer_lens[1:]:
            stats.prompted_tokens += usage.prompt_tokens
            stats.reused_tokens += usage.prompt_tokens
            gained = usage.prompt_tokens - leader.cached_on_arrival
            stats.gained_while_waiting_tokens += max(0, gained)
        stats.generated_tokens += sum(answer_lens)
        return RequestOutput(leader.request_id, (), (), (), replace(finish, usage=usage))

    def _close(
        self, state: RequestState, reason: str, error: BaseException | None = None
    ) -> Finish:
        """Take a request out of every queue, free its private pages, and add up its numbers."""
        self._remove(state)
        counters, usage = self._stats, state.usage()
        counters.finished += reason in ("stop", "length")
        counters.aborted += reason == "abort"
        counters.failed += reason == "error"
        counters.prompted_tokens += usage.prompt_tokens
        counters.reused_tokens += usage.cached_tokens
        counters.computed_tokens += usage.computed_tokens
        gained = usage.cached_tokens - state.cached_on_arrival
        counters.gained_while_waiting_tokens += max(0, gained)
        scores = tuple(state.prompt_scores) if state.prompt_scores else ()
        return Finish(reason, usage, state.metrics(self._clock()), state.lookup, error, scores)

    def _remove(self, state: RequestState) -> None:
        """Take a request out of every queue and free its private pages."""
        if state.sequence is None:
            if state.waits_for is not None:
                state.waits_for.waiters.remove(state)
            if state in self._waiting:  # else: a beam that has drawn
                self._waiting.remove(state)
        elif state in self._running:
            state.sequence.release()
            state.sequence = None
            self._running.remove(state)
            self._waiting.note_woken(wake_waiters(state))
        else:
            self._beams.unpark(state)
        del self._requests[state.request_id]

    def _output(
        self, state: RequestState, drawn: SampleOutput | None, finish: Finish | None
    ) -> RequestOutput:
        request_id = state.request_id
        if drawn is None:
            return RequestOutput(request_id, (), (), (), finish)
        if drawn.logprob is None:
            return RequestOutput(request_id, (drawn.token_id,), (), (), finish)
        top = dict(drawn.top_logprobs)
        return RequestOutput(request_id, (drawn.token_id,), (drawn.logprob,), (top,), finish)
