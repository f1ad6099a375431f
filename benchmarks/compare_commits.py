"""Whether a commit is as fast as another on this machine: both do the same work in turns.

    python benchmarks/compare_commits.py --base COMMIT [--head COMMIT]
        [--only decoder,attention,engine,cache] [--model smollm2]
        [--forms float32,bfloat16,int8,file] [--depths 0,4096] [--rows 8,32] [--activation-bits 16]
        [--rounds 5] [--least 0.98] [--folder DIR] [--json]

Each commit is built in a worktree of its own, and its kernels in the user's cache, once; without
--head it is the working tree as it is. One process of each stays open, and in every round each does
a case, in alternating order. CPU time of one thread. `speed` is the head's as a multiple of the
base's: the median of the rounds' ratios, beside the lowest and the highest. The command fails where
the median of a case is below --least, and names the case.

decoder    a prefill of 512 tokens and a decode step after each of the depths; decode steps of
           several rows after 128 tokens each; K and V are random. Beside a base that has no
           activations of 16 bits, --activation-bits 8 compares the same arithmetic
attention  a layer's decode step and prefill of 512 tokens after each of the depths, float32 and
           bfloat16, in sequence and scattered
engine     8 prompts at once through `Runtime`, which begin with the same 256 tokens
cache      `bench_cache.py --quick` of each commit: look-ups, chats, churn

The base may go back to 6396dd4. Run it with `taskset -c N`, on a machine as quiet as can be had: a
case whose lowest and highest ratio lie far apart says little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from harness.arguments import Names, parse
from harness.report import Cell, print_table

ROOT = Path(__file__).parents[1]
WORKER = Path(__file__).parent / "harness" / "timed_commit.py"
ROW_DEPTH = 128  # tokens of each sequence before decode steps of several
FORMS = ("float32", "bfloat16", "int8", "file")
COLUMNS = ("case", "base, ms", "head, ms", "speed", "lowest", "highest")
Seconds = Callable[[], dict[str, float]]  # of cases by name
Pair = dict[str, float]  # a case's seconds by commit, "base" and "head"


class Worker:
    """A process that runs one commit's code."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            env=environment(tree),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, case: list[Cell]) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the code of {self._tree} ended at {case}")
        return float(json.loads(line))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def environment(tree: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, (tree, tree / "kernels", tree / "benchmarks")))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """A worktree of `commit` below `folder`; the repository itself for ""."""
    if not commit:
        yield ROOT
        return
    git = ("git", "-C", str(ROOT), "worktree")
    tree = folder / commit.replace("/", "-")
    subprocess.run([*git, "add", "--detach", "--force", str(tree), commit], check=True)
    try:
        yield tree
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def groups(args: argparse.Namespace) -> Iterator[list[tuple[str, list[Cell]]]]:
    """Cases by name that the same two processes do: models of one form are in memory at a time."""
    for form in args.forms if "decoder" in args.only else ():
        steps = [(step, depth, 1) for depth in args.depths for step in ("prefill", "decode")]
        steps += [("decode", ROW_DEPTH, rows) for rows in args.rows]
        yield [
            (
                f"{form} {step} after {depth}, {rows} row{'s' * (rows > 1)}",
                ["decoder", args.model, form, args.activation_bits, step, depth, rows],
            )
            for step, depth, rows in steps
        ]
    if "attention" in args.only:
        yield [
            (
                f"attention, {dtype} {order}, {count} after {depth}",
                ["attention", dtype, order, depth, count],
            )
            for dtype in ("float32", "bfloat16")
            for depth in args.depths
            if depth
            for order, count in (("sequence", 1), ("scattered", 1), ("sequence", 512))
        ]
    if "engine" in args.only:
        yield [("engine, 8 rows, 256 shared", ["engine", "demo", 8, 256, 64, 32])]


def cache_seconds(tree: Path) -> dict[str, float]:
    """Of the operations that bench_cache.py times."""
    command = [sys.executable, str(tree / "benchmarks" / "bench_cache.py"), "--quick", "--json"]
    done = subprocess.run(
        [*command, "--only", "A,B,C,D"],
        cwd=tree,
        env=environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return {
        f"cache, {figure['key']}": figure["value"] / 1e6
        for figure in json.loads(done.stdout)["figures"]
        if figure["contender"] == "radix" and figure["unit"] == "us"
    }


def in_turns(base: Seconds, head: Seconds, rounds: int) -> dict[str, list[Pair]]:
    """The rounds of each case that both know."""
    found: dict[str, list[Pair]] = {}
    for number in range(rounds):
        order = [("base", base), ("head", head)]
        of = {name: call() for name, call in (order if number % 2 else reversed(order))}
        for case in of["base"].keys() & of["head"].keys():
            found.setdefault(case, []).append({name: of[name][case] for name in of})
    return found


def measure(args: argparse.Namespace, base: Path, head: Path) -> dict[str, list[Pair]]:
    found: dict[str, list[Pair]] = {}
    for cases in groups(args):
        workers = Worker(base), Worker(head)
        for name, case in cases:
            calls = [lambda of=worker: {name: of.seconds(case)} for worker in workers]  # noqa: B023
            found |= in_turns(*calls, args.rounds)
            print(name, file=sys.stderr, flush=True)
        for worker in workers:
            worker.close()
    if "cache" in args.only:
        calls = [lambda tree=tree: cache_seconds(tree) for tree in (base, head)]
        found |= in_turns(*calls, args.rounds)
    return found


def main() -> None:
    args = parse(
        __doc__,
        required=("base",),
        base=str,
        head="",
        only=Names("part", ("decoder", "attention", "engine", "cache")),
        model="smollm2",
        forms=Names("form", FORMS),
        depths=[0, 4096],
        rows=[8, 32],
        activation_bits=16,
        rounds=5,
        least=0.98,
        folder=Path,
        json=False,
    )
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        checked_out(args.base, Path(folder)) as of_base,
        checked_out(args.head, Path(folder)) as of_head,
    ):
        found = measure(args, of_base, of_head)
    table: list[list[Cell]] = []
    slow: list[str] = []
    for name, pairs in found.items():
        times = [1e3 * median(pair[of] for pair in pairs) for of in ("base", "head")]
        ratios = sorted(pair["base"] / pair["head"] for pair in pairs)
        speed = median(ratios)
        slow += [name] * (speed < args.least)
        table.append([name, *times, *(f"{x:.2f}" for x in (speed, ratios[0], ratios[-1]))])
    print_table(args, COLUMNS, table, ("torch",))
    if slow:
        sys.exit(f"slower than {args.least} of {args.base}: {'; '.join(slow)}")


if __name__ == "__main__":
    main()
