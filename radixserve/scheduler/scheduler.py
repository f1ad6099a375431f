"""`Scheduler`: selects the requests of each step and processes its results.

It owns the queues, every request's status and all sequences: `schedule` takes pages, `update`
publishes and unlocks them. A request is waiting (no sequence) or running (a locked path in the
tree); a running one is prefilling until only its last token is uncomputed, then decoding.

A step in flight has been dispatched and not updated: its K/V is written to the pages but not
committed. At most one further step may be scheduled after it (`_schedule_ahead`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from radixserve.cache import CacheSequence, PrefixCache, SnapshotView
from radixserve.cache.stats import RecentCounts
from radixserve.errors import InvalidRequest, OutOfPages, request_failed
from radixserve.output import Finish, RequestOutput
from radixserve.request import Request
from radixserve.schedule import ModelRunnerOutput, SampleOutput, SchedulerOutput
from radixserve.scheduler.admission import Admission, wake_waiters
from radixserve.scheduler.batch import Batch, after_forced, plan_ahead
from radixserve.scheduler.drafter import Drafter
from radixserve.scheduler.extension import RequestGroup, SchedulerExtension, SchedulerParts
from radixserve.scheduler.page_budget import PageBudget
from radixserve.scheduler.policy import AdmissionPolicy, SchedulerView
from radixserve.scheduler.request_state import RequestState
from radixserve.scheduler.sessions import Sessions
from radixserve.scheduler.shares import Shares
from radixserve.scheduler.stats import SchedulerStats, check_queues
from radixserve.scheduler.step_costs import StepCosts


class Scheduler:
    """A step is `schedule`, the runner's work, `update`. `add` and `abort` come between steps."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        policy: str = "lpm",
        chunked_prefill_size: int = 512,
        max_running_requests: int = 64,
        max_overtake: int = 64,
        max_wait_s: float | None = None,
        admission: AdmissionPolicy | None = None,
        shares: Shares | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`admission`: None for greedy. `shares`: None for one queue of all callers."""
        self._cache = cache
        self._chunked_prefill_size = chunked_prefill_size
        self._clock = clock
        self.counts = SchedulerStats()
        self._requests: dict[str, RequestState] = {}
        self.policy = AdmissionPolicy() if admission is None else admission
        self._shares = Shares() if shares is None else shares
        self._running = self._shares.make_running(max_running_requests)
        self._step_costs = StepCosts(clock)
        # It makes the orders of the waiting queue: first.
        self.policy.attach(SchedulerView(cache, self._running, self._num_waiting, self._step_costs))
        self._waiting = self._shares.make_waiting(
            cache, policy, max_overtake, max_wait_s, clock, self.policy
        )
        self._page_budget = PageBudget(cache, self._running, self._waiting)
        self.sessions = Sessions(cache, self.policy.note_session_closed)
        self._extensions: list[SchedulerExtension] = []
        self._admission = Admission(
            cache,
            self._waiting,
            self._running,
            self._page_budget,
            self._extensions,
            clock,
            self.policy,
        )
        self._parts = SchedulerParts(
            cache=cache,
            requests=self._requests,
            running=self._running,
            waiting=self._waiting,
            page_budget=self._page_budget,
            counts=self.counts,
            costs=self._step_costs,
            clock=clock,
            reserve_arrivals=self._reserve_arrivals,
            requeue=self._requeue,
            preempt=self._preempt,
            suspend=self._suspend,
            extensions=self._extensions,
            remove=self._remove,
            close=self._close,
        )
        self._drafter: Drafter | None = None
        self._jump_drafter: Drafter | None = None  # takes its place with the first such request
        self._shares.attach(self._parts)
        self._in_flight: list[Batch] = []  # at most two, the older one first
        self._num_arrived = 0
        self._has_adapters = False  # whether a request had one
        self._finish_hook: Callable[[CacheSequence, int, int], None] | None = None
        self._recent = RecentCounts(self.counts.tokens, clock())  # in the last minute

    # -- requests and sessions ----------------------------------------------------------------

    @property
    def clock(self) -> Callable[[], float]:
        """Of the times at which requests are queued, in seconds."""
        return self._clock

    def check_fits(self, request: Request) -> None:
        """InvalidRequest if the request could never fit."""
        capacity = self._cache.num_pages * self._cache.page_size
        if not 0 < len(request.token_ids) < request.max_len <= capacity:
            raise InvalidRequest(
                f"a prompt of {len(request.token_ids)} tokens needs max_len between "
                f"{len(request.token_ids) + 1} and the cache's {capacity} tokens, "
                f"got {request.max_len}"
            )

    def plug_in(self, extension: SchedulerExtension) -> None:
        """Have the scheduler call `extension` from now on, after those before it."""
        self._extensions.append(extension)
        extension.attach(self._parts)

    def set_drafter(self, drafter: Drafter, *, is_for_jumps: bool = False) -> None:
        """Have `drafter` propose drafts from now on, in place of another one; is_for_jumps: from
        the first request with jump_forward on."""
        self._drafter, self._jump_drafter = (None, drafter) if is_for_jumps else (drafter, None)
        drafter.attach(self._cache, self._clock, self.counts)

    def set_finish_hook(self, function: Callable[[CacheSequence, int, int], None]) -> None:
        """Have it called before a running request ends and its pages are released, with its
        sequence, the number of its prompt tokens, and how many of them it did not compute."""
        self._finish_hook = function

    def has_room(self, num_tokens: int, queued_at: float) -> bool:
        """Whether a request of so many tokens, queued elsewhere at that time, would find pages now,
        beside the running requests and those that were queued before it. True where no request is
        open. O(requests)."""
        if not self._requests:
            return True
        num_pages = self._page_budget.pages_for(num_tokens)
        num_pages += self._waiting.pages_before(queued_at)
        return num_pages <= self._cache.num_available - self._page_budget.num_outstanding()

    def add(self, request: Request, *, queued_at: float | None = None, num_loaded: int = 0) -> None:
        """Queue a request, and open the session that it names, unless it is open. InvalidRequest if
        the id is in use or the request could never fit.

        queued_at   by `clock`, if it was held back elsewhere before
        num_loaded  tokens of its prompt that were loaded meanwhile
        """
        if request.request_id in self._requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        self.check_fits(request)
        session = self.sessions.open(request.session) if request.session else None
        self._has_adapters |= request.adapter is not None
        if self._jump_drafter is not None and request.params.jumps_forward:
            self._drafter, self._jump_drafter = self._jump_drafter, None
        # as `RequestState.match_tokens` returns them
        wanted = request.keyed_tokens()[: request.score_start + 1]
        prefix_watch = self._cache.watch(wanted, request.namespace)
        queued_at = self._clock() if queued_at is None else queued_at
        state = RequestState(request, self._num_arrived, prefix_watch, queued_at, session)
        state.num_loaded = num_loaded
        self._num_arrived += 1
        self._requests[request.request_id] = state
        self._shares.on_arrival(state)
        self.policy.note_arrival(state)
        for extension in self._extensions:
            extension.on_arrival(state)
        self._waiting.add(state, is_returning=False)

    def _num_waiting(self) -> int:
        return len(self._waiting)

    def _reserve_arrivals(self, count: int) -> None:
        self._num_arrived += count

    def finish(
        self, request_id: str, reason: str, error: BaseException | None = None
    ) -> RequestOutput | None:
        """End a request from outside, for instance at a stop string; None if it has ended. All that
        it holds is freed."""
        state = self._requests.get(request_id)
        return None if state is None else self._end(state, reason, error)

    def fail(self, schedule: SchedulerOutput, error: BaseException) -> list[RequestOutput]:
        """The step failed: end its requests with `error`. Committed tokens stay cached.

        In a step scheduled after it, rows of other requests continue.
        """
        step = next(step for step in self._in_flight if step.schedule is schedule)
        self._in_flight.remove(step)
        return [self._end(state, "error", error) for state in step.active_rows()]

    def fail_all(self, error: BaseException) -> list[RequestOutput]:
        """End everything with `error`."""
        requests = self._requests  # the end of one ends its group
        return [
            self._end(requests[request_id], "error", error)
            for request_id in list(requests)
            if request_id in requests
        ]

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_held(self) -> int:
        """Decisions of the admission policy to let a request wait, since the start."""
        return self.policy.num_held

    def queue_depths(self) -> dict[str, int]:
        """The numbers of running and waiting requests, and the tokens of the latter:
        {"running", "waiting", "waiting_tokens"}. Any thread may ask, at any time."""
        num_running = len(self._running)
        return {
            "running": num_running,
            "waiting": max(0, len(self._requests) - num_running),
            "waiting_tokens": self._waiting.num_tokens,
        }

    def stats(self) -> dict[str, Any]:
        """The counters of `SchedulerStats`, `queue_depths`, the extensions' figures, and
        "last_minute": what `SchedulerStats.tokens` gained in it, see `RecentCounts.gains`."""
        stats = {
            **self.queue_depths(),
            **self.counts.counters(),
            "last_minute": self._recent.gains(self._clock()),
        }
        for extension in self._extensions:
            stats |= extension.stats()
        return stats

    def snapshot(self, view: SnapshotView) -> dict[str, Any]:
        """See `snapshot_requests`."""
        from radixserve.scheduler.snapshot import snapshot_requests  # loaded when it is used

        return snapshot_requests(self._requests, view, self._clock())

    def page_tables(self, namespace: str | None = None) -> list[dict[str, Any]]:
        """See `RunningRequests.page_tables`."""
        return self._running.page_tables(namespace)

    def check(self) -> None:
        """Audit the queues; AssertionError names the first broken invariant. O(requests)."""
        parked = [arrival for extension in self._extensions for arrival in extension.parked]
        check_queues(self._requests, self._waiting, self._running, parked)
        for extension in self._extensions:
            extension.check()

    # -- a step -------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput | None:
        """The next step's work; None when no request is open.

        While a step is in flight: the step that can be scheduled after it, or None when `update` or
        `fail` must come first.
        """
        if self._in_flight:
            return self._schedule_ahead()
        for extension in self._extensions:
            if extension.is_due:
                extension.begin_step()
        self._shares.begin_step()
        batch = self._new_batch()
        for extension in self._extensions:
            if extension.parked and batch.has_slots(self._running):
                extension.fill_slots()
                batch = self._new_batch() if not batch.states else batch
                self._admission.admit(batch)
        while not batch.states and self._requests and self._make_room(None):
            batch = self._new_batch()
        if not batch.states:
            assert not self._requests, "requests are left but none can continue"
            return None
        return self._dispatch(batch)

    def _schedule_ahead(self) -> SchedulerOutput | None:
        assert len(self._in_flight) == 1, "two steps are in flight"
        if not self._shares.may_schedule_ahead():
            return None
        if self._drafter is not None and self._drafter.needs_output(len(self._running)):
            return None
        num_tokens = self._shares.step_tokens(self._chunked_prefill_size)
        batch = Batch(self.counts.steps, num_tokens)
        keep = self._shares.tokens_to_keep
        if not plan_ahead(self._in_flight[0], batch, self._running, self._cache, keep):
            return None
        self._admission.admit(batch)
        if not batch.states:
            return None
        self.counts.steps_ahead += 1
        return self._dispatch(batch)

    def _dispatch(self, batch: Batch) -> SchedulerOutput:
        self.counts.steps += 1
        self._in_flight.append(batch)
        batch.begun_at = self._clock()
        schedule = batch.build(self._cache.layers, has_adapters=self._has_adapters)
        self._shares.note_dispatched(batch, schedule)
        return schedule

    def _new_batch(self) -> Batch:
        num_tokens = self._shares.step_tokens(self._chunked_prefill_size)
        batch = Batch(self.counts.steps, num_tokens)
        self._plan_running(batch)
        if self._waiting.num_tokens:
            self._admission.admit(batch)
        return batch

    def update(self, schedule: SchedulerOutput, output: ModelRunnerOutput) -> list[RequestOutput]:
        """The step was computed: publish its tokens, append sampled tokens, end finished requests.

        Steps are updated in the order in which they were dispatched.
        """
        assert schedule is self._in_flight[0].schedule
        now = self._clock()
        if now >= self._recent.due:
            self._recent.read(now)
            self._step_costs.read()
        step, sampled = self._in_flight.pop(0), output.outputs
        num_tokens = schedule.num_prefill_tokens, schedule.num_decode_tokens
        self._step_costs.unread.append((step.begun_at, now, *num_tokens))
        failed: list[tuple[RequestState, SampleOutput]] = []
        scored: list[tuple[RequestState, int, SampleOutput]] = []  # with the row's end
        states, samples, other_rows = self._commit_decodes(step, sampled)
        for row in other_rows:
            state, sample = step.states[row], sampled[row]
            end = schedule.rows.starts[row] + schedule.rows.num_tokens[row]
            if state.sequence is not step.sequences[row]:  # the request has ended
                self.counts.discarded_tokens += schedule.rows.num_tokens[row]
            elif sample is not None and sample.error is not None:
                failed.append((state, sample))
            else:
                if row in schedule.rows.drafts:
                    self._commit_drafted(state, sample, schedule.rows.drafts[row])
                elif sample is not None and row in step.forced:
                    sample = after_forced(step.forced[row], sample)
                    self._commit_drafted(state, sample, len(sample.more), is_forced=True)
                else:
                    self._commit_row(state, schedule.rows.starts[row], end)
                if sample is not None and row in schedule.rows.targets:
                    scored.append((state, end, sample))
                if sample is not None and schedule.rows.samples[row] is not None:
                    states.append(state)
                    samples.append(sample)
        outputs: list[RequestOutput] = []
        for state, sample in failed:
            if state.sequence is not None:  # else another row has ended its group
                error = request_failed(str(sample.error), sample.cause)
                outputs.append(self._end(state, "error", error))
        for state, end, sample in scored:
            outputs += self._note_scores(state, end, sample)
        return outputs + self._append_samples(states, samples)

    def _commit_decodes(
        self, step: Batch, sampled: Sequence[SampleOutput | None]
    ) -> tuple[list[RequestState], list[SampleOutput], list[int]]:
        """Publish the rows of one generated token, nearly all of most steps, by one call.

        Returns the requests and samples of these rows, and the indices of all others: nothing was
        done for them.
        """
        states: list[RequestState] = []
        sequences: list[CacheSequence] = []
        samples: list[SampleOutput] = []
        other_rows: list[int] = []
        assert step.schedule is not None
        num_decode = step.num_decode_rows
        rows = zip(range(num_decode), step.states, step.sequences, sampled, strict=False)
        for row, state, sequence, sample in rows:
            if (
                state.sequence is sequence
                and sample is not None
                and sample.error is None
                and sequence.committed_len >= state.num_prompt
            ):
                states.append(state)
                sequences.append(sequence)
                samples.append(sample)
            else:
                other_rows.append(row)
        self._cache.commit_next(sequences, [state.tokens.last for state in states])
        self.counts.decoded_tokens += len(sequences)
        for state in states:
            if state.waiters:
                self._waiting.mark_unblocked(wake_waiters(state))
        other_rows += range(num_decode, len(step.states))
        return states, samples, other_rows

    def _commit_row(self, state: RequestState, start: int, end: int) -> None:
        """Publish the tokens [start, end) of a prompt, or tokens computed after a preemption."""
        assert state.sequence is not None
        state.sequence.commit(end)
        if end - start == 1 and end > state.num_prompt:
            self.counts.decoded_tokens += 1
        else:
            self.counts.count_prefill(start, end - start, state.num_prompt_done)
            state.note_committed(end)
        if state.waiters:
            self._waiting.mark_unblocked(wake_waiters(state))

    def _commit_drafted(
        self,
        state: RequestState,
        sample: SampleOutput | None,
        num_drafts: int,
        *,
        is_forced: bool = False,
    ) -> None:
        """Publish a request's last token and the drafts that were right; take back the others.
        is_forced: there are none."""
        assert state.sequence is not None
        assert sample is not None
        assert self._drafter is not None
        num_accepted = len(sample.more)
        end = state.tokens.size + num_accepted
        state.sequence.commit(end)
        if not is_forced:
            state.sequence.rewind(end)
        self.counts.decoded_tokens += 1 + num_accepted
        self.counts.drafted_tokens += num_drafts
        self.counts.accepted_draft_tokens += num_accepted
        state.num_drafted += num_drafts
        state.num_accepted_drafts += num_accepted
        self._drafter.note_verified(state, num_drafts, num_accepted)
        if state.waiters:
            self._waiting.mark_unblocked(wake_waiters(state))

    def _append_samples(
        self, states: Sequence[RequestState], samples: Sequence[SampleOutput]
    ) -> list[RequestOutput]:
        """Append sampled tokens, or hand them to the groups of their requests."""
        outputs: list[RequestOutput] = []
        groups: dict[RequestGroup, None] = {}
        for state, sample in zip(states, samples, strict=True):
            if (group := state.group) is not None:
                groups.pop(group, None)
                groups[group] = None  # in the order of their last samples
                group.take_sample(state, sample)
            elif state.sequence is not None:  # else another row has ended its group
                outputs.append(self._append(state, sample))
                self.counts.generated_tokens += not state.request.is_prefetch
        for group in groups:
            assert not self._in_flight, "a group continues while a step is in flight"
            group.end_step()
        for group in groups:
            if (output := group.advance()) is not None:
                outputs.append(output)
        return outputs

    def _requeue(self, state: RequestState) -> None:
        state.watch_prefix(self._cache)
        self._waiting.add(state, is_returning=True)

    def _note_scores(
        self, state: RequestState, end: int, sampled: SampleOutput
    ) -> list[RequestOutput]:
        """`sampled`: the scores of a row up to the position `end`."""
        assert state.scores is not None
        state.scores.note(sampled)
        for extension in self._extensions:
            extension.on_scored(state)
        if state.request.also_generate or end < state.num_prompt:  # reported at the end
            return []
        logprobs = tuple(state.scores.logprobs)
        return [RequestOutput(state.request_id, (), logprobs, (), self._close(state, "stop"))]

    def _append(self, state: RequestState, sampled: SampleOutput) -> RequestOutput:
        if sampled.more:
            reason = state.append_several(sampled)
            self.counts.generated_tokens += len(sampled.more)
        else:
            reason = state.append(sampled.token_id, is_complete=sampled.is_complete)
        if state.first_token_at is None:
            state.first_token_at = self._clock()
        return state.output(sampled, None if reason is None else self._close(state, reason))

    # -- running requests ---------------------------------------------------------------------

    def _plan_running(self, batch: Batch) -> None:
        """Decodes first, then prefill chunks, each by priority and arrival.

        A request without pages preempts unplanned ones of lower priority, else skips the step. The
        highest in priority can preempt all others, so at least one request always continues.
        """
        decodes: list[RequestState] = []
        prefills: list[RequestState] = []
        for state in self._running.by_priority():
            (decodes if state.is_decoding else prefills).append(state)
        drafts: Mapping[RequestState, Sequence[int]] = {}
        if self._drafter is not None and decodes:
            drafts = self._drafter.propose(decodes)
            if drafts:
                decodes = [state for state in decodes if state not in drafts]
        num_planned = self._plan_decodes(decodes, batch)
        for state in decodes[num_planned:]:
            if state.sequence is not None and self._allocate(state, 1, batch):
                batch.add(state, 1, is_decode=True)
        for state, token_ids in drafts.items():
            self._plan_drafted(state, token_ids, batch)
        if not prefills:
            return
        num_kept = self._shares.tokens_to_keep(batch, prefills)
        for state in self._running.prefill_order(prefills, batch.token_budget - num_kept):
            if state.sequence is None:  # preempted for a request before it
                continue
            wanted = min(batch.tokens_left(state, num_kept), len(state.tokens) - state.committed)
            if wanted > 0 and (count := self._allocate(state, wanted, batch)):
                batch.add(state, count, is_decode=False)

    def _plan_decodes(self, decodes: Sequence[RequestState], batch: Batch) -> int:
        """Plan the decode rows by one call to the cache, up to the first one for which no page is
        free; returns how many."""
        if not decodes or self._cache.layers is not None:
            return 0
        sequences = [state.sequence for state in decodes if state.sequence is not None]
        count = len(sequences)
        try:
            self._cache.append_next(sequences, [state.tokens.last for state in decodes])
        except OutOfPages:
            while count and sequences[count - 1].length < decodes[count - 1].tokens.size:
                count -= 1  # no page was left for it
        batch.add_decodes(decodes[:count], sequences[:count])
        return count

    def _plan_drafted(self, state: RequestState, drafts: Sequence[int], batch: Batch) -> None:
        """Plan a decode row with drafts: none of them where no pages are left."""
        sequence = state.sequence
        if sequence is None:  # preempted for a request before it
            return
        is_forced = state.must_follow(drafts)
        num_drafts = min(len(drafts), batch.token_budget if is_forced else batch.guess_budget)
        if not is_forced:
            num_drafts = sequence.reserve_rewind(num_drafts)
        if num_drafts > 0:
            with suppress(OutOfPages):
                sequence.extend([state.tokens.last, *drafts[:num_drafts]])
                batch.add_drafted(state, num_drafts, is_forced=is_forced)
                return
        if self._allocate(state, 1, batch):
            batch.add(state, 1, is_decode=False)

    def _allocate(self, state: RequestState, wanted: int, batch: Batch) -> int:
        """Allocate up to `wanted` tokens, preempting if none fits; returns how many."""
        sequence = state.sequence
        assert sequence is not None
        start = sequence.length
        while True:
            count = 1 if wanted == 1 else max(1, self._page_budget.num_fitting(state, wanted))
            count = state.chunk_len(start, count)
            try:
                sequence.extend(state.tokens.view(start, start + count))
                return count
            except OutOfPages:
                batch.is_out_of_pages = True
                if self._make_room(state):
                    continue
                victim = self._running.lowest_below(state, batch.has)
                if victim is None:
                    return 0
                self._preempt(victim)

    def _make_room(self, state: RequestState | None) -> bool:
        """Have the first extension that can give up pages for `state`, see
        `SchedulerExtension.make_room`. False if none can."""
        return any(extension.make_room(state) for extension in self._extensions)

    def _preempt(self, state: RequestState) -> None:
        """Requeue a running request; its computed K/V stays cached until evicted."""
        self.policy.note_preempted(state)
        self.counts.preemptions += 1
        self._suspend(state)

    def _suspend(self, state: RequestState) -> None:
        """Release a running request's pages and requeue it."""
        assert state.sequence is not None
        assert not self._in_flight, "a row in flight would be lost"
        state.sequence.release()
        state.sequence = None
        self._running.remove(state)
        self._waiting.mark_unblocked(wake_waiters(state))
        self._requeue(state)

    # -- the end ------------------------------------------------------------------------------

    def _end(
        self, state: RequestState, reason: str, error: BaseException | None = None
    ) -> RequestOutput:
        group: RequestGroup | None = state.group
        if group is not None:
            return group.end(reason, error)
        return state.output(None, self._close(state, reason, error))

    def _close(
        self, state: RequestState, reason: str, error: BaseException | None = None
    ) -> Finish:
        """Take a request out of every queue, free its private pages, and add up its numbers."""
        for extension in self._extensions:
            extension.on_end(state)
        self.policy.note_ended(state, reason)
        if self._drafter is not None:
            self._drafter.note_ended(state)
        # After an error pages may hold less than was committed: a copied head that no step made.
        if self._finish_hook is not None and state.sequence is not None and reason != "error":
            self._finish_hook(state.sequence, state.num_prompt, state.num_reused)
        self._remove(state)
        self._shares.on_end(state)
        usage = state.usage()
        is_prefetch, on_arrival = state.request.is_prefetch, state.cached_on_arrival
        self.counts.count_finished(reason, usage, on_arrival, is_prefetch=is_prefetch)
        scores = () if state.scores is None else state.scores.of_prompt()
        metrics = state.metrics(self._clock())
        epochs = state.weight_epochs
        return Finish(reason, usage, metrics, state.lookup, error, scores, epochs)

    def _remove(self, state: RequestState) -> None:
        """Take a request out of every queue and free its private pages."""
        if state.sequence is None:
            if state.producer is not None:
                state.producer.waiters.remove(state)
            if state in self._waiting:  # else it rests in its group
                self._waiting.remove(state)
        elif state in self._running:
            state.sequence.release()
            state.sequence = None
            self._running.remove(state)
            self._waiting.mark_unblocked(wake_waiters(state))
        else:
            state.group.unpark(state)
        del self._requests[state.request_id]
