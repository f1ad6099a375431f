"""A scheduler of a few lines for tests of the runner: pages in any order, steps in any mix."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from radixserve.request import SamplingParams
from radixserve.runner.base import ModelRunner
from radixserve.schedule import (
    ModelRunnerOutput,
    SampleOutput,
    SampleSpec,
    ScheduledRequest,
    ScheduledRows,
    SchedulerOutput,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)


@dataclass
class Stream:
    """One sequence: its tokens, its pages, and how much of it is computed."""

    tokens: list[int]
    params: SamplingParams
    seed: int
    num_prompt: int
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    outputs: list[SampleOutput] = field(default_factory=list)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def is_done(self) -> bool:
        return len(self.outputs) >= self.params.max_tokens


class Driver:
    """Feeds hand-built Schedules to a ModelRunner; pages are handed out shuffled."""

    def __init__(self, runner: ModelRunner, page_size: int, seed: int = 0) -> None:
        self.runner, self.page_size = runner, page_size
        self.random = random.Random(seed)
        self.free = list(range(runner.num_pages))
        self.random.shuffle(self.free)
        self.sequences: list[Stream] = []
        self.cow_copies: list[tuple[int, int, int]] = []
        self.num_steps = 0

    def add(
        self,
        tokens: Sequence[int],
        params: SamplingParams = GREEDY,
        seed: int = 0,
        share: tuple[Stream, int] | None = None,
    ) -> Stream:
        """A new sequence; `share` = (other, n) takes the other's first n tokens' pages.

        Whole pages are shared; the head of the page that n ends in is copied in the next step.
        """
        sequence = Stream(list(tokens), params, seed, len(tokens))
        if share is not None:
            other, num_shared = share
            assert num_shared <= other.computed
            assert list(tokens[:num_shared]) == other.tokens[:num_shared]
            whole, rest = divmod(num_shared, self.page_size)
            sequence.pages = other.pages[:whole]
            if rest:
                sequence.pages.append(self.free.pop())
                self.cow_copies.append((other.pages[whole], sequence.pages[-1], rest))
            sequence.computed = num_shared
        self.sequences.append(sequence)
        return sequence

    def step(self, work: Sequence[tuple[Stream, int]]) -> dict[str, float]:
        """Compute the next n tokens of each sequence; sample where that reaches the end."""
        rows = tuple(self.row(sequence, count) for sequence, count in work)
        copies = np.array(self.cow_copies, np.int32).reshape(-1, 3)
        self.cow_copies = []
        decodes = sum(len(row.token_ids) == 1 for row in rows)
        total = sum(len(row.token_ids) for row in rows)
        output = self.compute(
            SchedulerOutput(
                self.num_steps, ScheduledRows.of(rows), copies, total - decodes, decodes
            )
        )
        self.num_steps += 1
        for (sequence, count), row, sampled in zip(work, rows, output.outputs, strict=True):
            sequence.computed += count
            assert (sampled is None) == (row.sample is None)
            if sampled is not None:
                sequence.outputs.append(sampled)
                sequence.tokens.append(sampled.token_id)
        return output.seconds

    def compute(self, schedule: SchedulerOutput) -> ModelRunnerOutput:
        return self.runner.collect(self.runner.launch(schedule))

    def run(self, chunk: int = 64, shuffle: bool = True) -> None:
        """Step all sequences to their ends, in changing orders and at most `chunk` tokens a row."""
        while True:
            work = [
                (sequence, min(chunk, len(sequence.tokens) - sequence.computed))
                for sequence in self.sequences
                if not sequence.is_done
            ]
            if not work:
                return
            if shuffle:
                self.random.shuffle(work)
            self.step(work)

    def row(self, sequence: Stream, count: int) -> ScheduledRequest:
        start, end = sequence.computed, sequence.computed + count
        while len(sequence.pages) * self.page_size < end:
            sequence.pages.append(self.free.pop())
        sample = None
        if end == len(sequence.tokens):
            sample = SampleSpec(
                params=sequence.params,
                seed=sequence.seed,
                num_prompt=sequence.num_prompt,
                token_ids=np.array(sequence.tokens, np.int32),
                banned_ids=(),
            )
        return ScheduledRequest(
            request_id=str(id(sequence)),
            slot=self.sequences.index(sequence),
            token_ids=np.array(sequence.tokens[start:end], np.int32),
            start=start,
            page_ids=np.array(sequence.pages[: -(-end // self.page_size)], np.int32),
            sample=sample,
        )
