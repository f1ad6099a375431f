"""Two replicas against one engine with the same memory in all: chats with common system prompts.

    python benchmarks/bench_replicas.py [--model demo] [--replicas 2] [--pages N] [--repeats 3] ...

`agents` system prompts of `shared` tokens, `sessions` chats of each, `turns` turns of `own` tokens
that are answered by `new` ones; `clients` chats are open at a time, in random order. Tokens are
those of prompts and answers; CPU seconds those of all processes. Needs Ray: pip install
"radixserve[cluster]". Each contender starts, computes other prompts of that kind to warm up, is
measured, and ends; medians of the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import numpy as np
from harness.arguments import parse
from harness.machine import cpu_s
from harness.processes import take_turns
from harness.report import print_table

from radixserve import Runtime, SamplingParams
from radixserve.fleet.ray_serve import start_replicas

COLUMNS = ("", "hit rate", "tokens/s", "first token ms, median", "p90", "seconds", "CPU seconds")
Script = list[list[int]]  # of a chat: what each turn adds
Figures = list[float]  # of COLUMNS
Opener = Callable[[argparse.Namespace], AbstractContextManager[Runtime]]


def make_chats(args: argparse.Namespace, vocab: int, seed: int) -> list[Script]:
    """In the order in which clients take them."""
    rng = np.random.default_rng(seed)

    def row(length: int) -> list[int]:
        ids: list[int] = rng.integers(8, vocab, length).tolist()
        return ids

    chats = []
    for _ in range(args.agents):
        head = row(args.shared)
        for _ in range(args.sessions):
            first, *others = [row(args.own) for _ in range(args.turns)]
            chats.append([head + first, *others])
    return [chats[number] for number in rng.permutation(len(chats))]


async def run_chats(
    runtime: Runtime, chats: list[Script], args: argparse.Namespace, *, named: bool
) -> Figures:
    params = SamplingParams(max_tokens=args.new, temperature=0.0, ignore_eos=True)
    waiting, waits, counts = iter(enumerate(chats)), [], np.zeros(2)

    async def turn(history: list[int], session: str) -> list[int]:
        start, first = time.perf_counter(), 0.0
        with runtime.submit([history], params, streams=True, session=session) as handle:
            async for chunk in handle:  # noqa: B007
                first = first or time.perf_counter() - start
        waits.append(first)
        completion = chunk.completion
        counts.__iadd__((completion.usage.cached_tokens, completion.usage.prompt_tokens))
        return [*history, *completion.token_ids]

    async def client() -> None:
        for number, script in waiting:
            session, history = f"chat {number}" if named else "", []
            for added in script:
                history = await turn(history + added, session)
            if named:
                runtime.close_session(session)

    start, cpu_start = time.perf_counter(), tree_cpu_s()
    await asyncio.gather(*[client() for _ in range(args.clients)])
    seconds, cpu_seconds = time.perf_counter() - start, tree_cpu_s() - cpu_start
    tokens = counts[1] + len(waits) * args.new
    quantiles = 1_000 * np.quantile(waits, (0.5, 0.9))
    return [counts[0] / counts[1], tokens / seconds, *quantiles, seconds, cpu_seconds]


def tree_cpu_s() -> float:
    """CPU seconds of this process and all that it started."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
    found = {os.getpid()}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return sum(map(cpu_s, found))


def one_engine(args: argparse.Namespace) -> Runtime:
    return Runtime(args.model, num_pages=args.pages)


@contextmanager
def replicas(args: argparse.Namespace) -> Iterator[Runtime]:
    settings = {"num_pages": args.pages // args.replicas}
    with start_replicas(args.model, settings, args.replicas) as runtime:
        while runtime.status().stats["pages_total"] != settings["num_pages"] * args.replicas:
            time.sleep(0.1)  # until the last one is there
        yield runtime


def measure(open_runtime: Opener, args: argparse.Namespace, turn: int, *, named: bool) -> Figures:
    with open_runtime(args) as runtime:
        for seed in (0, 1 + turn):  # the first one is to warm up
            chats = make_chats(args, runtime.model.vocab_size, seed)
            runtime.flush_cache()
            figures = asyncio.run(run_chats(runtime, chats, args, named=named))
    return figures


def main() -> None:
    sizes = {"replicas": 2, "pages": 12_000, "agents": 8, "sessions": 6, "turns": 4}
    sizes |= {"shared": 600, "own": 40, "new": 24, "clients": 12, "repeats": 3}
    args = parse(__doc__, model="demo", json=False, **sizes)
    several = f"{args.replicas} replicas"
    contenders = {
        "one engine": lambda turn: measure(one_engine, args, turn, named=False),
        several: lambda turn: measure(replicas, args, turn, named=False),
        f"{several}, sessions named": lambda turn: measure(replicas, args, turn, named=True),
    }
    found = take_turns(contenders, args.repeats)
    rows = [[name, *np.median(figures, axis=0).tolist()] for name, figures in found.items()]
    print_table(args, COLUMNS, rows, ("torch", "ray"))


if __name__ == "__main__":
    main()
