"""`Scheduler`: who runs in the next step, and what becomes of it.

It owns the queues and every request's status. It alone calls the cache: `schedule` takes pages,
`update` publishes and lets go. A request is waiting (no sequence) or running (a locked path in
the tree); a running one is prefilling until only its last token is uncomputed, then decoding.

A step in flight was handed out and not yet answered: what its rows compute is in the pages of their
sequences, and not committed. The next one may be planned behind it (`inflight`); one more may not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from radixserve.arrays import IntArray
from radixserve.cache import PrefixCache
from radixserve.errors import EngineDead, InvalidRequest, OutOfPages
from radixserve.output import Finish, PromptScore, RequestOutput
from radixserve.request import Request
from radixserve.schedule import ModelRunnerOutput, SampleOutput, ScheduledRequest, SchedulerOutput
from radixserve.scheduler.beams import Beams
from radixserve.scheduler.counters import SchedulerStats
from radixserve.scheduler.inflight import InFlightStep, plan_behind
from radixserve.scheduler.job import RequestState
from radixserve.scheduler.leaders import Leaders, free_followers
from radixserve.scheduler.plan import BatchBuilder
from radixserve.scheduler.room import PageBudget
from radixserve.scheduler.sessions import Sessions
from radixserve.scheduler.twins import Twins
from radixserve.scheduler.waiting import WaitingQueue


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
        self._jobs: dict[str, RequestState] = {}
        self._waiting = WaitingQueue(cache, policy, max_overtake)
        self._running: dict[int, RequestState] = {}  # by arrival
        self._room = PageBudget(cache, self._running, self._waiting, max_running_requests)
        queues = self._jobs, self._running, self._waiting
        self._beams = Beams(*queues, self._requeue, self._room.num_startable)
        self._twins = Twins(*queues, self._requeue, self._room.num_startable, clock)
        self._sessions = Sessions(cache)
        self._flights: list[InFlightStep] = []  # at most two, the older one first
        self._num_arrived = 0
        self._counters = SchedulerStats()

    # -- what comes from outside --------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. InvalidRequest if its id is in use or it could never fit.

        A session that it names and that is not open is opened, with the cache's own lease. One that
        is the twin of a request which has drawn nothing yet costs its prompt no computing.
        """
        if request.request_id in self._jobs:
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        capacity = self._cache.num_pages * self._cache.page_size
        if not 0 < len(request.token_ids) < request.max_len <= capacity:
            raise InvalidRequest(
                f"a prompt of {len(request.token_ids)} tokens needs max_len between "
                f"{len(request.token_ids) + 1} and the cache's {capacity} tokens, "
                f"got {request.max_len}"
            )
        session = self._sessions.get(request.session) if request.session else None
        first = self._twins.first_of(request)
        if first is not None:
            probe = first.probe
        else:  # a cache leaves the last token to be computed: see `RequestState.wanted`
            wanted = request.token_ids[: request.score_start + 1]
            probe = self._cache.watch(wanted, request.params.namespace)
        job = RequestState(request, self._num_arrived, probe, self._clock(), session)
        self._num_arrived += 1 if request.beams is None else request.beams.width
        self._jobs[request.request_id] = job
        if first is not None:
            self._twins.join(job, first)
            return
        if request.beams is not None:
            self._beams.begin(job)
        self._waiting.add(job, is_returning=False)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free all it holds; None if it has ended already."""
        return self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: str) -> RequestOutput | None:
        """End a request from outside, for instance at a stop string; None if it has ended."""
        job = self._jobs.get(request_id)
        return None if job is None else self._end(job, reason)

    def fail(self, schedule: SchedulerOutput, error: BaseException) -> list[RequestOutput]:
        """The step failed: end its requests with `error`. What they had committed stays cached.

        Of a step behind it, rows of other requests go on.
        """
        flight = next(one for one in self._flights if one.schedule is schedule)
        self._flights.remove(flight)
        twins = [self._end(job, "error", error) for job in flight.living_twins()]
        return [*twins, *(self._end(job, "error", error) for job in flight.living_rows())]

    def fail_all(self, error: BaseException) -> list[RequestOutput]:
        """End everything with `error`."""
        jobs = list(self._jobs.values())
        return [self._end(j, "error", error) for j in jobs if j.request.request_id in self._jobs]

    def open_session(self, name: str, lease_s: float | None = None) -> None:
        """Open a session, or do nothing where one of that name is open; see the cache's own.

        It is remembered until `close_session`: close what you name.
        """
        self._sessions.open(name, lease_s)

    def claim(self, name: str, tokens: IntArray, namespace: str = "") -> int:
        """Let a session, opened if need be, claim what is cached of `tokens`; returns how many."""
        return self._sessions.claim(name, tokens, namespace)

    def close_session(self, name: str) -> None:
        """What only closed sessions reach is dropped first from now on; an unknown name is fine.

        Its requests go on. One that was not started yet belongs to nobody then, even if the name
        is opened again.
        """
        self._sessions.close(name)

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def stats(self) -> dict[str, int]:
        """SchedulerStats since the start and the queue depths now."""
        counters = {name: getattr(self._counters, name) for name in self._counters.__slots__}
        num_waiting = len(self._jobs) - len(self._running)  # twins beside a running one as well
        return {"waiting": num_waiting, "running": len(self._running), **counters}

    # -- a step -------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step's work, or None when there is nothing to do.

        While a step is in flight: what can be planned behind it, or None when `update` or `fail`
        must come first.
        """
        if self._flights:
            return self._schedule_behind()
        plan = self._plan()
        while plan.is_empty and self._beams.parked:  # they hold the room that the others need
            self._preempt_parked(max(self._beams.parked.values(), key=lambda job: job.rank))
            plan = self._plan()
        if plan.is_empty:
            assert not self._jobs, "requests are left but none can go on"
            return None
        return self._hand_out(plan)

    def _schedule_behind(self) -> SchedulerOutput | None:
        assert len(self._flights) == 1, "two steps are in flight"
        flight = self._flights[0]
        plan = BatchBuilder(self._counters.steps, self._chunked_prefill_size)
        if not plan_behind(flight, plan, self._running.values(), self._cache):
            return None
        self._admit(plan)
        if plan.is_empty:
            return None
        self._counters.steps_ahead += 1
        return self._hand_out(plan)

    def _hand_out(self, plan: BatchBuilder) -> SchedulerOutput:
        schedule = plan.build()
        self._counters.steps += 1
        self._flights.append(InFlightStep(schedule, plan))
        return schedule

    def _plan(self) -> BatchBuilder:
        plan = BatchBuilder(self._counters.steps, self._chunked_prefill_size)
        self._plan_running(plan)
        self._admit(plan)
        return plan

    def _is_short(self, spare: int) -> bool:
        """Whether `spare` pages are too few for anybody who waits. O(1) and the returned ones."""
        waiting = self._waiting
        return bool(self._running) and waiting.least_need > spare and waiting.barrier == math.inf

    def update(self, schedule: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestOutput]:
        """The step was computed: publish its tokens, append what was drawn, end what ended.

        Steps are answered in the order in which they were handed out.
        """
        assert schedule is self._flights[0].schedule
        flight = self._flights.pop(0)
        num_rows = len(schedule.rows)
        twins = set(flight.living_twins()) if schedule.twins else set()
        drawing, news = self._commit_rows(flight, output.outputs[:num_rows])
        if schedule.twins:
            assert not self._flights, "twins begin while a step is in flight"
            self._twins.start([job for job, _ in drawing])
        searching: dict[int, RequestState] = {}
        for job, drawn in drawing:
            if job.head is not None:
                job.drawn = drawn
                searching[job.head.arrival] = job.head
            elif job.sequence is not None:  # else another row has ended its search
                news.append(self._append(job, drawn))
        for (job, _), one in zip(flight.twins, output.outputs[num_rows:], strict=True):
            if job in twins and one is not None:
                news.append(self._update_twin(job, one))
        for head in searching.values():
            news += self._advance_search(head)
        return news

    def _commit_rows(
        self, flight: InFlightStep, outputs: tuple[SampleOutput | None, ...]
    ) -> tuple[list[tuple[RequestState, SampleOutput]], list[RequestOutput]]:
        """Publish what the rows computed; the jobs that have drawn, and news of the others."""
        drawing: list[tuple[RequestState, SampleOutput]] = []
        news: list[RequestOutput] = []
        rows = zip(flight.rows, flight.schedule.rows, outputs, strict=True)
        for (job, sequence), row, drawn in rows:
            if job.sequence is not sequence:  # it has ended
                self._counters.discarded_tokens += len(row.token_ids)
                continue
            if drawn is not None and drawn.error is not None:
                self._twins.free(job)  # each gets its own answer below
                news.append(self._end(job, "error", EngineDead(drawn.error)))
                continue
            sequence.commit(row.end)
            if job.followers:
                self._waiting.note_freed(free_followers(job))
            self._count_row(job, row)
            if drawn is None:
                continue
            if row.logprob_targets is not None:
                news += self._note_scores(job, row, drawn)
                if row.sample is None:
                    continue
            drawing.append((job, drawn))
        return drawing, news

    def _advance_search(self, head: RequestState) -> list[RequestOutput]:
        """Beams of it have drawn; its answers when that was its last step."""
        assert not self._flights, "beams are chosen while a step is in flight"
        if head.request.request_id not in self._jobs:  # one of its rows was broken
            return []
        if head.first_token_at is None:
            head.first_token_at = self._clock()
        try:
            children = self._beams.choose(head)
        except Exception as cause:  # its check for stop strings is somebody else's
            error = EngineDead(f"the next step of a beam search could not be chosen: {cause!r}")
            error.__cause__ = cause
            return [self._end(head, "error", error)]
        if children is None:
            return []
        if not children:
            return [self._end(head, "stop")]
        self._beams.replace(head, children)
        return []

    def _update_twin(self, job: RequestState, drawn: SampleOutput) -> RequestOutput:
        if drawn.error is not None:
            return self._end(job, "error", EngineDead(drawn.error))
        news = self._append(job, drawn)
        if news.finish is None and job.sequence is None:
            self._requeue(job)
        return news

    def _requeue(self, job: RequestState) -> None:
        job.probe = self._cache.watch(job.wanted(), job.request.params.namespace)
        self._waiting.add(job, is_returning=True)

    def _count_row(self, job: RequestState, row: ScheduledRequest) -> None:
        counters, num_tokens = self._counters, len(row.token_ids)
        if num_tokens == 1 and row.start >= job.num_prompt:  # behind the prompt
            counters.decoded_tokens += 1
            return
        counters.prefilled_tokens += num_tokens
        again = min(row.end, job.num_prompt_done) - row.start
        counters.recomputed_tokens += max(0, again)
        job.note_committed(row.end)

    def _note_scores(
        self, job: RequestState, row: ScheduledRequest, drawn: SampleOutput
    ) -> list[RequestOutput]:
        job.num_scored += len(drawn.scores)
        if job.request.also_generate:  # told at the end
            tops = drawn.top_scores or ((),) * len(drawn.scores)
            job.prompt_scores += map(PromptScore, drawn.scores, tops)
            return []
        finish = self._close(job, "stop") if row.end == job.num_prompt else None
        return [RequestOutput(job.request.request_id, (), drawn.scores, (), finish)]

    def _append(self, job: RequestState, drawn: SampleOutput) -> RequestOutput:
        job.tokens.append(drawn.token_id)
        self._counters.generated_tokens += 1
        if job.first_token_at is None:
            job.first_token_at = self._clock()
        reason = self._end_reason(job, drawn.token_id)
        if self._flights and reason is None and job.sequence is not None and job.is_drawing:
            # Its row in flight computes it already.
            job.sequence.fill(job.tokens.view(len(job.tokens) - 1))
        return self._output(job, drawn, None if reason is None else self._close(job, reason))

    def _end_reason(self, job: RequestState, token_id: int) -> str | None:
        request, length = job.request, len(job.tokens)
        num_output = length - job.num_prompt
        if token_id in request.end_ids and num_output > request.params.min_tokens:
            return "stop"
        if num_output >= request.params.max_tokens or length >= request.max_len:
            return "length"
        return None

    # -- running requests ---------------------------------------------------------------------

    def _plan_running(self, plan: BatchBuilder) -> None:
        """Decodes first, then prefill chunks, each in order of rank.

        A request without room takes it from unplanned ones of lower rank, else sits the step out.
        The highest in rank can take from all others, so some request always goes on.
        """
        jobs = [(not job.is_decoding, job.rank, job) for job in self._running.values()]
        jobs.sort()  # ranks differ: jobs are never compared
        for is_prefill, _, job in jobs:
            if job.sequence is None:  # preempted for one before it
                continue
            wanted = min(plan.budget, len(job.tokens) - job.committed) if is_prefill else 1
            if wanted:
                count = self._grow(job, wanted, plan)
                if count:
                    plan.add(job, count, is_decode=not is_prefill)

    def _grow(self, job: RequestState, wanted: int, plan: BatchBuilder) -> int:
        """Take room for up to `wanted` tokens, preempting if there is none; returns how many."""
        sequence = job.sequence
        assert sequence is not None
        start = sequence.length
        while True:
            count = 1 if wanted == 1 else max(1, self._room.num_fitting(job, wanted))
            try:
                sequence.extend(job.tokens.view(start, start + count))
                return count
            except OutOfPages:
                plan.is_short = True
                parked = self._beams.victim(job) if self._beams.parked else None
                if parked is not None:
                    self._preempt_parked(parked)
                    continue
                victim = self._victim(job, plan)
                if victim is None:
                    return 0
                self._preempt(victim)

    def _victim(self, job: RequestState, plan: BatchBuilder) -> RequestState | None:
        """The lowest in rank below `job` that is not part of this step."""
        others = [j for j in self._running.values() if j.rank > job.rank and not plan.has(j)]
        return max(others, key=lambda j: j.rank, default=None)

    def _preempt(self, job: RequestState) -> None:
        """Back to waiting; what was computed stays in the tree for as long as there is room."""
        assert job.sequence is not None
        assert not self._flights, "a row in flight would be lost"
        job.sequence.release()
        job.sequence = None
        del self._running[job.arrival]
        self._counters.preemptions += 1
        self._waiting.note_freed(free_followers(job))
        self._requeue(job)

    def _preempt_parked(self, job: RequestState) -> None:
        self._beams.unpark(job)
        self._counters.preemptions += 1

    # -- waiting requests ---------------------------------------------------------------------

    def _admit(self, plan: BatchBuilder) -> None:
        """Start waiting requests in order, looking past those that cannot start now."""
        waiting, room = self._waiting, self._room
        if plan.is_short or not waiting or not self._has_slots(plan):
            return
        waiting.refresh()
        outstanding = room.num_outstanding()
        spare = self._cache.num_available - outstanding
        if self._is_short(spare):
            return  # the queue need not be walked
        leaders = Leaders(self._running.values() if self._cache.sharing_enabled else ())
        for job in waiting.candidates():
            if self._cache.sharing_enabled and leaders.is_following(job):
                waiting.note_follows(job)
                continue
            if room.fits(job, spare) and self._start(job, plan):
                leaders.add(job)
                if not self._has_slots(plan):
                    return
                outstanding += room.pages_ahead(job)
                spare = self._cache.num_available - outstanding
            if self._running and waiting.least_need > spare:
                return  # nor has anybody behind it

    def _has_slots(self, plan: BatchBuilder) -> bool:
        num_running = len(self._running) - plan.num_ending
        return plan.budget > 0 and num_running < self._max_running_requests

    def _start(self, job: RequestState, plan: BatchBuilder) -> bool:
        """Lock its cached prefix and plan its first chunk; False, and nothing held, if no room."""
        namespace, prefix = job.request.params.namespace, job.wanted()
        lookup = self._cache.lookup(prefix, namespace)
        session = job.session if job.session is not None and job.session.is_open else None
        sequence = self._cache.acquire(
            prefix, namespace, session=session, priority=job.request.params.priority
        )
        wanted = min(plan.budget, len(job.tokens) - sequence.cached_len)
        job.sequence = sequence
        count = max(1, self._room.num_fitting(job, wanted))
        try:
            sequence.extend(job.tokens.view(sequence.length, sequence.length + count))
        except OutOfPages:
            sequence.release()
            job.sequence = None
            return False
        self._waiting.remove(job)
        self._waiting.note_admitted(job)
        self._running[job.arrival] = job
        job.admit(sequence, lookup, self._clock())
        if job.head is not None:
            job.head.num_reused = min(job.head.num_reused, job.num_reused)
        plan.add(job, count, is_decode=False)
        return True

    # -- the end ------------------------------------------------------------------------------

    def _end(
        self, job: RequestState, reason: str, error: BaseException | None = None
    ) -> RequestOutput:
        if job.head is not None:
            return self._end_search(job.head, reason, error)
        return self._output(job, None, self._close(job, reason, error))

    def _end_search(
        self, head: RequestState, reason: str, error: BaseException | None
    ) -> RequestOutput:
        assert head.search is not None
        answers = head.search.answers([job.tokens for job in head.beams])
        if reason == "stop":
            if answers:
                reason = answers[0].reason
            else:
                reason, error = "error", EngineDead("no token can be drawn: none is possible")
        for job in head.beams:
            if job is not head:
                self._let_go(job)
        finish = self._close(head, reason, error)
        head.head, head.search, head.beams = None, None, []  # no ring that keeps it in memory
        first = replace(finish.usage, completion_tokens=len(answers[0].token_ids) if answers else 0)
        for _ in answers[1:]:  # the others count the prompt as cached
            self._counters.prompted_tokens += first.prompt_tokens
            self._counters.reused_tokens += first.prompt_tokens
            gained = first.prompt_tokens - head.cached_on_arrival
            self._counters.gained_while_waiting_tokens += max(0, gained)
        self._counters.generated_tokens += sum(len(one.token_ids) for one in answers)
        finish = replace(finish, usage=first)
        return RequestOutput(head.request.request_id, (), (), (), finish, answers)

    def _close(self, job: RequestState, reason: str, error: BaseException | None = None) -> Finish:
        """Take a job out of every queue, free its private pages, and add up its numbers."""
        self._let_go(job)
        self._twins.part(job)
        counters, usage = self._counters, job.usage()
        counters.finished += reason in ("stop", "length")
        counters.aborted += reason == "abort"
        counters.failed += reason == "error"
        counters.prompted_tokens += usage.prompt_tokens
        counters.reused_tokens += usage.cached_tokens
        counters.computed_tokens += usage.computed_tokens
        gained = usage.cached_tokens - job.cached_on_arrival
        counters.gained_while_waiting_tokens += max(0, gained)
        scores = tuple(job.prompt_scores) if job.prompt_scores else ()
        return Finish(reason, usage, job.metrics(self._clock()), job.lookup, error, scores)

    def _let_go(self, job: RequestState) -> None:
        """Take a job out of every queue and free its private pages."""
        if job.twin_of is not None:
            job.twin_of.twins.remove(job)
        elif job.sequence is None:
            if job.follows is not None:
                job.follows.followers.remove(job)
            if job in self._waiting:  # else: it has drawn, and is a new twin or a beam
                self._waiting.remove(job)
        elif job.arrival in self._running:
            job.sequence.release()
            job.sequence = None
            del self._running[job.arrival]
            self._waiting.note_freed(free_followers(job))
        else:
            self._beams.unpark(job)
        del self._jobs[job.request.request_id]

    def _output(
        self, job: RequestState, drawn: SampleOutput | None, finish: Finish | None
    ) -> RequestOutput:
        request_id = job.request.request_id
        if drawn is None:
            return RequestOutput(request_id, (), (), (), finish)
        if drawn.logprob is None:
            return RequestOutput(request_id, (drawn.token_id,), (), (), finish)
        top = dict(drawn.top_logprobs)
        return RequestOutput(request_id, (drawn.token_id,), (drawn.logprob,), (top,), finish)
