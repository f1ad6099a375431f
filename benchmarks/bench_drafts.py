"""Tokens a second with drafts beside those without, by what an answer repeats.

    python benchmarks/bench_drafts.py [--model smollm2|small] [--weight-dtype int8] [--rounds 5]
        [--tokens 200] [--clock cpu] [--kinds again,edit,...] [--llama DIR] [--lookup ngram-mod]

One runtime answers each round's requests twice, with drafts and without, in turns; the answers are
compared. So both have the same weights in the same memory: two runtimes of one process differ by up
to 5 % through where their weights lie. What is cached lies in namespaces of their own. `drafted`
and `right` are shares of the answers' tokens. small: a bfloat16 model with random weights.

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

import hashlib
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
from radixserve.api import engine_factory
from radixserve.drafts.extension import DraftExtension
from radixserve.engine.engine import Engine
from radixserve.models.source import find_model
from radixserve.scheduler.drafter import Drafter

TOPICS = ("lists", "the json module", "sorting", "files", "classes", "threads", "tests", "numbers")
EDITED_TOKENS, CHANGED_EVERY = 300, 60
COPIED_CHARACTERS, COPIED_TOKENS = 1_100, 250
GREEDY = ("again", "copy")
PLAIN, DRAFTED = "plain", "drafted"  # namespaces
# A runtime, a namespace and the number of the round.
Ask = Callable[[Runtime, str, int], list[Completion]]


class SwitchedDrafts(DraftExtension):
    """Drafts that can be turned off, and on again, while no request is open."""

    made: SwitchedDrafts

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        super().__init__(engine, max_tokens)
        self._engine = engine
        type(self).made = self

    def switch(self, *, is_on: bool) -> None:
        self._engine.set_drafter(self._drafts if is_on else Drafter())


class Script:
    """A function for logits_processors that gives the answer's tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids

    def __call__(self, ids: Sequence[int], logits: Any) -> Any:
        logits[self._token_ids[len(ids)]] = 1e9
        return logits


def again(num_tokens: int) -> Ask:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)

    def ask(runtime: Runtime, namespace: str, _: int) -> list[Completion]:
        own = replace(params, namespace=namespace)
        return [runtime.generate(f"A short text about {topic}:", own) for topic in TOPICS[:4]]

    return ask


def edit(vocab_size: int, *, is_predicted: bool) -> Ask:
    def ask(runtime: Runtime, namespace: str, number: int) -> list[Completion]:
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
            namespace=namespace,
        )
        (completion,) = runtime.generate([[1, 2, 3, *text, 4, 5, 6]], params)
        assert completion.token_ids == edited
        return [completion]

    return ask


def copy() -> Ask:
    params = SamplingParams(max_tokens=COPIED_TOKENS, temperature=0.0, ignore_eos=True)
    library = inspect.getsource(textwrap)

    def ask(runtime: Runtime, namespace: str, number: int) -> list[Completion]:
        own = replace(params, namespace=namespace)
        text = library[number * COPIED_CHARACTERS :][:COPIED_CHARACTERS]
        return [runtime.generate(f"# A file\n{text}\n# The same file\n{text[:60]}", own)]

    return ask


def new(num_tokens: int, num_at_once: int) -> Ask:
    params = SamplingParams(max_tokens=num_tokens, temperature=1.0, ignore_eos=True)

    def ask(runtime: Runtime, namespace: str, number: int) -> list[Completion]:
        own = replace(params, namespace=namespace)
        prompts, each = [], []
        for index in range(max(4, num_at_once)):
            # No prompt begins like another one, and none is asked twice with the same seed.
            name = hashlib.md5(f"{num_at_once} {number} {index}".encode()).hexdigest()
            prompts.append(f"{name[:6]}: a short text about {TOPICS[index % len(TOPICS)]}:")
            each.append(replace(own, seed=int(name[:8], 16)))
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
        engine_factory.DraftExtension = SwitchedDrafts
        runtime = stack.enter_context(Runtime(model, **settings, max_draft_tokens=32))
        made: dict[str, Ask] = {
            "again": again(arguments.tokens),
            "edit": edit(runtime.model.vocab_size, is_predicted=True),
            "edit-own": edit(runtime.model.vocab_size, is_predicted=False),
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
        columns = ["answers", "without, tokens/s", "with", "ratio", "worst", "drafted", "right"]
        if peers:
            columns += ["llama.cpp without", "with", "ratio"]
        rows = []
        for name in arguments.kinds:
            own = peers if name in GREEDY else ()
            row = measure(runtime, made[name], own, arguments.rounds, arguments.clock)
            rows.append([name, *row, *[None] * (len(columns) - 1 - len(row))])
    print_table(arguments, columns, rows)


def measure(
    runtime: Runtime, ask: Ask, peers: Sequence[Peer], rounds: int, clock: str
) -> list[Cell]:
    """The medians of all rounds, the median ratio of a round, and the worst."""
    now = time.process_time if clock == "cpu" else time.perf_counter
    rates: dict[Any, list[float]] = {each: [] for each in (PLAIN, DRAFTED, *peers)}
    num_tokens, counts = 0, dict.fromkeys(("drafted_tokens", "accepted_draft_tokens"), 0)
    for number in range(rounds + 1):  # the first one warms up
        answers: list[list[list[int]]] = []
        completions: list[Completion] = []
        before = dict(runtime.cache_stats())
        for namespace in (PLAIN, DRAFTED) if number % 2 else (DRAFTED, PLAIN):
            SwitchedDrafts.made.switch(is_on=namespace == DRAFTED)
            began = now()
            completions = ask(runtime, namespace, number)
            seconds = now() - began
            answers.append([completion.token_ids for completion in completions])
            count = sum(map(len, answers[0]))
            rates[namespace].append(count / seconds)
        assert answers[0] == answers[1], "drafts have changed an answer"
        for peer in peers if number % 2 else peers[::-1]:
            since = peer.seconds(clock)
            peer.ask(completions)
            rates[peer].append(count / (peer.seconds(clock) - since))
        if number:
            num_tokens += count
            stats = dict(runtime.cache_stats())
            for name in counts:
                counts[name] += stats[name] - before[name]
    cells: list[Cell] = []
    for first, second in ((PLAIN, DRAFTED), tuple(peers)) if peers else ((PLAIN, DRAFTED),):
        without, with_drafts = rates[first][1:], rates[second][1:]
        ratios = [b / a for a, b in zip(without, with_drafts, strict=True)]
        cells += [f"{median(without):.1f}", f"{median(with_drafts):.1f}", f"{median(ratios):.3f}"]
        if first == PLAIN:
            cells += [f"{min(ratios):.3f}"]
            cells += [f"{count / num_tokens:.0%}" for count in counts.values()]
    return cells


if __name__ == "__main__":
    main()
