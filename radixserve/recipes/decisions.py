"""`DecisionBatch`: finds the likeliest of the given answers, for many questions about one input.

Nothing is generated. All questions continue the same input, so a batch computes the input once. The
first tokens of a question's answers are read from one row of logits.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from radixserve.api.client import EngineClient
from radixserve.arrays import IntArray
from radixserve.checks import check_text, shown
from radixserve.completion import Completion
from radixserve.decisions import Decision, Question
from radixserve.errors import InvalidRequest, PromptTooLong
from radixserve.output import add_usages
from radixserve.request import Request, SamplingParams
from radixserve.text.decision_prompts import DecisionPrompts

MAX_QUESTIONS = 400
_TOKENS_AT_ONCE = 1 << 22  # of the prompts of all requests that wait for the engine


@dataclass(frozen=True, slots=True)
class _Plan:
    """The requests of one question: first that of its answers' first tokens, then one for each
    answer of several tokens."""

    client: EngineClient
    question: Question
    head: list[int]  # the input's tokens, which all questions share
    tail: list[int]  # the question's
    answers: list[IntArray]
    namespace: str

    @property
    def length(self) -> int:
        """Tokens of the longest request."""
        return len(self.head) + len(self.tail) + max(map(len, self.answers))

    @property
    def num_requests(self) -> int:
        return 1 + sum(len(answer) > 1 for answer in self.answers)

    def requests(self) -> Iterator[Request]:
        """Yields the requests of the question, made one by one since each has the tokens of its
        whole prompt."""
        client, namespace = self.client, self.namespace
        ids = client.reader.read(self.head + self.tail)
        firsts = tuple(dict.fromkeys(int(answer[0]) for answer in self.answers))
        params = SamplingParams(
            max_tokens=1, temperature=0.0, logprob_token_ids=firsts, namespace=namespace
        )
        yield client.builder.request(ids, params)
        scored = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, namespace=namespace)
        for answer in self.answers:
            if len(answer) > 1:
                request = client.builder.request(ids, scored)
                tokens = np.concatenate([ids, answer[:-1]])
                yield replace(request, token_ids=tokens, logprob_targets=answer[1:])

    def decision(self, completions: Sequence[Completion]) -> Decision:
        tops = completions[0].top_logprobs
        assert tops is not None
        rest = iter(completions[1:])
        logprobs = []
        for ids in self.answers:
            logprob = tops[0][int(ids[0])]
            if len(ids) > 1:
                more = next(rest).cumulative_logprob
                assert more is not None
                logprob += more
            logprobs.append(logprob)
        return Decision(
            self.question,
            tuple(option.value for option in self.question.options),
            tuple(logprobs),
            _normalised(logprobs),
            add_usages([completion.usage for completion in completions]).with_answer(0),
        )


class DecisionBatch:
    """Checked questions about one input, as requests."""

    def __init__(
        self,
        client: EngineClient,
        given: object,
        questions: object,
        namespace: str = "",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises InvalidRequest."""
        asked = _read_questions(questions)
        namespace = check_text("namespace", namespace)
        prompts = DecisionPrompts.read(
            client.tokenizer, given, asked, template_kwargs, client.reader.check_length
        )
        self._client = client
        self.plans = [
            _plan(client, question, prompts.head, tail, answers, namespace)
            for question, tail, answers in zip(asked, prompts.tails, prompts.answers, strict=True)
        ]
        self.num_requests = sum(plan.num_requests for plan in self.plans)
        self.num_tokens = len(prompts.head) + sum(map(len, prompts.tails))  # the input once

    @classmethod
    def joined(cls, batches: Sequence[DecisionBatch]) -> DecisionBatch:
        """Returns the questions of several batches as one."""
        joined = copy(batches[0])
        joined.plans = [plan for batch in batches for plan in batch.plans]
        joined.num_requests = sum(batch.num_requests for batch in batches)
        joined.num_tokens = sum(batch.num_tokens for batch in batches)
        return joined

    def run(self) -> list[Decision]:
        """Returns the decisions, in the questions' order. All requests run as one batch."""
        decisions: list[Decision] = []
        self._decide(self._client.submit(list(self._requests())).get(), decisions)
        return decisions

    async def arun(
        self, max_in_flight: int | None = None, admit: Callable[[], object] = lambda: None
    ) -> list[Decision]:
        """`run` for asyncio. `max_in_flight`: most requests in the engine at a time; fewer if their
        prompts are long. `admit`: called when the first ones are about to be submitted; what it
        raises ends the call."""
        longest = max(plan.length for plan in self.plans)
        size = max(1, min(max_in_flight or self.num_requests, _TOKENS_AT_ONCE // longest))
        requests = self._requests()
        decisions: list[Decision] = []
        completions: list[Completion] = []  # of questions without a decision yet
        while window := await asyncio.to_thread(lambda: list(itertools.islice(requests, size))):
            if not completions and not decisions:
                admit()
            completions += await self._client.submit(window).aget()
            self._decide(completions, decisions)
        return decisions

    def _requests(self) -> Iterator[Request]:
        for plan in self.plans:
            yield from plan.requests()

    def _decide(self, completions: list[Completion], decisions: list[Decision]) -> None:
        """Turn the completions of each complete question into a decision, and remove them."""
        if any(completion.finish_reason == "abort" for completion in completions):
            raise InvalidRequest("the decisions were aborted")
        first = 0
        for plan in self.plans[len(decisions) :]:
            end = first + plan.num_requests
            if end > len(completions):
                break
            decisions.append(plan.decision(completions[first:end]))
            first = end
        del completions[:first]


def _read_questions(given: object) -> list[Question]:
    if isinstance(given, str | Question):
        given = [given]
    if not isinstance(given, Sequence) or not 1 <= len(given) <= MAX_QUESTIONS:
        size = f"{len(given)} of them" if isinstance(given, Sequence) else shown(given)
        raise InvalidRequest(f"questions must be 1 to {MAX_QUESTIONS} questions, got {size}")
    questions = [Question(item) if isinstance(item, str) else item for item in given]
    for item in questions:
        if not isinstance(item, Question):
            raise InvalidRequest(f"questions must be texts or Questions, got {shown(item)}")
    return questions


def _plan(
    client: EngineClient,
    question: Question,
    head: list[int],
    tail: list[int],
    answers: list[IntArray],
    namespace: str,
) -> _Plan:
    end_ids = client.builder.end_ids
    if _has_prefix(answers) and end_ids:  # without it the shorter answer is always likelier
        end = np.array([min(client.tokenizer.end_ids & end_ids or end_ids)], np.int32)
        answers = [np.concatenate([ids, end]) for ids in answers]
    plan = _Plan(client, question, head, tail, answers, namespace)
    limit = client.reader.max_seq_len
    if plan.length > limit:
        raise PromptTooLong(
            f"the input, a question and an answer have {plan.length} tokens; at most "
            f"{limit} are allowed ({client.reader.limit_name})",
            num_tokens=plan.length,
            max_tokens=limit - 1,
        )
    return plan


def _has_prefix(answers: Sequence[IntArray]) -> bool:
    """Whether one of the answers is a prefix of another. In sorted order an answer directly follows
    its prefix. O(tokens * log answers)."""
    ordered = sorted({tuple(answer.tolist()) for answer in answers})
    return any(longer[: len(ids)] == ids for ids, longer in itertools.pairwise(ordered))


def _normalised(logprobs: Sequence[float]) -> tuple[float, ...]:
    best = max(logprobs)
    if best == -math.inf:
        return (1 / len(logprobs),) * len(logprobs)
    weights = [math.exp(logprob - best) for logprob in logprobs]
    total = math.fsum(weights)
    return tuple(weight / total for weight in weights)
