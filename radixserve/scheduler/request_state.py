"""`RequestState`: the scheduler's own record of a request, from arrival to end."""

from __future__ import annotations

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, CacheSession, Lookup, PrefixWatch
from radixserve.int_buffer import IntBuffer
from radixserve.output import Finish, Metrics, PromptScore, RequestOutput, Usage
from radixserve.request import Request
from radixserve.schedule import SampleOutput, SampleSpec, new_tuple
from radixserve.structured_output import Matcher


class BeamSearch:
    """A beam search from one joint step to the next."""

    __slots__ = ("beams", "leader", "samples", "width")

    def __init__(self, leader: RequestState) -> None:
        assert leader.request.beams is not None
        self.leader = leader  # carries the times, usage and answers of the search
        self.width = leader.request.beams.width
        self.beams = [leader]  # best first
        self.samples: dict[int, SampleOutput] = {}  # of this step, by the beam's arrival


class QueueEntry:
    """What the waiting queue keeps of a request, however often it is queued."""

    __slots__ = ("bypass_baseline", "order_key", "overtaken", "page_need")

    def __init__(self) -> None:
        self.order_key: tuple[int, ...] = ()  # set by the queue's policy
        self.page_need: int | None = None  # as it is counted in the queue; None: not counted
        self.overtaken = 0  # admissions of later requests while it waited, up to its last entry
        self.bypass_baseline = 0  # later admissions when it was queued last


class TargetScores:
    """The scores of a request with `logprob_targets`."""

    __slots__ = ("num_scored", "of_prompt")

    def __init__(self) -> None:
        self.num_scored = 0  # leading targets whose scores are known
        self.of_prompt: list[PromptScore] = []  # kept for the end where it generates, too

    def note(self, sample: SampleOutput, *, keep: bool) -> None:
        self.num_scored += len(sample.scores)
        if keep:
            tops = sample.top_scores or ((),) * len(sample.scores)
            self.of_prompt += map(PromptScore, sample.scores, tops)


class Times:
    """Seconds on the scheduler's clock; None: not yet."""

    __slots__ = ("admitted", "first_token", "queued")

    def __init__(self, queued: float) -> None:
        self.queued = queued
        self.admitted: float | None = None
        self.first_token: float | None = None

    def metrics(self, now: float) -> Metrics:
        start, admitted, first_token = self.queued, self.admitted, self.first_token
        return Metrics(
            queue_s=None if admitted is None else admitted - start,
            ttft_s=None if first_token is None else first_token - start,
            total_s=now - start,
        )


