"""What a kv_store is worth and what it costs, engine beside engine in one run.

    python benchmarks/bench_store.py [--model tiny|small] [--dtype float32|bfloat16] [--tokens 4000]
        [--threads N] [--repeats N] [--quick] [--json] [--save DIR]

restart   first token of a prompt of so many tokens in a new process: cold, and from the store
nothing   requests that share nothing and find nothing stored, with a store and without: seconds,
          and CPU seconds of the process, its writer's included
thrash    closed rounds over more prompts than the pool holds, with a store and without
files     reading and writing runs of 32, 256 and 512 tokens beside plain files of the same size

The store's folder is a temporary one. Engines take turns; medians of the repeats.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness.arguments import RUN, parse
from harness.report import Cell, Report, Section, Table
from harness.shapes import DTYPES, SHAPES, save_checkpoint
from harness.workloads import random_prompts

from radixserve import Runtime, SamplingParams
from radixserve.store import FolderStore, KVLayout, StoredPrefix, StoredPrefixes

GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
NOTES = (
    "Medians of the repeats; engines take turns. restart: wall seconds until the first token, K/V"
    " read from files that the system has in memory. nothing: CPU seconds of all threads."
    " files: bytes a second beside plain files of the same bytes, of read() and of write()."
)


class Bench:
    """A checkpoint, and engines over it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.vocab = SHAPES[args.model].vocab
        self.checkpoint = folder / "model"
        self.checkpoint.mkdir()
        save_checkpoint(SHAPES[args.model], args.dtype, self.checkpoint)

    def engine(self, store: Path | None, num_pages: int = 65_536, **settings: Any) -> Runtime:
        name = None if store is None else str(store)
        return Runtime(str(self.checkpoint), num_pages=num_pages, kv_store=name, **settings)

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        return random_prompts(count, length, self.vocab, seed)


def restart(bench: Bench) -> Section:
    store, count = bench.folder / "restart", bench.args.tokens
    (prompt,) = bench.prompts(1, count, 1)
    with bench.engine(store) as runtime:
        runtime.generate(prompt, GREEDY)
    seconds: dict[str, list[float]] = {"cold": [], "from the store": []}
    usage = None
    for _ in range(bench.args.repeats):
        for name in seconds:
            with bench.engine(store if name != "cold" else None) as runtime:
                runtime.generate(bench.prompts(1, 8, 2), GREEDY)  # what a first step costs
                began = time.perf_counter()
                usage = runtime.generate(prompt, GREEDY).usage
                seconds[name].append(time.perf_counter() - began)
    assert usage is not None
    rows: list[list[Cell]] = [
        [name, round(1e3 * median(samples), 1), round(median(seconds["cold"]) / median(samples), 1)]
        for name, samples in seconds.items()
    ]
    title = f"first token of {count} tokens after a restart; {usage.computed_tokens} computed"
    return Section(title, Table(["prompt", "ms", "x cold"], rows))


def nothing_shared(bench: Bench) -> Section:
    names = ("without", "with a store", 'with kv_store_write="reuse"')
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    params = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    for number in range(bench.args.repeats):
        prompts = bench.prompts(32, 200, number)
        for name in names:
            store = None if name == "without" else bench.folder / f"nothing-{number}-{name}"
            write = "reuse" if "reuse" in name else "finish"
            with bench.engine(store, kv_store_write=write) as runtime:
                runtime.generate(bench.prompts(1, 8, 2), GREEDY)
                began, cpu = time.perf_counter(), time.process_time()
                runtime.generate(prompts, params)
                wall_s = time.perf_counter() - began
            seconds[name].append((wall_s, time.process_time() - cpu))
            if store is not None:
                shutil.rmtree(store)
    rows: list[list[Cell]] = []
    bases = [median(samples) for samples in zip(*seconds["without"], strict=True)]
    for name in names:
        medians = [median(samples) for samples in zip(*seconds[name], strict=True)]
        ratios = [round(value / base, 3) for value, base in zip(medians, bases, strict=True)]
        rows.append([name, round(medians[0], 3), ratios[0], round(medians[1], 3), ratios[1]])
    title = "32 requests of 200 tokens and 32 more, nothing shared"
    return Section(title, Table(["engine", "s", "x without", "CPU s", "x without"], rows))


