"""Tokens a second with drafts beside those without, by what an answer repeats.

    python benchmarks/bench_drafts.py [--model smollm2|small] [--weight-dtype int8] [--rounds 5]
        [--tokens 200] [--clock cpu] [--kinds again,edit,...] [--llama DIR] [--lookup ngram-mod]

Two runtimes of one process take turns: one drafts, one does not. In each round both answer the same
requests, whose answers are compared. small: a bfloat16 model with random weights.

again       the same questions as before, whose answers the cache has
edit        a text of 300 tokens with few changes, beside the text as `prediction`; the answer's
            tokens are given, since a small model does not follow the request
edit-own    the same without `prediction`: the text is in the prompt
copy        a text of about 300 tokens that the prompt has and begins again: a model copies most of
            it on its own
new         answers that repeat nothing, sampled at temperature 1, one at a time
new-8       the same, 8 at once
new-32      the same, 32 at once

DIR holds llama-server. It answers the greedy ones, `again` and `copy`, in the same rounds, once
without and once with its lookup decoding of the kind --lookup. --clock cpu counts the seconds of
all threads, for a busy machine.
"""

from __future__ import annotations

import inspect
import random
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from engine.llama import LlamaServer
from harness.arguments import Names, parse
from harness.machine import cpu_s
from harness.report import Cell, print_table
from harness.shapes import SHAPES, save_checkpoint

from radixserve import Completion, Runtime, SamplingParams
from radixserve.models.source import find_model

TOPICS = ("lists", "the json module", "sorting", "files", "classes", "threads", "tests", "numbers")
EDITED_TOKENS, CHANGED_EVERY = 300, 60
COPIED_CHARACTERS, COPIED_TOKENS = 1_100, 250
GREEDY = ("again", "copy")
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
        drawn = random.Random(f"{number} {is_predicted}")
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


def copy() -> Ask:
    params = SamplingParams(max_tokens=COPIED_TOKENS, temperature=0.0, ignore_eos=True)
    library = inspect.getsource(textwrap)

    def ask(runtime: Runtime, number: int) -> list[Completion]:
        text = library[number * COPIED_CHARACTERS :][:COPIED_CHARACTERS]
        return [runtime.generate(f"# A file\n{text}\n# The same file\n{text[:60]}", params)]

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


class Peer:
    """llama-server, which answers the prompts of a round that a runtime has answered."""

    def __init__(self, server: LlamaServer) -> None:
        self._server = server

    def ask(self, completions: Sequence[Completion]) -> None:
        for completion in completions:
            prompt, count = completion.prompt_token_ids.tolist(), len(completion.token_ids)
            (answer,) = self._server.serve([prompt], [0], count)
            assert len(answer.token_ids) == count

    def seconds(self, clock: str) -> float:
        return cpu_s(self._server.pid) if clock == "cpu" else time.perf_counter()


def llama_command(arguments: Any, path: Path, *more: str) -> tuple[str, ...]:
    program = str(arguments.llama / "llama-server")
    return (program, "-m", str(path), "--no-ui", "--log-disable", "-t", "2", "-tb", "2",
            "-np", "1", "-c", "4096", *more)  # fmt: skip


def main() -> None:
    names = "again", "edit", "edit-own", "copy", "new", "new-8", "new-32"
    arguments = parse(
        __doc__, model="smollm2", weight_dtype="auto", dtype="auto", rounds=5, tokens=200,
        clock=("wall", "cpu"), kinds=Names("kinds of answers", names), llama=Path,
        lookup="ngram-mod", json=False,
    )  # fmt: skip
    settings = {"weight_dtype": arguments.weight_dtype, "dtype": arguments.dtype}
    with ExitStack() as stack:
        model = arguments.model
        if model == "small":
            model = stack.enter_context(tempfile.TemporaryDirectory())
            save_checkpoint(SHAPES["small"], "bfloat16", Path(model), has_tokenizer=True)
        plain, drafting = (
            stack.enter_context(Runtime(model, **settings, max_draft_tokens=most))
            for most in (0, 32)
        )
        made: dict[str, Ask] = {
            "again": again(arguments.tokens),
            "edit": edit(plain.model.vocab_size, is_predicted=True),
            "edit-own": edit(plain.model.vocab_size, is_predicted=False),
            "copy": copy(),
            "new": new(arguments.tokens, 1),
            "new-8": new(arguments.tokens // 2, 8),
            "new-32": new(arguments.tokens // 4, 32),
        }
        peers: list[Peer] = []
        if arguments.llama:
            path = Path(find_model(model).path)
            for more in ((), ("--spec-type", arguments.lookup)):
                server = LlamaServer(llama_command(arguments, path, *more))
                peers.append(Peer(stack.enter_context(closing(server))))
        columns = ["answers", "without, tokens/s", "with", "ratio", "worst", "steps saved"]
        if peers:
            columns += ["llama.cpp without", "with", "ratio"]
        rows = []
        for name in arguments.kinds:
            own = peers if name in GREEDY else ()
            row = measure(plain, drafting, made[name], own, arguments.rounds, arguments.clock)
            rows.append([name, *row, *[None] * (len(columns) - 1 - len(row))])
    print_table(arguments, columns, rows)


def measure(
    plain: Runtime,
    drafting: Runtime,
    ask: Ask,
    peers: Sequence[Peer],
    rounds: int,
    clock: str,
) -> list[Cell]:
    """The medians of all rounds, the median ratio of a round, and the worst."""
    now = time.process_time if clock == "cpu" else time.perf_counter
    rates: dict[Any, list[float]] = {each: [] for each in (plain, drafting, *peers)}
    num_saved = num_tokens = 0
    for number in range(rounds + 1):  # the first one warms up
        answers: list[list[list[int]]] = []
        completions: list[Completion] = []
        before = drafting.cache_stats()["accepted_draft_tokens"]
        for runtime in (plain, drafting) if number % 2 else (drafting, plain):
            began = now()
            completions = ask(runtime, number)
            seconds = now() - began
            answers.append([completion.token_ids for completion in completions])
            count = sum(map(len, answers[0]))
            rates[runtime].append(count / seconds)
        assert answers[0] == answers[1], "drafts have changed an answer"
        for peer in peers if number % 2 else peers[::-1]:
            since = peer.seconds(clock)
            peer.ask(completions)
            rates[peer].append(count / (peer.seconds(clock) - since))
        if number:
            num_tokens += count
            num_saved += drafting.cache_stats()["accepted_draft_tokens"] - before
    cells: list[Cell] = []
    for first, second in ((plain, drafting), tuple(peers)) if peers else ((plain, drafting),):
        without, with_drafts = rates[first][1:], rates[second][1:]
        ratios = [b / a for a, b in zip(without, with_drafts, strict=True)]
        cells += [f"{median(without):.1f}", f"{median(with_drafts):.1f}", f"{median(ratios):.3f}"]
        if first is plain:
            cells += [f"{min(ratios):.3f}", f"{num_saved / num_tokens:.0%}"]
    return cells


if __name__ == "__main__":
    main()
