"""`RequestState`: the scheduler's own record of a request, from arrival to end."""

from __future__ import annotations

from radixserve.arrays import IntArray
from radixserve.cache import CacheSequence, CacheSession, Lookup, PrefixWatch
from radixserve.int_buffer import IntBuffer
from radixserve.output import Finish, Metrics, PromptScore, RequestOutput, Usage
from radixserve.request import Request
from radixserve.schedule import SampleOutput, SampleSpec


class BeamSearch:
    """A beam search from one joint step to the next."""

    __slots__ = ("beams", "draws", "leader", "width")

    def __init__(self, leader: RequestState) -> None:
        assert leader.request.beams is not None
        self.leader = leader  # carries the times, usage and answers of the search
        self.width = leader.request.beams.width
        self.beams = [leader]  # best first
        self.draws: dict[int, SampleOutput] = {}  # of this step, by the beam's arrival


class RequestState:
    """Waiting while `sequence` is None, running otherwise."""

    __slots__ = (
        "admitted_at",
        "arrival",
        "bypass_baseline",
        "cached_on_arrival",
        "first_token_at",
        "greedy_only_spec",
        "is_in_page_table",
        "lookup",
        "num_prompt",
        "num_prompt_done",
        "num_reused",
        "num_scored",
        "order_key",
        "overtaken",
        "prefix_watch",
        "prompt_scores",
        "queued_at",
        "queued_page_need",
        "rank",
        "req_pool_idx",
        "request",
        "request_id",
        "search",
        "sequence",
        "session",
        "tokens",
        "waiters",
        "waits_for",
        "waits_until",
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
        # Preemption order: the largest rank (low priority, late arrival) is preempted first.
        self.rank = (-request.params.priority, arrival)
        self.num_prompt = len(request.token_ids)
        self.tokens = IntBuffer(request.token_ids)  # prompt and output so far
        self.prefix_watch = prefix_watch  # of `tokens`, while waiting
        self.session = session  # cache session of its sequences, while that is open
        self.sequence: CacheSequence | None = None
        self.req_pool_idx = -1  # slot in the page table while running
        self.is_in_page_table = False  # whether an earlier row wrote that slot
        self.waits_for: RequestState | None = None  # the producer of tokens it waits for
        self.waits_until = 0  # number of committed tokens of the producer that it waits for
        self.waiters: list[RequestState] = []  # requests that wait for this one, while it runs
        self.search: BeamSearch | None = None  # of which it is a beam
        self.order_key: tuple[int, ...] = ()  # set by the queue's policy
        self.queued_page_need: int | None = None  # page need as stored in WaitingQueue
        self.overtaken = 0  # admissions of later requests while it waited, up to its last entry
        self.bypass_baseline = 0  # later admissions when it was queued last
        self.lookup: Lookup | None = None  # at the first admission
        self.cached_on_arrival = prefix_watch.cached_len
        self.num_reused = 0  # prompt tokens that this request never computed
        self.num_scored = 0  # targets whose scores are known
        self.prompt_scores: list[PromptScore] = []  # those of the prompt's own tokens
        self.greedy_only_spec: SampleSpec | None = None  # of a request that needs no other one
        self.num_prompt_done = 0  # prompt tokens whose K/V was available to it
        self.queued_at = now
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def committed(self) -> int:
        return 0 if self.sequence is None else self.sequence.committed_len

    @property
    def is_decoding(self) -> bool:
        """Only its last token is still to be computed, and another one drawn."""
        sequence = self.sequence
        if sequence is None or sequence.committed_len != len(self.tokens) - 1:
            return False
        return self.request.logprob_targets is None or self.only_draws

    @property
    def is_drawing(self) -> bool:
        """A row in flight draws its next token."""
        return self.sequence is not None and self.sequence.length >= len(self.tokens)

    @property
    def ends_next(self) -> bool:
        """Its last row was handed out: what comes of it ends the request, whichever token it is."""
        request, length = self.request, len(self.tokens) + 1
        if request.logprob_targets is not None and not request.also_generate:
            return True
        return length - self.num_prompt >= request.params.max_tokens or length >= request.max_len

    def end_reason(self, token_id: int) -> str | None:
        """Why the request ends with its last token, `token_id`; None where it goes on."""
        request, length = self.request, len(self.tokens)
        if token_id in request.end_ids and self.num_output > request.params.min_tokens:
            return "stop"
        if self.num_output >= request.params.max_tokens or length >= request.max_len:
            return "length"
        return None

    @property
    def only_draws(self) -> bool:
        """Whether nothing is left to be scored before tokens are drawn."""
        targets = self.request.logprob_targets
        return targets is None or (self.request.also_generate and self.num_scored == len(targets))

    @property
    def num_reusable(self) -> int:
        """Leading tokens that may be reused from the cache: no logits are needed for them."""
        if self.request.logprob_targets is None or self.only_draws:
            return len(self.tokens) - 1
        return self.request.score_start + self.num_scored

    def wanted(self) -> IntArray:
        """[num_reusable + 1] tokens to acquire: the cache leaves the last one to be computed."""
        return self.tokens.view(0, self.num_reusable + 1)

    def admit(self, sequence: CacheSequence, lookup: Lookup, now: float) -> None:
        cached = min(sequence.cached_len, self.num_prompt)
        if self.lookup is None:
            self.lookup, self.admitted_at, self.num_reused = lookup, now, cached
        else:
            self.num_reused = min(self.num_reused, cached)
        self.num_prompt_done = max(self.num_prompt_done, cached)
        self.sequence = sequence

    def become_beam(self, search: BeamSearch) -> None:
        """Join `search`, which has computed the prompt already."""
        leader, self.search = search.leader, search
        self.num_reused = self.num_prompt_done = self.num_prompt
        self.lookup, self.admitted_at = leader.lookup, leader.admitted_at

    def note_committed(self, length: int) -> None:
        self.num_prompt_done = max(self.num_prompt_done, min(length, self.num_prompt))

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_done,
            cached_tokens=self.num_reused,
            computed_tokens=self.num_prompt_done - self.num_reused,
            completion_tokens=self.num_output,
        )

    def metrics(self, now: float) -> Metrics:
        start = self.queued_at
        return Metrics(
            queue_s=None if self.admitted_at is None else self.admitted_at - start,
            ttft_s=None if self.first_token_at is None else self.first_token_at - start,
            total_s=now - start,
        )

    def output(self, drawn: SampleOutput | None, finish: Finish | None) -> RequestOutput:
        """One step's output: the token that was drawn, if any, and the end, if it ended."""
        if drawn is None:
            return RequestOutput(self.request_id, (), (), (), finish)
        if drawn.logprob is None:
            return RequestOutput(self.request_id, (drawn.token_id,), (), (), finish)
        top = dict(drawn.top_logprobs)
        return RequestOutput(self.request_id, (drawn.token_id,), (drawn.logprob,), (top,), finish)