def thrash(bench: Bench) -> Section:
    """Prompts in turn, more than the pool holds: with lru none is found again in memory."""
    length, count = 400, 12
    prompts = bench.prompts(count, length, 3)
    rows: list[list[Cell]] = []
    base = 0.0
    for name in ("without", "with a store"):
        store = bench.folder / "thrash" if name != "without" else None
        with bench.engine(store, num_pages=length * count // 2) as runtime:
            for prompt in prompts:
                runtime.generate(prompt, GREEDY)
            began, computed = time.perf_counter(), 0
            for _ in range(3):
                for prompt in prompts:
                    computed += runtime.generate(prompt, GREEDY).usage.computed_tokens
            seconds = time.perf_counter() - began
        base = base or seconds
        rows.append([name, computed, round(seconds, 3), round(base / seconds, 2)])
    title = f"three rounds over {count} prompts of {length} tokens, room for half of them"
    return Section(title, Table(["engine", "computed", "s", "x faster"], rows))


def files(bench: Bench) -> Section:
    columns = ["tokens", "bytes a token", "x K/V", "write GB/s", "read GB/s", "x write", "x read"]
    rows = [_files_of(bench, count) for count in (32, 256, 512)]
    return Section("runs beside plain files of the same bytes", Table(columns, rows))


def _files_of(bench: Bench, num_tokens: int) -> list[Cell]:
    """A row of `files`: runs of so many tokens."""
    shape = SHAPES[bench.args.model]
    itemsize = 4 if bench.args.dtype == "float32" else 2
    sizes = shape.num_layers, shape.num_kv_heads, shape.head_dim
    layout = KVLayout(*sizes, bench.args.dtype, itemsize)
    folder = bench.folder / f"files-{num_tokens}"
    prefixes = StoredPrefixes(FolderStore(folder, 1 << 40), "0" * 32, layout)
    kv_shape = layout.num_layers, 2, num_tokens, layout.row_bytes
    kv = np.random.default_rng(0).integers(0, 255, kv_shape, np.uint8)
    count, data = min(200, max(20, (64 << 20) // kv.nbytes)), kv.tobytes()
    prompts = bench.prompts(count, num_tokens - 1, 5)
    sequences = [np.array([first, *prompt], np.int32) for first, prompt in enumerate(prompts)]

    def write_runs() -> None:
        for tokens in sequences:
            list(prefixes.put(tokens, "", StoredPrefix(0, [], ""), kv))

    def read_runs() -> None:
        for tokens in sequences:
            (run,) = prefixes.match(tokens).runs
            assert prefixes.read(run, tokens) is not None

    def write_files() -> None:
        for index in range(count):
            (folder / f"plain-{index}").write_bytes(data)

    def read_files() -> None:
        for index in range(count):
            (folder / f"plain-{index}").read_bytes()

    num_bytes = len(data) * count
    ours = [_rate(num_bytes, work) for work in (write_runs, read_runs)]
    plain = [_rate(num_bytes, work) for work in (write_files, read_files)]
    on_disk = sum(file.num_bytes for file in prefixes.store.list()) / (count * num_tokens)
    shutil.rmtree(folder)
    ratios = [round(rate / other, 2) for rate, other in zip(ours, plain, strict=True)]
    rates = [round(rate / 1e9, 2) for rate in ours]
    return [num_tokens, round(on_disk), round(on_disk / layout.token_bytes, 3), *rates, *ratios]


def _rate(num_bytes: int, work: Callable[[], None]) -> float:
    """Bytes a second, the best of three."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return num_bytes / min(seconds)


def main() -> None:
    models = tuple(name for name in SHAPES if name in ("tiny", "small"))
    args = parse(__doc__, model=models, dtype=DTYPES, tokens=4000, **RUN)
    if args.quick:
        args.tokens = 400
    report = Report(f"K/V on disk, {args.model} model, {args.dtype}, CPU", NOTES, args)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        for measure in (restart, nothing_shared, thrash, files):
            report.add(measure(bench))
    tables = {section.title: section.table.rows for section in report.sections}
    report.finish(f"store-cpu-{args.model}-{args.dtype}", {"tables": tables})


if __name__ == "__main__":
    main()