class RequestState:
    """Waiting while `sequence` is None, running otherwise."""

    __slots__ = (
        "arrival",
        "awaited_len",
        "cached_on_arrival",
        "greedy_only_spec",
        "is_in_page_table",
        "length_limit",
        "lookup",
        "matcher",
        "num_prompt",
        "num_prompt_done",
        "num_reused",
        "prefix_watch",
        "priority_key",
        "producer",
        "queue_entry",
        "req_pool_idx",
        "request",
        "request_id",
        "scores",
        "search",
        "sequence",
        "session",
        "times",
        "tokens",
        "waiters",
    )

    def __init__(
        self,
        request: Request,
        arrival: int,
        prefix_watch: PrefixWatch,
        now: float,
        session: CacheSession | None = None,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.arrival = arrival  # 0, 1, 2 ...
        # Preemption order: the largest key (low priority, late arrival) is preempted first.
        self.priority_key = (-request.params.priority, arrival)
        self.num_prompt = request.num_prompt
        # Tokens, the prompt's included, at which it ends.
        self.length_limit = min(self.num_prompt + request.params.max_tokens, request.max_len)
        self.tokens = IntBuffer(request.token_ids)  # prompt and output so far
        self.prefix_watch = prefix_watch  # of `tokens`, while waiting
        self.session = session  # cache session of its sequences, while that is open
        self.sequence: CacheSequence | None = None
        self.req_pool_idx = -1  # slot in the page table while running
        self.is_in_page_table = False  # whether an earlier row wrote that slot
        self.producer: RequestState | None = None  # the producer of tokens it waits for
        self.awaited_len = 0  # number of committed tokens of the producer that it waits for
        self.waiters: list[RequestState] = []  # requests that wait for this one, while it runs
        self.search: BeamSearch | None = None  # the search of which this is a beam
        self.queue_entry = QueueEntry()
        self.lookup: Lookup | None = None  # at the first admission
        self.cached_on_arrival = prefix_watch.cached_len
        self.num_reused = 0  # prompt tokens that this request never computed
        self.scores = None if request.logprob_targets is None else TargetScores()
        self.matcher: Matcher | None = None  # of its answer, from the first sample on
        self.greedy_only_spec: SampleSpec | None = None  # of a request that needs no other one
        self.num_prompt_done = 0  # prompt tokens whose K/V was available to it
        self.times = Times(now)

    @property
    def num_output(self) -> int:
        return self.tokens.size - self.num_prompt

    @property
    def committed(self) -> int:
        return 0 if self.sequence is None else self.sequence.committed_len

    @property
    def is_decoding(self) -> bool:
        """Only its last token is still to be computed, and another one sampled."""
        sequence = self.sequence
        if sequence is None or sequence.committed_len != len(self.tokens) - 1:
            return False
        return self.is_scored

    @property
    def is_ending(self) -> bool:
        """Its last row is in flight: the output ends the request, whichever token it is."""
        num_known = self.tokens.size
        if self.sequence is None or self.sequence.length < num_known:
            return False
        if self.scores is not None and not self.request.also_generate:
            return True
        return num_known + 1 >= self.length_limit

    def append(self, token_id: int, *, is_complete: bool) -> str | None:
        """Take a sampled token; why the request ends with it, None where it goes on. is_complete:
        its grammar allows nothing after it."""
        self.tokens.append(token_id)
        if is_complete:
            return "stop"
        request = self.request
        if token_id in request.end_ids and self.num_output > request.params.min_tokens:
            return "stop"
        return "length" if self.tokens.size >= self.length_limit else None

    def append_forced(self, sample: SampleOutput) -> tuple[SampleOutput, str | None]:
        """Take a sampled token and those forced after it, up to the end; returns `sample` without
        the others, and why the request ends."""
        forced = sample.forced_ids
        reason = self.append(sample.token_id, is_complete=False)
        for at, token_id in enumerate(forced):
            if reason is not None:
                return sample._replace(forced_ids=forced[:at]), reason
            is_last = at == len(forced) - 1
            reason = self.append(token_id, is_complete=sample.is_complete and is_last)
        return sample, reason

    @property
    def is_scored(self) -> bool:
        """Whether nothing is left to be scored before tokens are sampled."""
        targets, scores = self.request.logprob_targets, self.scores
        if targets is None or scores is None:
            return True
        return self.request.also_generate and scores.num_scored == len(targets)

    @property
    def num_reusable(self) -> int:
        """Leading tokens that may be reused from the cache: no logits are needed for them."""
        if self.scores is None or self.is_scored:
            return len(self.tokens) - 1
        return self.request.score_start + self.scores.num_scored

    def match_tokens(self) -> IntArray:
        """[num_reusable + 1] tokens to acquire: the cache leaves the last one to be computed."""
        return self.tokens.view(0, self.num_reusable + 1)

    def admit(self, sequence: CacheSequence, lookup: Lookup, now: float) -> None:
        cached = min(sequence.cached_len, self.num_prompt)
        if self.lookup is None:
            self.lookup, self.times.admitted, self.num_reused = lookup, now, cached
        else:
            self.num_reused = min(self.num_reused, cached)
        self.num_prompt_done = max(self.num_prompt_done, cached)
        self.sequence = sequence

    def become_beam(self, search: BeamSearch) -> None:
        """Join `search`, which has computed the prompt already."""
        leader, self.search = search.leader, search
        self.num_reused = self.num_prompt_done = self.num_prompt
        self.lookup, self.times.admitted = leader.lookup, leader.times.admitted

    def note_committed(self, length: int) -> None:
        self.num_prompt_done = max(self.num_prompt_done, min(length, self.num_prompt))

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_done,
            cached_tokens=self.num_reused,
            computed_tokens=self.num_prompt_done - self.num_reused,
            completion_tokens=self.num_output,
        )

    def output(self, sample: SampleOutput | None, finish: Finish | None) -> RequestOutput:
        """One step's output: the token that was sampled, if any, and the end, if it ended."""
        if sample is None:
            return RequestOutput(self.request_id, (), (), (), finish)
        if sample.logprob is None:
            token_ids: tuple[int, ...] = (sample.token_id,)
            if sample.forced_ids:
                token_ids += sample.forced_ids
            return new_tuple(RequestOutput, (self.request_id, token_ids, (), (), finish, (), ()))
        top = dict(sample.top_logprobs)
        return RequestOutput(self.request_id, (sample.token_id,), (sample.logprob,), (top,), finish)
