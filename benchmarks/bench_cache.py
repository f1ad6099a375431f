"""What the prefix cache costs a request, beside its peers, in microseconds of one thread.

    python benchmarks/bench_cache.py [--quick] [--only A,C] [--json] [--save DIR]

    A miss   B hit   C chat   D churn   E eviction   F bytes kept   G page sizes   H long prompt
    I scheduling pass   J garbage collector

Contenders: a plain numpy reference, `RadixCache`, `HashBlockCache` with blocks of 16 and 256
tokens, and SGLang's tree where it can be imported (cache/sglang.py says how), else a line says why
it cannot.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

import numpy as np
from cache.cases import (
    FULL,
    PROMPT,
    QUICK,
    Bench,
    chat,
    churn,
    eviction,
    long_lookup,
    miss_and_hit,
    page_sizes,
)
from cache.collector import collector_pauses
from cache.contenders import peers, radix
from cache.memory import footprint
from cache.scheduling import scheduling_pass
from cache.timing import Figure, interleaved
from harness.arguments import REPORT, Names, parse
from harness.report import Report, Section, Table

Case = Callable[[Bench], Iterator[Figure]]
CASES: dict[str, tuple[str, Case]] = {
    "A": ("miss: 4,096 unknown tokens among cached prompts", miss_and_hit),
    "B": ("hit: 4,096 tokens in one edge", miss_and_hit),
    "C": ("chat: all operations of a request", chat),
    "D": ("churn: all operations of a request", churn),
    "E": ("eviction", eviction),
    "F": ("bytes kept, payload included", footprint),
    "G": ("larger pages, as a ratio to page size 1", page_sizes),
    "H": ("a long prompt", long_lookup),
    "I": ("a scheduling pass", scheduling_pass),
    "J": ("the garbage collector beside a growing tree", collector_pauses),
}
NOTES = (
    "Medians of the thread's CPU time; all contenders take turns in one process. The garbage"
    " collector is off while a case runs and has run before it. look-up: radix says why a match"
    " ends, SGLang's is match_prefix. Every column but radix keeps its own page size (SGLang: 1)."
)


def make_reference(bench: Bench) -> Callable[[], object]:
    """Numpy equality over a prompt and one copy of its page ids."""
    left = bench.tokens(PROMPT)
    right, pages = left.copy(), np.arange(PROMPT, dtype=np.int32)
    return lambda: (left == right).all() and pages.copy()


def measure(bench: Bench, wanted: list[str], report: Report) -> list[Figure]:
    """All figures of the wanted cases, the reference first.

    Eviction comes first: its figures depend on how objects lie in memory, so they are taken before
    the other cases have fragmented it.
    """
    operations = {"numpy": make_reference(bench)}
    key, what = "reference", "compare and copy"
    reference = list(interleaved(key, what, operations, 7))
    title = "reference: numpy compares 4,096 tokens and copies as many page ids"
    report.add(Section(title, make_table(reference)))
    figures: list[Figure] = []
    cases = dict.fromkeys(CASES[name][1] for name in wanted)
    for case in sorted(cases, key=lambda case: case is not eviction):
        gc.collect()
        gc.disable()
        figures += [figure for figure in case(bench) if figure.key[0] in wanted]
        gc.enable()
        for name in (name for name in wanted if CASES[name][1] is case):
            mine = [figure for figure in figures if figure.key[0] == name]
            report.add(Section(f"{name}  {CASES[name][0]}", make_table(mine)))
    report.sections[1:] = sorted(report.sections[1:], key=lambda section: section.title)
    return [*reference, *sorted(figures, key=lambda figure: figure.key[0])]


def make_table(figures: Sequence[Figure]) -> Table:
    """A row for each key, a column for each contender."""
    columns = list(dict.fromkeys(figure.contender for figure in figures))
    cells = {(figure.key, figure.contender): format_figure(figure) for figure in figures}
    rows = [
        (what, *(cells.get((key, column), "") for column in columns))
        for key, what in dict.fromkeys((figure.key, figure.what) for figure in figures)
    ]
    return Table((figures[0].unit, *columns), rows)


def format_figure(figure: Figure) -> str:
    if figure.unit == "x":
        return f"{figure.value:.2f}"
    return f"{figure.value:,.1f}" if figure.value < 1_000 else f"{figure.value:,.0f}"


def main() -> None:
    args = parse(__doc__, only=Names("case", CASES), quick=False, **REPORT)
    others, absent = peers()
    sizes = QUICK if args.quick else FULL
    bench = Bench((radix(1), *others), sizes, np.random.default_rng(0))
    title, packages = "Cache and scheduling pass, CPU", ("torch", "sglang")
    report = Report(title, NOTES, args, packages, absent, repeats=sizes.repeats)
    wall, busy = time.perf_counter(), time.process_time()
    figures = measure(bench, args.only, report)
    share = (time.process_time() - busy) / (time.perf_counter() - wall)
    report.settings["share_of_a_core"] = round(share, 2)
    data = {
        "absent": absent,
        "figures": [
            {**asdict(f), "ratio": f.value / figures[0].value if f.unit == "us" else None}
            for f in figures
        ],
    }
    report.finish("cache-cpu", data)


if __name__ == "__main__":
    main()
