"""`Scheduler`: who runs in the next step, and what becomes of it.

It owns the queues and every request's status. It alone calls the cache: `schedule` takes pages,
`update` publishes and lets go. A request is waiting (no sequence) or running (a locked path in
the tree); a running one is prefilling until only its last token is uncomputed, then decoding.
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
from radixserve.schedule import Row, RowOutput, Schedule, StepOutput
from radixserve.scheduler.beams import Beams
from radixserve.scheduler.counters import Counters
from radixserve.scheduler.holders import Holders
from radixserve.scheduler.job import Job
from radixserve.scheduler.leaders import Leaders, free_followers
from radixserve.scheduler.plan import StepPlan
from radixserve.scheduler.waiting import WaitingRoom

_LOOKAHEAD = 8  # tokens of room kept for each running request when another is admitted


class Scheduler:
    """One step is `schedule()`, the runner's work, `update()`; `add` and `abort` come between."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        policy: str = "lpm",
        chunk_size: int = 512,
        max_running: int = 64,
        max_overtake: int = 64,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cache = cache
        self._chunk_size = chunk_size
        self._max_running = max_running
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._waiting = WaitingRoom(cache, policy, max_overtake)
        self._running: dict[int, Job] = {}  # by arrival
        self._beams = Beams(
            self._jobs, self._running, self._waiting, self._requeue, self._num_startable
        )
        self._holders = Holders(cache)
        self._num_arrived = 0
        self._counters = Counters()

    # -- what comes from outside --------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. InvalidRequest if its id is in use or it could never fit.

        A holder that it names and that is not open is opened, with the cache's own lease. One that
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
        holder = self._holders.get(request.holder) if request.holder else None
        first = self._first_of(request)
        if first is not None:
            probe = first.probe
        else:  # a cache leaves the last token to be computed: see `Job.wanted`
            wanted = request.token_ids[: request.score_start + 1]
            probe = self._cache.probe(wanted, request.params.namespace)
        job = Job(request, self._num_arrived, probe, self._clock(), holder)
        self._num_arrived += 1 if request.beams is None else request.beams.width
        self._jobs[request.request_id] = job
        if first is not None:
            assert first.num_prompt == job.num_prompt
            job.twin_of = first
            first.twins.append(job)
            return
        if request.beams is not None:
            self._beams.begin(job)
        self._waiting.add(job, is_returning=False)

    def _first_of(self, request: Request) -> Job | None:
        """The one whose twin a request is: it has yet to draw, and scores what this one wants."""
        first = self._jobs.get(request.twin_of) if request.twin_of else None
        if first is None or first.twin_of is not None or first.num_output:
            return None
        is_search = first.head is not None or request.beams is not None
        return None if is_search or first.request.draws != request.draws else first

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free all it holds; None if it has ended already."""
        return self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: str) -> RequestOutput | None:
        """End a request from outside, for instance at a stop string; None if it has ended."""
        job = self._jobs.get(request_id)
        return None if job is None else self._end(job, reason)

    def fail(self, schedule: Schedule, error: BaseException) -> list[RequestOutput]:
        """The step failed: end its requests with `error`. What they had committed stays cached."""
        ids = [twin.request_id for twin in schedule.twins]
        ids += [row.request_id for row in schedule.rows]
        return [self._end(self._jobs[i], "error", error) for i in ids if i in self._jobs]

    def fail_all(self, error: BaseException) -> list[RequestOutput]:
        """End everything with `error`."""
        jobs = list(self._jobs.values())
        return [self._end(j, "error", error) for j in jobs if j.request.request_id in self._jobs]

    def open_holder(self, name: str, lease_s: float | None = None) -> None:
        """Open a holder, or do nothing where one of that name is open; see the cache's own.

        It is remembered until `close_holder`: close what you name.
        """
        self._holders.open(name, lease_s)

    def claim(self, name: str, tokens: IntArray, namespace: str = "") -> int:
        """Let a holder, opened if need be, claim what is cached of `tokens`; returns how many."""
        return self._holders.claim(name, tokens, namespace)

    def close_holder(self, name: str) -> None:
        """What only closed holders reach is dropped first from now on; an unknown name is fine.

        Its requests go on. One that was not started yet belongs to nobody then, even if the name
        is opened again.
        """
        self._holders.close(name)

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def stats(self) -> dict[str, int]:
        """Counters since the start and the queue depths now."""
        counters = {name: getattr(self._counters, name) for name in self._counters.__slots__}
        num_waiting = len(self._jobs) - len(self._running)  # twins beside a running one as well
        return {"waiting": num_waiting, "running": len(self._running), **counters}

    # -- a step -------------------------------------------------------------------------------

    def schedule(self) -> Schedule | None:
        """The next step's work, or None when there is nothing to do."""
        plan = self._plan()
        while plan.is_empty and self._beams.parked:  # they hold the room that the others need
            self._preempt_parked(max(self._beams.parked.values(), key=lambda job: job.rank))
            plan = self._plan()
        if plan.is_empty:
            assert not self._jobs, "requests are left but none can go on"
            return None
        self._counters.steps += 1
        return plan.build()

    def _plan(self) -> StepPlan:
        plan = StepPlan(self._counters.steps, self._chunk_size)
        self._plan_running(plan)
        self._admit(plan)
        return plan

    def update(self, schedule: Schedule, output: StepOutput) -> list[RequestOutput]:
        """The step was computed: publish its tokens, append what was drawn, end what ended."""
        news, num_rows = [], len(schedule.rows)
        drawing: list[tuple[Job, RowOutput]] = []
        searching: dict[int, Job] = {}
        for row, drawn in zip(schedule.rows, output.outputs[:num_rows], strict=True):
            job = self._jobs.get(row.request_id)
            if job is None or job.sequence is None:
                continue
            if drawn is not None and drawn.error is not None:
                self._free_twins(job)  # each gets its own answer below
                news.append(self._end(job, "error", EngineDead(drawn.error)))
                continue
            job.sequence.commit(row.end)
            if job.followers:
                self._waiting.note_freed(free_followers(job))
            self._count_row(job, row)
            if drawn is None:
                continue
            if row.targets is not None:
                news += self._note_scores(job, row, drawn)
                if row.sample is None:
                    continue
            if job.head is None:
                drawing.append((job, drawn))
            else:
                job.drawn = drawn
                searching[job.head.arrival] = job.head
        if schedule.twins:
            self._start_twins([job for job, _ in drawing])
        news += [self._append(job, drawn) for job, drawn in drawing]
        for twin, drawn in zip(schedule.twins, output.outputs[num_rows:], strict=True):
            job = self._jobs.get(twin.request_id)
            if job is not None and drawn is not None:
                news.append(self._update_twin(job, drawn))
        for head in searching.values():
            news += self._advance_search(head)
        return news

    def _advance_search(self, head: Job) -> list[RequestOutput]:
        """Beams of it have drawn; its answers when that was its last step."""
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

    def _start_twins(self, firsts: list[Job]) -> None:
        """These are about to draw: their twins hold the prompts, too. By arrival, as many run at
        once as there is room for; the others wait like preempted ones."""
        may_start = True
        for job in sorted((t for first in firsts for t in first.twins), key=lambda t: t.arrival):
            assert job.twin_of is not None
            sequence, own = job.twin_of.sequence, None
            may_start = may_start and self._num_startable(job, 1) > 0
            if may_start and sequence is not None:
                try:
                    own = sequence.fork()
                except OutOfPages:
                    may_start = False
            job.admit_twin(own, self._clock())
            if own is not None:
                self._waiting.note_admitted(job)
                self._running[job.arrival] = job
        for first in firsts:
            first.twins = []

    def _free_twins(self, first: Job) -> None:
        for job in first.twins:
            job.admit_twin(None, self._clock())
        first.twins = []

    def _num_startable(self, job: Job, count: int) -> int:
        """How many of `count` forks of or like `job` may run at once: beside the others, and
        passing nobody whom `job` must not."""
        waiting = self._waiting
        slots = min(count, self._max_running - len(self._running))
        if slots <= 0 or waiting.barrier < job.arrival:
            return 0
        if waiting.highest_priority > job.request.params.priority:
            return 0
        outstanding = sum(self._pages_ahead(other) for other in self._running.values())
        size = self._pages_for(_LOOKAHEAD) + 1
        return max(0, min(slots, (self._cache.num_available - outstanding) // size))

    def _update_twin(self, job: Job, drawn: RowOutput) -> RequestOutput:
        if drawn.error is not None:
            return self._end(job, "error", EngineDead(drawn.error))
        news = self._append(job, drawn)
        if news.finish is None and job.sequence is None:
            self._requeue(job)
        return news

    def _requeue(self, job: Job) -> None:
        job.probe = self._cache.probe(job.wanted(), job.request.params.namespace)
        self._waiting.add(job, is_returning=True)

    def _count_row(self, job: Job, row: Row) -> None:
        counters, num_tokens = self._counters, len(row.token_ids)
        if num_tokens == 1 and row.start >= job.num_prompt:  # behind the prompt
            counters.decoded_tokens += 1
            return
        counters.prefilled_tokens += num_tokens
        again = min(row.end, job.num_prompt_done) - row.start
        counters.recomputed_tokens += max(0, again)
        job.note_committed(row.end)

    def _note_scores(self, job: Job, row: Row, drawn: RowOutput) -> list[RequestOutput]:
        job.num_scored += len(drawn.scores)
        if job.request.draws:  # told at the end
            tops = drawn.top_scores or ((),) * len(drawn.scores)
            job.prompt_scores += map(PromptScore, drawn.scores, tops)
            return []
        finish = self._close(job, "stop") if row.end == job.num_prompt else None
        return [RequestOutput(job.request.request_id, (), drawn.scores, (), finish)]

    def _append(self, job: Job, drawn: RowOutput) -> RequestOutput:
        job.tokens.append(drawn.token_id)
        self._counters.generated_tokens += 1
        if job.first_token_at is None:
            job.first_token_at = self._clock()
        reason = self._end_reason(job, drawn.token_id)
        return self._output(job, drawn, None if reason is None else self._close(job, reason))

    def _end_reason(self, job: Job, token_id: int) -> str | None:
        request, length = job.request, len(job.tokens)
        num_output = length - job.num_prompt
        if token_id in request.end_ids and num_output > request.params.min_tokens:
            return "stop"
        if num_output >= request.params.max_tokens or length >= request.max_len:
            return "length"
        return None

    # -- running requests ---------------------------------------------------------------------

    def _plan_running(self, plan: StepPlan) -> None:
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

    def _grow(self, job: Job, wanted: int, plan: StepPlan) -> int:
        """Take room for up to `wanted` tokens, preempting if there is none; returns how many."""
        sequence = job.sequence
        assert sequence is not None
        start = sequence.length
        while True:
            count = 1 if wanted == 1 else max(1, self._fitting(job, wanted))
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

    def _fitting(self, job: Job, count: int) -> int:
        """For how many of `count` more tokens there is room without taking anyone's pages."""
        sequence, cache = job.sequence, self._cache
        assert sequence is not None
        slack = -sequence.length % cache.page_size
        return min(count, slack + cache.num_available * cache.page_size)

    def _victim(self, job: Job, plan: StepPlan) -> Job | None:
        """The lowest in rank below `job` that is not part of this step."""
        others = [j for j in self._running.values() if j.rank > job.rank and not plan.has(j)]
        return max(others, key=lambda j: j.rank, default=None)

    def _preempt(self, job: Job) -> None:
        """Back to waiting; what was computed stays in the tree for as long as there is room."""
        assert job.sequence is not None
        job.sequence.release()
        job.sequence = None
        del self._running[job.arrival]
        self._counters.preemptions += 1
        self._waiting.note_freed(free_followers(job))
        self._requeue(job)

    def _preempt_parked(self, job: Job) -> None:
        self._beams.unpark(job)
        self._counters.preemptions += 1

    # -- waiting requests ---------------------------------------------------------------------

    def _admit(self, plan: StepPlan) -> None:
        """Start waiting requests in order, looking past those that cannot start now."""
        waiting = self._waiting
        if plan.is_short or not waiting or not self._has_slots(plan):
            return
        waiting.refresh()
        outstanding = sum(self._pages_ahead(job) for job in self._running.values())
        room = self._cache.num_available - outstanding
        if self._running and waiting.least_need > room and waiting.barrier == math.inf:
            return  # nobody has room: the queue need not be walked
        leaders = Leaders(self._running.values() if self._cache.reuses else ())
        for job in waiting.candidates():
            if self._cache.reuses and leaders.is_following(job):
                waiting.note_follows(job)
                continue
            if self._fits(job, room) and self._start(job, plan):
                leaders.add(job)
                if not self._has_slots(plan):
                    return
                outstanding += self._pages_ahead(job)
                room = self._cache.num_available - outstanding
            if self._running and waiting.least_need > room:
                return  # nor has anybody behind it

    def _has_slots(self, plan: StepPlan) -> bool:
        return plan.budget > 0 and len(self._running) < self._max_running

    def _fits(self, job: Job, room: int) -> bool:
        """Whether there is room for all its tokens beside what the running ones still need."""
        if not self._running:
            return True  # alone it fits: `add` made sure
        size = self._cache.page_size
        unlocked = job.probe.cached_len // size - job.probe.locked_len // size
        return self._waiting.need(job) + unlocked <= room

    def _pages_ahead(self, job: Job) -> int:
        """Pages that a running request will need soon."""
        assert job.sequence is not None
        ahead = min(len(job.tokens) + _LOOKAHEAD, job.request.max_len)
        return max(0, self._pages_for(ahead) - len(job.sequence.pages))

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.page_size)

    def _start(self, job: Job, plan: StepPlan) -> bool:
        """Lock its cached prefix and plan its first chunk; False, and nothing held, if no room."""
        namespace, prefix = job.request.params.namespace, job.wanted()
        lookup = self._cache.lookup(prefix, namespace)
        holder = job.holder if job.holder is not None and job.holder.is_open else None
        sequence = self._cache.acquire(
            prefix, namespace, holder=holder, priority=job.request.params.priority
        )
        wanted = min(plan.budget, len(job.tokens) - sequence.cached_len)
        job.sequence = sequence
        count = max(1, self._fitting(job, wanted))
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

    def _end(self, job: Job, reason: str, error: BaseException | None = None) -> RequestOutput:
        if job.head is not None:
            return self._end_search(job.head, reason, error)
        return self._output(job, None, self._close(job, reason, error))

    def _end_search(self, head: Job, reason: str, error: BaseException | None) -> RequestOutput:
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

    def _close(self, job: Job, reason: str, error: BaseException | None = None) -> Finish:
        """Take a job out of every queue, free its private pages, and add up its numbers."""
        self._let_go(job)
        self._part_twins(job)
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

    def _let_go(self, job: Job) -> None:
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

    def _part_twins(self, job: Job) -> None:
        """`job` ends before its prompt was computed: the first of its twins takes its place."""
        if not job.twins:
            return
        heir, *others = job.twins
        heir.take_scores(job)
        heir.twin_of, heir.twins, job.twins = None, others, []
        for other in others:
            other.twin_of = heir
        heir.probe = self._cache.probe(heir.wanted(), heir.request.params.namespace)
        self._waiting.add(heir, is_returning=True)  # older than the fresh ones behind it

    def _output(self, job: Job, drawn: RowOutput | None, finish: Finish | None) -> RequestOutput:
        request_id = job.request.request_id
        if drawn is None:
            return RequestOutput(request_id, (), (), (), finish)
        if drawn.logprob is None:
            return RequestOutput(request_id, (drawn.token_id,), (), (), finish)
        top = dict(drawn.top_logprobs)
        return RequestOutput(request_id, (drawn.token_id,), (drawn.logprob,), (top,), finish)
