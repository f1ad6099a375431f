"""`BeamSearches`: the requests that compute the beams of searches, from one joint step to the next.

Each beam is scheduled, waits and is preempted like any other request. A sampled beam waits until
all beams of its search have sampled, mostly in the same step. Until then it is parked: it is not
scheduled and uses no slot; its pages may be reclaimed. Its sampled candidates are kept, so none is
computed twice. When all have sampled, `BeamScorer` chooses their continuations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from radixserve.arrays import IntBuffer
from radixserve.beams.scorer import BeamScorer, Continuation
from radixserve.cache import CacheSequence
from radixserve.errors import OutOfPages, request_failed
from radixserve.output import Beam, RequestOutput
from radixserve.schedule import SampleOutput
from radixserve.scheduler.admission import wake_waiters
from radixserve.scheduler.extension import RequestGroup, SchedulerExtension, SchedulerParts
from radixserve.scheduler.request_state import RequestState


class BeamSearch(RequestGroup):
    """A beam search from one joint step to the next."""

    def __init__(self, leader: RequestState, searches: BeamSearches) -> None:
        assert leader.request.beams is not None
        self._searches = searches
        self._scorer = BeamScorer(leader.request)
        self.leader = leader  # carries the times, usage and answers of the search
        self.width = leader.request.beams.width
        self.beams = [leader]  # best first
        self.samples: dict[int, SampleOutput] = {}  # of this step, by the beam's arrival

    @property
    def num_output(self) -> int:
        return self._scorer.num_output

    def take_sample(self, state: RequestState, sample: SampleOutput) -> None:
        self.leader.num_reused = min(self.leader.num_reused, state.num_reused)
        self.samples[state.arrival] = sample

    def end_step(self) -> None:
        if self.leader.first_token_at is None:
            self.leader.first_token_at = self._searches.clock()
        if len(self.samples) < len(self.beams):
            self._searches.park_sampled(self)

    def advance(self) -> RequestOutput | None:
        """Once each beam has a sample, choose the next beams. Returns the answers when the search
        has ended."""
        if len(self.samples) < len(self.beams):
            return None
        samples = [self.samples[beam.arrival] for beam in self.beams]
        self.samples = {}
        try:
            children = self._scorer.advance(samples)
        except Exception as cause:  # in the check for stop strings, which decodes text
            message = f"the next step of a beam search could not be chosen: {cause!r}"
            return self.end("error", request_failed(message, cause))
        if children:
            self._searches.advance(self, children)
            return None
        answers = self._scorer.answers()
        if not answers:
            return self.end("error", request_failed("no token can be sampled: none is possible"))
        return self.end(answers[0].reason)

    def end(self, reason: str, error: BaseException | None = None) -> RequestOutput:
        """Returns the answers so far. The usage is that of the first one; the others count the
        prompt as cached."""
        return self._searches.end(self, self._scorer.answers(), reason, error)

    def unpark(self, state: RequestState) -> None:
        self._searches.unpark(state)

    def may_rest(self, state: RequestState) -> bool:
        """It has sampled, or is the leader of a search without its own beam."""
        return state.arrival in self.samples or all(beam is not state for beam in self.beams)

    def join(self, state: RequestState) -> None:
        """Add a request as a beam; the prompt was computed before it."""
        leader, state.group = self.leader, self
        state.share, state.lookahead = leader.share, leader.lookahead
        state.num_reused = state.num_prompt_done = state.num_prompt
        state.lookup, state.admitted_at = leader.lookup, leader.admitted_at


class BeamSearches(SchedulerExtension):
    """Works on the scheduler's own queues; owns the parked requests."""

    def __init__(self) -> None:
        self.parked: dict[int, RequestState] = {}  # by arrival, those that have pages

    def attach(self, parts: SchedulerParts) -> None:
        self._parts, self.clock = parts, parts.clock
        self._requests, self._running, self._waiting = parts.requests, parts.running, parts.waiting

    def on_arrival(self, state: RequestState) -> None:
        """The request of a search is its first beam: it computes the prompt. The next `width` - 1
        arrivals belong to the search, too."""
        if state.request.beams is not None:
            state.group = BeamSearch(state, self)
            state.lookahead = 1  # a beam stops after its next token
            self._parts.reserve_arrivals(state.request.beams.width - 1)

    def park_sampled(self, search: BeamSearch) -> None:
        """Park the beams that wait for the other beams of their search."""
        for state in search.beams:
            if state.arrival in search.samples and state in self._running:
                self._running.remove(state)
                self.parked[state.arrival] = state

    def unpark(self, state: RequestState) -> None:
        """Release the pages of a parked beam. Its sample is kept."""
        assert state.sequence is not None
        state.sequence.release()
        state.sequence = None
        del self.parked[state.arrival]

    def fill_slots(self) -> None:
        """Release the pages of parked beams while other beams of their search wait for pages.

        O(parked beams and the beams of their searches).
        """
        searches: set[BeamSearch] = {state.group for state in self.parked.values()}
        short = {
            search for search in searches if any(beam in self._waiting for beam in search.beams)
        }
        for state in list(self.parked.values()):
            if state.group in short:
                self.unpark(state)

    def on_epoch(self) -> None:
        """Beams that have been sampled are sampled again: a joint step compares beams by the same
        weights."""
        for state in list(self.parked.values()):
            self.unpark(state)
        for search in {state.group for state in self._requests.values() if state.group}:
            for beam in search.beams:
                if search.samples.pop(beam.arrival, None) is not None:
                    self._parts.requeue(beam)

    def make_room(self, state: RequestState | None) -> bool:
        """Release the pages of the parked beam that is lowest in priority among those from which
        `state` may take pages."""
        parked = self.parked.values() if state is None else self._victims(state)
        victim = max(parked, key=lambda other: other.priority_key, default=None)
        if victim is None:
            return False
        self.unpark(victim)
        self._parts.counts.preemptions += 1
        return True

    def _victims(self, state: RequestState) -> list[RequestState]:
        """Parked beams below `state` and those of its own search. The priority of a request with
        another share does not count, its arrival does."""
        return [
            other
            for other in self.parked.values()
            if (
                other.priority_key > state.priority_key
                if other.share is state.share
                else other.arrival > state.arrival
            )
            or (state.group is not None and other.group is state.group)
        ]

    def end(
        self,
        search: BeamSearch,
        answers: tuple[Beam, ...],
        reason: str,
        error: BaseException | None,
    ) -> RequestOutput:
        """See `BeamSearch.end`."""
        leader, counts = search.leader, self._parts.counts
        for state in search.beams:
            leader.num_reused = min(leader.num_reused, state.num_reused)
            if state is not leader:
                self._parts.remove(state)
                state.group = None
        finish = self._parts.close(leader, reason, error)
        leader.group = None
        lens = [len(answer.token_ids) for answer in answers]
        usage = finish.usage.with_answer(lens[0] if lens else 0)
        for num_tokens in lens[1:]:
            counts.count_prompt(usage.of_other_answer(num_tokens), leader.cached_on_arrival)
        counts.generated_tokens += sum(lens)
        finish = replace(finish, usage=usage)
        return RequestOutput(leader.request_id, (), (), (), finish, answers)

    def check(self) -> None:
        for state in self.parked.values():
            assert self._requests.get(state.request_id) is state, "a parked beam has ended"
            assert state.sequence is not None, "a parked beam has no pages"

    # -- from beams to their children ---------------------------------------------------------

    def advance(self, search: BeamSearch, children: Sequence[Continuation]) -> None:
        """Continue a search with the next beams, best first.

        A beam's first child keeps its request and its pages, further ones share these by a fork. As
        many children run as beams ran, and more where there is room; the others wait like preempted
        requests.
        """
        leader, parents = search.leader, search.beams
        num_running = sum(state in self._running for state in parents)
        wanted = len(children) - num_running
        room = self._num_startable(leader, wanted) if wanted > 0 else 0
        continued = {child.parent for child in children}
        spare = [state for index, state in enumerate(parents) if index not in continued]
        for state in spare:
            room += state in self._running
            self._stop(state)
        if leader in spare or leader not in parents:
            # The leader's request is used again first; it need not have been a beam.
            spare = [state for state in spare if state is not leader]
            spare.append(leader)
        search.beams = self._continue(search, children, spare, room)
        for state in spare:
            if state is not leader:
                del self._requests[state.request.request_id]

    def _continue(
        self,
        search: BeamSearch,
        children: Sequence[Continuation],
        spare: list[RequestState],
        room: int,
    ) -> list[RequestState]:
        """The requests of the children; `spare` ones are used up from its end."""
        parents = search.beams
        length = len(parents[0].tokens)
        beams: list[RequestState] = []
        seen: set[int] = set()
        for child in children:
            parent = parents[child.parent]
            if child.parent in seen:
                state = spare.pop() if spare else self._new_beam(search, [*parents, *beams])
                tokens = parent.tokens.view(0, length)
                token_id = np.int32(child.token_id + state.token_mark)
                state.tokens = IntBuffer(np.append(tokens, token_id))
                state.sequence = _fork(parent) if room else None
                state.matcher = None if parent.matcher is None else parent.matcher.fork()
                room = room - 1 if state.sequence is not None else 0
            else:
                seen.add(child.parent)
                state = parent
                state.tokens.append(child.token_id + state.token_mark)
                if state not in self._running:
                    room = self._resume(state, room)
            beams.append(state)
            if state.sequence is None:
                self._parts.requeue(state)
            elif state not in self._running:
                self._running.add(state)
        return beams

    def _resume(self, state: RequestState, room: int) -> int:
        """Continue a parked beam with its pages while there is room; returns the room left."""
        if state.sequence is None:
            return room
        if not room:
            self.unpark(state)
            return 0
        del self.parked[state.arrival]
        return room - 1

    def _stop(self, state: RequestState) -> None:
        """End a beam without children; its computed K/V stays cached."""
        if state.sequence is None:
            return
        state.sequence.release()
        state.sequence = None
        if state in self._running:
            self._running.remove(state)
        else:
            del self.parked[state.arrival]
        if state.waiters:
            self._waiting.mark_unblocked(wake_waiters(state))

    def _num_startable(self, state: RequestState, count: int) -> int:
        """Number of the `count` forks of `state` that may run now: limited by slots, pages,
        priority and the overtake bound."""
        running, cache, budget = self._running, self._parts.cache, self._parts.page_budget
        slots = min(count, running.max_requests - len(running))
        if slots <= 0 or not self._waiting.is_first(state):
            return 0
        size = 1 if cache.page_size == 1 else 2  # the next token's, and a copied page
        spare = cache.num_available - budget.num_outstanding()
        spare = min(spare, cache.num_obtainable(slots * size))
        return max(0, min(slots, spare // size))

    def _new_beam(self, search: BeamSearch, others: list[RequestState]) -> RequestState:
        leader, taken = search.leader, {state.arrival for state in others}
        arrivals = range(leader.arrival + 1, leader.arrival + search.width)
        arrival = next(number for number in arrivals if number not in taken)
        request_id = f"#{leader.request.request_id}#{arrival - leader.arrival}"
        while request_id in self._requests:  # a name that a caller has chosen
            request_id += "#"
        request = replace(leader.request, request_id=request_id)
        state = RequestState(
            request, arrival, leader.prefix_watch, leader.queued_at, leader.session
        )
        search.join(state)
        self._requests[request_id] = state
        return state


def _fork(parent: RequestState) -> CacheSequence | None:
    """A second sequence over the tokens that `parent` computed; None when no page is free."""
    if parent.sequence is None:
        return None
    try:
        return parent.sequence.fork()
    except OutOfPages:
        return None
