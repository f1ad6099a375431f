"""What is asked of the runtime in the throughput part, and how it is played.

The kinds are those of engine_workloads.py at the size of a GPU; tokens are random, lengths exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from harness.workloads import Conversation, Workload, ideal_rounds

from radixserve import Runtime, SamplingParams

LOWEST_ID = 8


@dataclass(frozen=True)
class Sizes:
    """How many requests there are and how long their parts; sessions and turns of the chat."""

    requests: int
    system: int
    shots: int
    own: int
    unshared: int
    sessions: int
    turns: int
    turn: int
    new: int


FULL = Sizes(256, 1_024, 2_048, 128, 1_024, 64, 4, 256, 64)
QUICK = Sizes(128, 1_024, 2_048, 128, 512, 32, 3, 256, 32)
DRY = Sizes(4, 16, 24, 4, 12, 2, 2, 6, 3)


@dataclass(frozen=True)
class Played:
    """One run of a workload."""

    seconds: float
    num_out: int  # tokens generated
    num_prompt: int
    num_computed: int  # prompt tokens that were not found cached
    first_s: float  # mean time to the first token


def make(name: str, sizes: Sizes, vocab: int, seed: int) -> Workload:
    """One of KINDS, with tokens of this seed."""
    rng = np.random.default_rng([seed, list(KINDS).index(name)])

    def row(length: int) -> tuple[int, ...]:
        return tuple(rng.integers(LOWEST_ID, vocab, length).tolist())

    return KINDS[name](sizes, row)


Maker = Callable[[int], tuple[int, ...]]


def _system(sizes: Sizes, row: Maker) -> Workload:
    head, count = row(sizes.system), sizes.requests
    what = f"{count} requests, {sizes.system:,} shared + {sizes.own}"
    rows = tuple((*head, *row(sizes.own)) for _ in range(count))
    return Workload("system prompt", what, (rows,), sizes.new, sizes.system)


def _few_shot(sizes: Sizes, row: Maker) -> Workload:
    head, count = row(sizes.shots), sizes.requests // 2
    own, new = sizes.own // 2, max(2, sizes.new // 4)
    what = f"{count} requests, {sizes.shots:,} shared + {own}"
    rows = tuple((*head, *row(own)) for _ in range(count))
    return Workload("few-shot", what, (rows,), new, sizes.shots)


def _chat(sizes: Sizes, row: Maker) -> Workload:
    what = f"{sizes.sessions} sessions x {sizes.turns} turns of {sizes.turn}"
    rounds = tuple(
        tuple(row(sizes.turn) for _ in range(sizes.sessions)) for _ in range(sizes.turns)
    )
    return Workload("multi-turn", what, rounds, sizes.new, 0)


def _random(sizes: Sizes, row: Maker) -> Workload:
    what = f"{sizes.requests} requests of {sizes.unshared:,}, no reuse"
    rows = tuple(row(sizes.unshared) for _ in range(sizes.requests))
    return Workload("random", what, (rows,), sizes.new, 0)


KINDS: dict[str, Callable[[Sizes, Maker], Workload]] = {
    "system prompt": _system,
    "multi-turn": _chat,
    "few-shot": _few_shot,
    "random": _random,
}


def play(rt: Runtime, workload: Workload) -> Played:
    """All rounds, one after the other, each sent at once; greedy."""
    params = SamplingParams(max_tokens=workload.num_new, temperature=0.0, ignore_eos=True)
    talk, done = Conversation.start(workload), []
    began = time.perf_counter()
    for additions in workload.rounds:
        outs = rt.generate(talk.ask(additions), params, progress=False)
        talk.answer([out.token_ids for out in outs])
        done += outs
    return played(done, time.perf_counter() - began)


def played(outs: list[Any], seconds: float) -> Played:
    return Played(
        seconds,
        num_out=sum(out.usage.completion_tokens for out in outs),
        num_prompt=sum(out.usage.prompt_tokens for out in outs),
        num_computed=sum(out.usage.computed_tokens for out in outs),
        first_s=fmean(out.metrics.ttft_s for out in outs),
    )


def ideal_computed(workload: Workload) -> int:
    """Prompt tokens that are left to compute when none is computed twice."""
    return sum(work.computed for one in ideal_rounds(workload) for work in one.requests)
