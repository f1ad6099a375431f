"""What the prefix cache costs a request, beside its peers, in microseconds of one thread.

    python benchmarks/bench_cache.py [--quick] [--only A,C] [--page-size P] [--json] [--save DIR]

    A miss   B hit   C chat   D churn   E eviction   F bytes kept   G page sizes   H long prompt
    I scheduling pass

Who takes part: a plain numpy reference, `RadixCache`, `HashBlockCache` with blocks of 16 and 256
tokens, and SGLang's tree where it can be imported (sglang_tree.py says how to make it so). What
cannot be had is skipped with a line that says why. cache_targets.py holds the targets.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from cache_cases import FULL, PROMPT, QUICK, Bench, chat, churn, eviction, long_lookup, miss_and_hit
from cache_contenders import peers, radix
from cache_footprint import footprint
from cache_page_sizes import page_sizes
from cache_passes import passes
from cache_report import Run, describe_machine, section
from cache_targets import REFERENCE, judge
from stopwatch import Figure, Line, micros

Case = Callable[[Bench], Iterator[Figure]]
CASES: dict[str, Case] = {
    "A": miss_and_hit,
    "B": miss_and_hit,
    "C": chat,
    "D": churn,
    "E": eviction,
    "F": footprint,
    "G": page_sizes,
    "H": long_lookup,
    "I": passes,
}


class Reference:
    """Numpy equality over a prompt and one copy of its page ids, measured before each case."""

    def __init__(self, bench: Bench) -> None:
        self._left = bench.tokens(PROMPT)
        self._right = self._left.copy()
        self._pages = np.arange(PROMPT, dtype=np.int32)
        self._samples: list[float] = []

    def measure(self) -> None:
        self._compare_and_copy()
        self._samples += [micros(self._compare_and_copy, 200) for _ in range(7)]

    def figure(self) -> Figure:
        return Line(REFERENCE, "compare and copy").figure("numpy", self._samples)

    def _compare_and_copy(self) -> None:
        assert (self._left == self._right).all()
        self._pages.copy()


def measure(
    bench: Bench, wanted: list[str], show: Callable[[str], None], *, is_quick: bool
) -> list[Figure]:
    """All figures of the wanted cases; `show` gets each case's table when it is done.

    Eviction comes first: its figures are about how objects lie in memory, so they are taken before
    the other cases have left theirs full of holes.
    """
    reference = Reference(bench)
    reference.measure()
    show(section([reference.figure()], []))
    figures: list[Figure] = []
    cases = dict.fromkeys(CASES[name] for name in wanted)
    for case in sorted(cases, key=lambda case: case is not eviction):
        gc.collect()
        gc.disable()
        reference.measure()
        found = [figure for figure in case(bench) if figure.key[0] in wanted]
        gc.enable()
        figures += found
        for name in dict.fromkeys(figure.key[0] for figure in found):
            mine = [figure for figure in found if figure.key[0] == name]
            known = [reference.figure(), *figures]
            show(section(mine, judge(known, is_quick=is_quick)))
    return [reference.figure(), *sorted(figures, key=lambda figure: figure.key[0])]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--only", default=",".join(CASES), help="cases, such as A,C")
    parser.add_argument("--quick", action="store_true", help="small sizes, three repeats")
    parser.add_argument("--page-size", type=int, default=1, help="of radix (default: 1)")
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="write cache-cpu.md and .json there"
    )
    args = parser.parse_args()
    args.only = args.only.split(",")
    unknown = sorted(set(args.only) - set(CASES))
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}")
    return args


def main() -> None:
    args = arguments()
    others, absent = peers()
    sizes = QUICK if args.quick else FULL
    bench = Bench((radix(args.page_size), *others), sizes, np.random.default_rng(0))
    settings = {
        **describe_machine(),
        "page_size": args.page_size,
        "repeats": sizes.repeats,
        "quick": args.quick,
    }

    def show(text: str) -> None:
        if not args.json:
            print(text, flush=True)

    show("\n".join(Run(settings, absent, []).header()))
    wall, busy = time.perf_counter(), time.process_time()
    figures = measure(bench, args.only, show, is_quick=args.quick)
    share = (time.process_time() - busy) / (time.perf_counter() - wall)
    run = Run({**settings, "share_of_a_core": round(share, 2)}, absent, figures)
    show(run.summary())
    if args.json:
        print(run.document())
    if args.save is not None:
        run.save(args.save)


if __name__ == "__main__":
    main()
