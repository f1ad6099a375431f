"""Random programs of requests, branches and searches, and what each of their answers has to be: to
the bit the answer that the same request has alone and without a cache."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from radixserve import Completion, Runtime, SamplingParams, generate_all

SETTINGS: list[dict[str, Any]] = [
    {},
    {"page_size": 16, "chunked_prefill_size": 37},
    {"page_size": 5, "chunked_prefill_size": 16, "max_running_requests": 5},
    {"num_pages": 330, "chunked_prefill_size": 64},  # of which requests are preempted
    {"cache": "hash", "chunked_prefill_size": 50},
    {"cascade_attention": False, "chunked_prefill_size": 33},
]
LONGEST_PROMPT = 230
Ask = Callable[[Runtime], Any]
Agree = Callable[[Any, Any], bool]  # of an answer's values and the expected ones


@dataclass(frozen=True)
class Answer:
    """What a runtime answered, and how another one is asked the same."""

    what: str
    values: Any
    ask: Ask  # returns what `values` should be
    output: tuple[list[int], list[int]] | None = None  # prompt and answer, where it is one


@dataclass
class Program:
    """Random calls of one runtime, and their answers."""

    runtime: Runtime
    random: random.Random
    vocab_size: int
    regex: str | None  # of structured answers, where model and system can give them
    longest: int = LONGEST_PROMPT  # tokens of a prompt
    most_tokens: int = 12  # of an answer
    prompts: list[list[int]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    @classmethod
    def of(cls, runtime: Runtime, drawn: random.Random, longest: int = LONGEST_PROMPT) -> Program:
        is_able = runtime.tokenizer is not None and find_spec("llguidance") is not None
        regex = "[a-z ]{3,20}" if is_able else None
        longest = min(longest, runtime.model.max_positions - 60)  # forks and answers need room
        return cls(runtime, drawn, runtime.model.vocab_size, regex, longest)

    def differences(self, alone: Runtime | None, agree: Agree = operator.eq) -> Iterator[str]:
        """Of each answer that does not agree with the one of `alone`: which. alone None: the
        program's own runtime, emptied before each request."""
        assert self.answers
        for number, answer in enumerate(self.answers):
            if alone is None:
                self.runtime.flush_cache()
            expected = answer.ask(self.runtime if alone is None else alone)
            if not agree(answer.values, expected):
                yield f"answer {number}: {answer.what}: {answer.values} is not {expected}"

    def run(self, num_calls: int) -> None:
        kinds = [
            *(self.batch, self.batch, self.samples, self.branches, self.beams, self.scores),
            self.cancels,
        ]
        for _ in range(num_calls):
            self.random.choice(kinds)()

    def batch(self) -> None:
        prompts = [self.prompt() for _ in range(self.random.randint(1, 9))]
        params = [self.params() for _ in prompts]
        completions = self.runtime.generate(prompts, params)
        for prompt, own, completion in zip(prompts, params, completions, strict=True):
            self.note(prompt, own, completion)

    def cancels(self) -> None:
        """A batch beside another one that is left after a few tokens."""
        prompts = [self.prompt() for _ in range(self.random.randint(1, 4))]
        params = [self.params() for _ in prompts]
        left = [self.prompt() for _ in range(self.random.randint(1, 4))]
        long = SamplingParams(max_tokens=24, seed=0, ignore_eos=True)
        with ExitStack() as stack:
            chunks = stack.enter_context(self.runtime.submit(left, long, streams=True))
            kept = stack.enter_context(self.runtime.submit(prompts, params))
            for _ in range(self.random.randint(1, 5)):
                next(chunks)
            chunks.__exit__(None, None, None)
            for _ in kept:
                pass
            completions = kept.result()
        for prompt, own, completion in zip(prompts, params, completions, strict=True):
            self.note(prompt, own, completion)

    def samples(self) -> None:
        """As many requests of seeds of their own."""
        prompt, params = self.prompt(), replace(self.params(), temperature=0.9)
        completions = self.runtime.generate(prompt, replace(params, n=self.random.randint(2, 7)))
        assert params.seed is not None
        for number, completion in enumerate(completions):
            own = replace(params, seed=params.seed + number)
            if number == 0 or own.prompt_logprobs is None:
                self.note(prompt, own, completion)

    def branches(self) -> None:
        """Forks of an answer, some of it taken back, that go on together."""
        with self.runtime.branch(self.prompt()) as branch:
            self._generate([branch])
            branch.truncate(branch.length - self.random.randint(0, min(9, branch.length - 1)))
            forks = branch.fork(self.random.randint(1, 4))
            for fork in forks:
                if self.random.random() < 0.5:
                    fork.extend(self.tokens(self.random.randint(1, 20)))
            self._generate([*forks, branch])
            for fork in forks:
                fork.release()

    def beams(self) -> None:
        """Searches at once; alone each is one search."""
        prompts = [self.prompt() for _ in range(self.random.randint(1, 3))]
        width, max_tokens = self.random.randint(2, 4), self.random.randint(1, 8)
        for prompt, completions in zip(
            prompts, self.runtime.beam_search(prompts, width, max_tokens), strict=True
        ):
            self.answers.append(
                Answer(
                    f"{width} beams after {len(prompt)} tokens",
                    _beams(completions),
                    lambda alone, prompt=prompt: _beams(
                        alone.beam_search(prompt, width, max_tokens)
                    ),
                )
            )

    def scores(self) -> None:
        """Candidates that are scored together; alone each of them by itself."""
        prompt = self.prompt()
        candidates = [self.tokens(self.random.randint(1, 6)) for _ in range(3)]
        for candidate, score in zip(
            candidates, self.runtime.score(prompt, candidates), strict=True
        ):
            self.answers.append(
                Answer(
                    f"the score of {len(candidate)} tokens after {len(prompt)}",
                    score.logprobs,
                    lambda alone, candidate=candidate: alone.score(prompt, [candidate])[0].logprobs,
                )
            )

    def note(self, prompt: Sequence[int], params: SamplingParams, completion: Completion) -> None:
        ids = list(prompt)
        self.answers.append(
            Answer(
                f"{len(ids)} tokens, {params}",
                _values(completion),
                lambda alone: _values(alone.generate(ids, params)),
                (ids, completion.token_ids),
            )
        )

    def _generate(self, branches: list[Any]) -> None:
        prompts = [branch.tokens.tolist() for branch in branches]
        params = [replace(self.params(), prompt_logprobs=None) for _ in branches]
        completions = generate_all(branches, params)
        for prompt, own, completion in zip(prompts, params, completions, strict=True):
            self.note(prompt, own, completion)

    def prompt(self) -> list[int]:
        """New tokens, most often after a part of a prompt that was there before."""
        known = self.random.choice(self.prompts) if self.prompts else []
        begun = known[: self.random.randint(0, len(known))] if self.random.random() < 0.8 else []
        begun = begun[: self.longest - 1]
        most = min(self.longest - len(begun), self.random.choice([3, 40, 200]))
        prompt = begun + self.tokens(self.random.randint(1, most))
        self.prompts.append(prompt)
        return prompt

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(3, min(250, self.vocab_size)) for _ in range(count)]

    def params(self) -> SamplingParams:
        more: dict[str, Any] = self.random.choice(
            [
                {},
                {},
                {"prompt_logprobs": 0},
                {"repetition_penalty": 1.2},
                {"logprobs": 2},
                {"top_p": 0.7, "min_p": 0.01},
                {"top_k": 5, "frequency_penalty": 0.5},
            ]
        )
        if self.regex is not None and self.random.random() < 0.2:
            more = {"structured": {"regex": self.regex}}
        return SamplingParams(
            max_tokens=self.random.randint(1, self.most_tokens),
            temperature=self.random.choice([0.0, 0.8]),
            seed=self.random.randrange(1000),
            ignore_eos=True,
            digest=True,
            **more,
        )


