"""The work of `radixserve demo`, timed: the same requests with the cache on and off."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from radixserve.commands.demo_text import CONVERSATIONS, SYSTEM_PROMPT, UNRELATED
from radixserve.errors import InvalidRequest
from radixserve.request import SamplingParams

if TYPE_CHECKING:
    from radixserve.api.runtime import Runtime
    from radixserve.output import Completion

Messages = list[dict[str, str]]
_NUM_HELD = 2  # requests that run while the tree is looked at


@dataclass(frozen=True, slots=True)
class Answer:
    """A question of the demo and what came back."""

    question: str
    completion: Completion

    @property
    def verdict(self) -> str:
        """HIT: at least half of the prompt was reused; PARTIAL: less; MISS: nothing."""
        usage = self.completion.usage
        if not usage.cached_tokens:
            return "MISS"
        return "HIT" if 2 * usage.cached_tokens >= usage.prompt_tokens else "PARTIAL"

    @property
    def adds_up(self) -> bool:
        usage = self.completion.usage
        return usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over some answers."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    mean_ttft_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Part:
    """Requests that belong together, with the wall time they took."""

    title: str
    answers: tuple[Answer, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Performance:
    """One run of the whole demo on one Runtime."""

    parts: tuple[Part, ...]
    tree: dict[str, Any]

    @property
    def answers(self) -> list[Answer]:
        return [answer for part in self.parts for answer in part.answers]


class Listener:
    """Is told of each part before it starts and of its answers as they come. Ignores both."""

    def begin(self, title: str) -> None:
        pass

    def answer(self, answer: Answer) -> None:
        pass


def totals(parts: Sequence[Part]) -> Totals:
    answers = [answer for part in parts for answer in part.answers]
    usages = [answer.completion.usage for answer in answers]
    waits = [answer.completion.metrics.ttft_s for answer in answers]
    return Totals(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        computed_tokens=sum(usage.computed_tokens for usage in usages),
        mean_ttft_s=fmean(wait for wait in waits if wait is not None),
        seconds=sum(part.seconds for part in parts),
    )


def count_same(cached: Performance, plain: Performance) -> int:
    """How many answers are the same, token for token."""
    pairs = zip(cached.answers, plain.answers, strict=True)
    return sum(a.completion.token_ids == b.completion.token_ids for a, b in pairs)


def perform(
    runtime: Runtime, params: SamplingParams, max_nodes: int, listener: Listener
) -> Performance:
    """First turns and second turns one after another, a look at the tree, then all at once."""
    if runtime.tokenizer is None:
        raise InvalidRequest("the demo needs a model with a tokenizer and a chat template")
    runtime.generate(UNRELATED, replace(params, max_tokens=2, min_tokens=0), progress=False)
    runtime.flush_cache()
    openings = [_chat([], first) for first, _ in CONVERSATIONS]
    questions = [first for first, _ in CONVERSATIONS]
    title = "First questions, one after another"
    first_turn = _one_by_one(runtime, title, questions, openings, params, listener)
    replies = [answer.completion.text for answer in first_turn.answers]
    followups = [second for _, second in CONVERSATIONS]
    histories = [
        _chat([*opening, {"role": "assistant", "content": reply}], followup)
        for opening, reply, followup in zip(openings, replies, followups, strict=True)
    ]
    title = "Second turn of each conversation, one after another"
    second_turn = _one_by_one(runtime, title, followups, histories, params, listener)
    tree = _look(runtime, histories[:_NUM_HELD], params, max_nodes)
    runtime.flush_cache()
    at_once = _at_once(runtime, questions, openings, params, listener)
    return Performance((first_turn, second_turn, at_once), tree)


def _chat(history: Messages, question: str) -> Messages:
    start = history or [{"role": "system", "content": SYSTEM_PROMPT}]
    return [*start, {"role": "user", "content": question}]


def _one_by_one(
    runtime: Runtime,
    title: str,
    questions: Sequence[str],
    prompts: Sequence[Messages],
    params: SamplingParams,
    listener: Listener,
) -> Part:
    return _timed(
        title,
        listener,
        (
            lambda q=question, p=prompt: [Answer(q, runtime.generate(p, params))]
            for question, prompt in zip(questions, prompts, strict=True)
        ),
    )


def _at_once(
    runtime: Runtime,
    questions: Sequence[str],
    prompts: Sequence[Messages],
    params: SamplingParams,
    listener: Listener,
) -> Part:
    def run() -> list[Answer]:
        completions = runtime.generate(list(prompts), params, progress=False)
        return [Answer(*pair) for pair in zip(questions, completions, strict=True)]

    title = "The first questions again, all at once, into an emptied cache"
    return _timed(title, listener, [run])


def _timed(title: str, listener: Listener, steps: Any) -> Part:
    """Run the steps, timing them but not the listener."""
    listener.begin(title)
    answers: list[Answer] = []
    seconds = 0.0
    for step in steps:
        start = time.perf_counter()
        new: list[Answer] = step()
        seconds += time.perf_counter() - start
        for answer in new:
            answers.append(answer)
            listener.answer(answer)
    return Part(title, tuple(answers), seconds)


def _look(
    runtime: Runtime, prompts: Sequence[Messages], params: SamplingParams, max_nodes: int
) -> dict[str, Any]:
    """The tree while some requests run, so that it shows what they hold."""
    long = replace(params, max_tokens=1024, ignore_eos=True)
    with ExitStack() as stack:
        for prompt in prompts:
            stream: Any = runtime.stream(prompt, long)
            next(stack.enter_context(closing(stream)))
        return runtime.cache_tree(max_nodes)
