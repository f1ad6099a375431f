"""Tokens a second with drafts beside those without, by what an answer repeats.

    python benchmarks/bench_drafts.py [--model smollm2] [--weight-dtype int8] [--rounds 5]
        [--tokens 200] [--clock cpu] [--kinds again,edit,...]

Two runtimes of one process take turns: one drafts, one does not. In each round both answer the same
requests, whose answers are compared.

again       the same questions as before, whose answers the cache has
edit        a text of 300 tokens with few changes, beside the text as `prediction`; the answer's
            tokens are given, since a small model does not follow the request
edit, own   the same without `prediction`: the text is in the prompt
new         answers that repeat nothing, sampled at temperature 1, one at a time
new x 32    the same, 32 at once

--clock cpu counts the seconds of all threads, for a busy machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from harness.arguments import Names, parse
from harness.report import print_table

from radixserve import Completion, Runtime, SamplingParams

TOPICS = ("lists", "the json module", "sorting", "files", "classes", "threads", "tests", "numbers")
EDITED_TOKENS, CHANGED_EVERY = 300, 60
NUM_AT_ONCE = 32
Ask = Callable[[Runtime, int], list[Completion]]  # a runtime and the number of the round


class Script:
    """A function for logits_processors that gives the answer's tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids

    def __call__(self, ids: Sequence[int], logits: Any) -> Any:
        logits[self._token_ids[len(ids)]] = 1e9
        return logits


def again(num_tokens: int) -> Ask:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)

    def ask(runtime: Runtime, _: int) -> list[Completion]:
        return [runtime.generate(f"A short text about {topic}:", params) for topic in TOPICS[:4]]

    return ask


def edit(vocab_size: int, *, is_predicted: bool) -> Ask:
    def ask(runtime: Runtime, number: int) -> list[Completion]:
        drawn = random.Random(number)
        text = [drawn.randrange(100, vocab_size) for _ in range(EDITED_TOKENS)]
        edited = list(text)
        for place in range(CHANGED_EVERY // 2, EDITED_TOKENS, CHANGED_EVERY):
            edited[place : place + 2] = [drawn.randrange(100, vocab_size) for _ in range(3)]
        params = SamplingParams(
            max_tokens=len(edited),
            temperature=0.0,
            ignore_eos=True,
            logits_processors=[Script(edited)],
            prediction=text if is_predicted else None,
        )
        (completion,) = runtime.generate([[1, 2, 3, *text, 4, 5, 6]], params)
        assert completion.token_ids == edited
        return [completion]

    return ask


def new(num_tokens: int, num_at_once: int) -> Ask:
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, ignore_eos=True)

    def ask(runtime: Runtime, number: int) -> list[Completion]:
        prompts = [
            f"{number}.{index}: a short text about {TOPICS[index % len(TOPICS)]}:"
            for index in range(max(4, num_at_once))
        ]
        each = [replace(params, seed=number * 100 + index) for index in range(len(prompts))]
        if num_at_once > 1:
            return runtime.generate(prompts, each)
        return [runtime.generate(*pair) for pair in zip(prompts, each, strict=True)]

    return ask


def tokens_per_second(
    runtime: Runtime, ask: Ask, number: int, clock: Callable[[], float]
) -> tuple[float, list[list[int]]]:
    began = clock()
    completions = ask(runtime, number)
    seconds = clock() - began
    answers = [completion.token_ids for completion in completions]
    return sum(map(len, answers)) / seconds, answers


def main() -> None:
    names = "again", "edit", "edit, own", "new", "new x 32"
    arguments = parse(
        __doc__, model="smollm2", weight_dtype="auto", dtype="auto", rounds=5, tokens=200,
        clock=("wall", "cpu"), kinds=Names("kinds of answers", names), json=False,
    )  # fmt: skip
    clock = time.process_time if arguments.clock == "cpu" else time.perf_counter
    settings = {"weight_dtype": arguments.weight_dtype, "dtype": arguments.dtype}
    with (
        Runtime(arguments.model, **settings, max_draft_tokens=0) as plain,
        Runtime(arguments.model, **settings, max_draft_tokens=32) as drafting,
    ):
        made: dict[str, Ask] = {
            "again": again(arguments.tokens),
            "edit": edit(plain.model.vocab_size, is_predicted=True),
            "edit, own": edit(plain.model.vocab_size, is_predicted=False),
            "new": new(arguments.tokens, 1),
            "new x 32": new(arguments.tokens // 4, NUM_AT_ONCE),
        }
        rows = [
            [name, *measure(plain, drafting, made[name], arguments.rounds, clock)]
            for name in arguments.kinds
        ]
    print_table(arguments, ["answers", "without, tokens/s", "with", "ratio", "steps saved"], rows)


def measure(
    plain: Runtime, drafting: Runtime, ask: Ask, rounds: int, clock: Callable[[], float]
) -> list[str]:
    """The medians of all rounds, and the median ratio of a round."""
    rates: dict[Runtime, list[float]] = {plain: [], drafting: []}
    for runtime in (plain, drafting):
        ask(runtime, 0)
    saved = drafting.cache_stats()["accepted_draft_tokens"]
    num_tokens = 0
    for number in range(1, rounds + 1):
        answers = []
        for runtime in (plain, drafting) if number % 2 else (drafting, plain):
            rate, tokens = tokens_per_second(runtime, ask, number, clock)
            rates[runtime].append(rate)
            answers.append(tokens)
        assert answers[0] == answers[1], "drafts have changed an answer"
        num_tokens += sum(map(len, answers[0]))
    saved = drafting.cache_stats()["accepted_draft_tokens"] - saved
    ratios = [b / a for a, b in zip(rates[plain], rates[drafting], strict=True)]
    without, with_drafts = median(rates[plain]), median(rates[drafting])
    return [
        f"{without:.1f}", f"{with_drafts:.1f}", f"{median(ratios):.3f}",
        f"{saved / num_tokens:.0%}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