def _values(completion: Completion) -> tuple[Any, ...]:
    assert completion.digest is not None
    names = ("digest", "token_ids", "logprobs", "prompt_logprobs")
    return tuple(getattr(completion, name) for name in names)


def _beams(completions: Sequence[Completion]) -> list[tuple[Any, ...]]:
    return [(beam.token_ids, beam.score, beam.cumulative_logprob) for beam in completions]


def agree_nearly(values: Any, expected: Any) -> bool:
    """Whether numbers are those expected up to rounding, and all else is; digests are not read."""
    if isinstance(expected, float):
        return bool(abs(values - expected) < 1e-3)
    if isinstance(expected, (list, tuple)):
        is_whole = len(values) == len(expected)
        return is_whole and all(map(agree_nearly, values, expected))
    return isinstance(expected, str) or bool(values == expected)


def differences(
    model: str,
    seed: int,
    num_calls: int,
    alone: Runtime,
    agree: Agree = operator.eq,
    **settings: Any,
) -> Iterator[str]:
    """Of each answer of a random program that does not agree with the one of `alone`: which."""
    with Runtime(model, **settings) as runtime:
        yield from differences_of(runtime, seed, num_calls, alone, agree=agree)


def differences_of(
    runtime: Runtime,
    seed: int,
    num_calls: int,
    alone: Runtime | None,
    longest: int = LONGEST_PROMPT,
    agree: Agree = operator.eq,
) -> Iterator[str]:
    """`differences` of a program that `runtime` runs; alone None: `runtime` itself, emptied."""
    program = Program.of(runtime, random.Random(seed), longest)
    program.run(num_calls)
    runtime.check()
    yield from program.differences(alone, agree)
