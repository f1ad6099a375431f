"""`RequestState`: the scheduler's own record of a request, from arrival to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixserve.arrays import IntArray, IntBuffer
from radixserve.cache import CacheSequence, CacheSession, Lookup, PrefixCache, PrefixWatch
from radixserve.output import Finish, Metrics, PromptScore, RequestOutput, Usage
from radixserve.request import Request, unkeyed
from radixserve.schedule import SampleOutput, SampleSpec
from radixserve.structured_outputs import Matcher

TopLogprobs = tuple[tuple[int, float], ...]
_LOOKAHEAD = 8  # tokens for which pages are reserved when another request starts


class TargetScores:
    """The scores of a request with `logprob_targets`, of its leading targets so far."""

    __slots__ = ("logprobs", "ranks", "tops")

    def __init__(self) -> None:
        self.logprobs: list[float] = []
        self.tops: list[TopLogprobs] = []  # [] where none are asked for, and so are the ranks
        self.ranks: list[int] = []

    @property
    def num_scored(self) -> int:
        """Leading targets whose scores are known."""
        return len(self.logprobs)

    def note(self, sample: SampleOutput) -> None:
        """Append the scores of the next targets."""
        self.logprobs += sample.scores
        self.tops += [top for top in sample.top_scores if top]
        self.ranks += sample.ranks

    def num_shared(self, state: RequestState, producer: RequestState) -> int:  # noqa: ARG002
        """Leading tokens of `state`, whose scores these are, that need no logits once `producer`
        has computed them. A plug-in may share scores."""
        return 0

    def of_prompt(self) -> tuple[PromptScore, ...]:
        """The scores of a request that generates, too; () for others."""
        tops = self.tops or ((),) * len(self.ranks)
        return tuple(map(PromptScore, self.logprobs, tops, self.ranks)) if self.ranks else ()


class RequestState:
    """Waiting while `sequence` is None, running otherwise."""

    __slots__ = (
        "admitted_at",
        "admitted_before_enqueue",
        "arrival",
        "awaited_len",
        "cached_on_arrival",
        "drafts",
        "first_token_at",
        "greedy_only_spec",
        "group",
        "length_limit",
        "lookahead",
        "lookup",
        "matcher",
        "num_accepted_drafts",
        "num_drafted",
        "num_loaded",
        "num_prompt",
        "num_prompt_done",
        "num_reused",
        "order_key",
        "output_logprobs",
        "overtaken",
        "page_need",
        "prefix_watch",
        "priority_key",
        "producer",
        "queued_at",
        "request",
        "request_id",
        "scores",
        "sequence",
        "session",
        "session_arrival",
        "share",
        "slot",
        "token_mark",
        "tokens",
        "waiters",
        "weight_epochs",
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
        self.tokens = IntBuffer(request.keyed_tokens())  # prompt and output so far, as the cache
        # has them
        self.token_mark = 0 if request.adapter is None else request.adapter.token_mark  # of output
        self.prefix_watch = prefix_watch  # of `tokens`, while waiting
        self.session_arrival = arrival  # of the first request of its session, as far as known
        self.session = session  # cache session of its sequences, while that is open
        self.sequence: CacheSequence | None = None
        self.slot = -1  # slot in the page table while running
        self.producer: RequestState | None = None  # the producer of tokens it waits for
        self.awaited_len = 0  # number of committed tokens of the producer that it waits for
        self.waiters: list[RequestState] = []  # requests that wait for this one, while it runs
        self.group: Any = None  # the `RequestGroup` that takes its samples
        self.drafts: Any = None  # what the `Drafter` keeps of it
        self.num_drafted = self.num_accepted_drafts = 0  # computed; right ones
        self.share: Any = None  # of `Shares`: priorities count among requests with the same one
        self.lookahead = _LOOKAHEAD
        self.lookup: Lookup | None = None  # at the first admission
        self.cached_on_arrival = prefix_watch.cached_len
        self.num_loaded = 0  # prompt tokens that were loaded for it while it was held back
        self.num_reused = 0  # prompt tokens that this request never computed
        self.scores = None if request.logprob_targets is None else TargetScores()
        self.weight_epochs: tuple[Any, ...] = ()  # `WeightEpoch`s, where weights change
        self.output_logprobs: list[float] = []  # of its sampled tokens, if it reports them
        self.matcher: Matcher | None = None  # of its answer, from the first sample on
        self.greedy_only_spec: SampleSpec | None = None  # of a request that needs no other one
        self.num_prompt_done = 0  # prompt tokens whose K/V was available to it
        # Seconds on the scheduler's clock; None: not yet.
        self.queued_at = now
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        # Of the waiting queue, however often the request is queued.
        self.order_key: tuple[int, ...] = ()  # set by the queue's policy
        self.page_need: int | None = None  # as it is counted in the queue; None: not counted
        self.overtaken = 0  # admissions of later requests while it waited, up to its last entry
        self.admitted_before_enqueue = 0  # admissions of later requests when it was queued last

    @property
    def num_output(self) -> int:
        return self.tokens.size - self.num_prompt

    @property
    def committed(self) -> int:
        return 0 if self.sequence is None else self.sequence.committed_len

    @property
    def is_decoding(self) -> bool:
        """Whether only its last token is still to be computed, and another one to be sampled."""
        sequence = self.sequence
        if sequence is None or sequence.committed_len != self.tokens.size - 1:
            return False
        return self.scores is None or self.is_scored

    @property
    def is_ending(self) -> bool:
        """Whether its last row is in flight: any sampled token ends the request."""
        num_known = self.tokens.size
        if self.sequence is None or self.sequence.length < num_known:
            return False
        if self.scores is not None and not self.request.also_generate:
            return True
        return num_known + 1 >= self.length_limit

    def append(self, token_id: int, *, is_complete: bool) -> str | None:
        """Append a sampled token. Returns the finish reason, None when the request continues.

        is_complete: the request's grammar allows no token after this one.
        """
        self.tokens.append(token_id + self.token_mark)
        if is_complete:
            return "stop"
        request = self.request
        if token_id in request.end_ids and self.num_output > request.params.min_tokens:
            return "stop"
        return "length" if self.tokens.size >= self.length_limit else None

    def append_several(self, sample: SampleOutput) -> str | None:
        """Append the samples of a row with drafts, of which only the last one may end the request.
        Returns the finish reason."""
        for each in (sample, *sample.more[:-1]):
            reason = self.append(each.token_id, is_complete=each.is_complete)
            assert reason is None, "a draft would have ended the request"
        last = sample.more[-1]
        return self.append(last.token_id, is_complete=last.is_complete)

    def must_follow(self, drafts: Sequence[int]) -> bool:
        """Whether only these tokens can be sampled next, and their logits decide nothing."""
        params = self.request.params
        if self.matcher is None or params.logprobs is not None or params.may_forbid_tokens:
            return False
        return self.matcher.must_follow(drafts)

    @property
    def is_scored(self) -> bool:
        """Whether all targets have been scored, so that tokens may be sampled."""
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

    def chunk_len(self, start: int, room: int) -> int:
        """How many tokens from `start` on a step computes that has room for so many, at least 1:
        fewer, or more, where it would end inside a part that is not to be cut."""
        for first, end in self.request.uncut:
            if first < start + room < end:
                return (first if first > start else end) - start
        return room

    def match_tokens(self) -> IntArray:
        """[num_reusable + 1] tokens to acquire: the cache leaves the last one to be computed."""
        return self.tokens.view(0, self.num_reusable + 1)

    def watch_prefix(self, cache: PrefixCache) -> None:
        """Watch the cached part of `match_tokens`, while it waits. The watch that it had is not
        closed: members of a group share that of the first."""
        self.prefix_watch = cache.watch(self.match_tokens(), self.request.namespace)

    def admit(self, sequence: CacheSequence, lookup: Lookup, now: float) -> None:
        cached = min(sequence.cached_len, self.num_prompt)
        if self.lookup is None:
            self.lookup, self.admitted_at, self.num_reused = unkeyed(lookup), now, cached
        else:
            self.num_reused = min(self.num_reused, cached)
        self.num_prompt_done = max(self.num_prompt_done, cached)
        self.sequence = sequence

    def note_committed(self, length: int) -> None:
        self.num_prompt_done = max(self.num_prompt_done, min(length, self.num_prompt))

    def metrics(self, now: float) -> Metrics:
        start, admitted, first_token = self.queued_at, self.admitted_at, self.first_token_at
        return Metrics(
            queue_s=None if admitted is None else admitted - start,
            ttft_s=None if first_token is None else first_token - start,
            total_s=now - start,
        )

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_done,
            cached_tokens=self.num_reused,
            computed_tokens=self.num_prompt_done - self.num_reused,
            completion_tokens=self.num_output,
            missing_state_tokens=self._missing_state_tokens(),
            loaded_tokens=min(self.num_loaded, self.num_reused),
            drafted_tokens=self.num_drafted,
            accepted_draft_tokens=self.num_accepted_drafts,
        )

    def _missing_state_tokens(self) -> int:
        computed, lookup = self.num_prompt_done - self.num_reused, self.lookup
        return 0 if lookup is None else min(lookup.missing_state_tokens, computed)

    def output(self, sample: SampleOutput | None, finish: Finish | None) -> RequestOutput:
        """One step's output: the sampled token, if any, and `finish` at the end."""
        if sample is None:
            return RequestOutput(self.request_id, (), (), (), finish)
        token_ids: tuple[int, ...] = (sample.token_id,)
        if sample.more:
            token_ids += tuple([each.token_id for each in sample.more])
        if sample.logprob is None:
            return RequestOutput(
                self.request_id, token_ids, (), (), finish, cached_tokens=self.num_reused
            )
        samples = (sample, *sample.more)
        logprobs = tuple([each.logprob for each in samples if each.logprob is not None])
        self.output_logprobs += logprobs
        return RequestOutput(
            self.request_id,
            token_ids,
            logprobs,
            tuple([dict(each.top_logprobs) for each in samples]),
            finish,
            cached_tokens=self.num_reused,
        )
