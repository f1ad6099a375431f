"""What a kv_store is worth and what it costs, engine beside engine in one run.

    python benchmarks/bench_store.py [--model tiny|small] [--dtype float32|bfloat16] [--tokens 4000]
        [--only NAMES] [--passes N] [--trace FILE] [--requests N] [--threads N] [--repeats N]
        [--quick] [--json] [--save DIR]

restart   first token of a prompt of so many tokens in a new process: cold, and from the store
workloads W1 to W5 of bench_engine.py (--workload NAMES) with a store and without, in bursts, each
          --passes times: after the first time the same prompts return, in W4 others. With room for
          everything, and with a pool of a third of the distinct tokens, or of the longest request:
          what a request leaves is evicted by those that follow. Pairs take turns; the median of
          their ratios, by wall time and by the process's CPU time until the last answer; "written":
          until the idle engine has written all. Microseconds a token and the break-even in tokens
          are what the engine measured
path      CPU seconds of the engine's thread in W1 and W4, and those of them for the store; what it
          does when all answers are out counts, too
thrash    closed rounds over more prompts than the pool holds, with a store and without
files     writing and reading runs of 32, 256 and 512 tokens beside plain files of the same size,
          read into memory that was used before; x load: reading, and putting the K/V into pages of
          1 and 16 tokens, in order and shuffled, one after the other in one thread
agents    with --trace FILE, a text trace of `radixserve replay`: its first --requests prompts, one
          after the other, through a tiny model: hit rates of a pool that holds everything, of one
          of two prompts, and of that with a store of 20 times its size
late      two streams decode while a new prompt arrives each half second: the gaps between their
          tokens with a store that answers and with one that hangs, in turns, and how long the
          prompts took
break-even  from how many tokens on a load is faster than computing, by what the engine measured

--only chooses sections, between commas.

The store's folder is a temporary one. Engines take turns; medians of the repeats.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from harness.arguments import RUN, Names, parse
from harness.report import Cell, Report, Section, Table
from harness.shapes import DTYPES, SHAPES, save_checkpoint
from harness.workloads import FULL, QUICK, Workload, make_workload, random_prompts

from radixserve import Runtime, SamplingParams
from radixserve.engine.engine import Engine
from radixserve.replay.reader import read_trace
from radixserve.runner.kv_layout import KVLayout
from radixserve.store import FolderStore, StoredPrefix, StoredPrefixes
from radixserve.store.buffers import slots_of
from radixserve.store.connector import KVConnector

GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
NOTES = (
    "Medians of the repeats; engines take turns. Files are in the system's memory. restart: wall"
    " seconds until the first token. workloads: wall seconds until the last answer; x: without a"
    " store / with one, the median of pairs; computed, loaded, written: tokens. x K/V: bytes"
    " written for each byte of K/V. x write, x read, x load: beside plain files, the median"
    " of pairs."
)


class Bench:
    """A checkpoint, and engines over it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.vocab = SHAPES[args.model].vocab
        self.checkpoint = folder / "model"
        self.checkpoint.mkdir()
        save_checkpoint(SHAPES[args.model], args.dtype, self.checkpoint)

    @property
    def layout(self) -> KVLayout:
        shape, dtype = SHAPES[self.args.model], self.args.dtype
        sizes = shape.num_layers, shape.num_kv_heads, shape.head_dim
        return KVLayout(*sizes, dtype, 4 if dtype == "float32" else 2)

    @property
    def token_bytes(self) -> int:
        return self.layout.token_bytes

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


def workloads(bench: Bench) -> Section:
    """Each workload is run twice in an engine. The second time the prompts are the same, as of
    users who return; those of W4 are others, so that nothing is shared."""
    sizes, rows = QUICK if bench.args.quick else FULL, []
    for name in bench.args.workload:
        seeds = range(bench.args.passes) if name == "W4" else [0] * bench.args.passes
        passes = [make_workload(name, sizes[name], bench.vocab, seed) for seed in seeds]
        first = passes[0]
        size, num_sessions = sizes[name], len(first.rounds[0])
        longest = size.shared + size.rounds * (size.own + size.new)
        distinct = size.shared + num_sessions * (longest - size.shared)
        pools = {"all": 65_536, "small": max(distinct // 3, longest + 8)}
        for pool, num_pages in pools.items():
            samples: dict[str, list[WorkloadRun]] = {"without": [], "auto": [], "finish": []}
            for repeat in range(bench.args.repeats):
                for kind in list(samples)[:: 1 if repeat % 2 else -1]:
                    samples[kind].append(_run_workload(bench, passes, num_pages, kind))
            plain = samples["without"]
            ratios = [
                round(median(getattr(a, clock) / getattr(b, clock) for a, b in pairs), 3)
                for kind, clocks in (
                    ("auto", ("seconds", "cpu_seconds", "all_cpu_seconds")),
                    ("finish", ("seconds", "cpu_seconds")),
                )
                for pairs in [list(zip(plain, samples[kind], strict=True))]
                for clock in clocks
            ]
            of_store = samples["auto"][-1]
            counts = [plain[-1].computed, of_store.computed, of_store.loaded, of_store.written]
            seconds = round(median(run.seconds for run in plain), 3)
            costs = [
                round(median(getattr(run, cost) for run in samples["auto"]), 1)
                for cost in ("compute_us", "load_us", "write_us", "break_even")
            ]
            pages = num_pages if pool == "small" else pool
            rows.append([name, pages, seconds, *ratios, *counts, *costs])
    columns = [
        *("workload", "pool", "s without", "x wall", "x CPU", "x CPU, written"),
        *('x wall "finish"', 'x CPU "finish"', "computed without", "computed", "loaded"),
        *("written", "us computed", "us loaded", "us written", "break-even"),
    ]
    title = f"throughput with a store, each workload {bench.args.passes} times"
    return Section(title, Table(columns, rows))


class WorkloadRun(NamedTuple):
    """What an engine did until its last answer, and until its store was written."""

    seconds: float  # until the last answer
    cpu_seconds: float  # of the whole process, until the last answer
    all_cpu_seconds: float  # until all was written
    computed: int  # prompt tokens
    loaded: int = 0
    written: int = 0
    compute_us: float = 0.0  # for each token, as the engine measured it
    load_us: float = 0.0
    write_us: float = 0.0
    break_even: float = 0.0  # tokens from which on a load pays, by that


def _run_workload(
    bench: Bench, passes: Sequence[Workload], num_pages: int, kind: str
) -> WorkloadRun:
    """Workloads one after the other in an engine. `kind`: "without", or a `kv_store_write`."""
    store = None if kind == "without" else bench.folder / "workload"
    write = "auto" if kind == "without" else kind
    params = SamplingParams(max_tokens=passes[0].num_new, temperature=0.0, ignore_eos=True)
    with bench.engine(store, num_pages=num_pages, kv_store_write=write) as runtime:
        runtime.generate(bench.prompts(1, 8, 2), GREEDY)
        computed, began, began_cpu = 0, time.perf_counter(), time.process_time()
        for workload in passes:
            computed += _ask(runtime, workload, params)
        seconds = time.perf_counter() - began
        cpu_seconds = time.process_time() - began_cpu
        if store is None:
            return WorkloadRun(seconds, cpu_seconds, cpu_seconds, computed)
        while runtime.cache_stats()["kv_store"]["unsaved_requests"]:
            time.sleep(0.001)
        runtime.check()  # waits for the writes
        all_cpu_seconds = time.process_time() - began_cpu
        stats = runtime.cache_stats()
    shutil.rmtree(store)
    counts = stats["kv_store"]
    costs = _costs(bench, stats)
    return WorkloadRun(
        seconds,
        cpu_seconds,
        all_cpu_seconds,
        computed,
        counts["loaded_tokens"],
        counts["written_tokens"],
        *costs,
    )


def _costs(bench: Bench, stats: Any) -> tuple[float, float, float, float]:
    """Microseconds to compute, load and write a token, and from how many tokens on a load pays."""
    compute_us = 1e6 * stats["prefill_s"] / max(1, stats["prefilled_tokens"])
    load_us = 1e6 * bench.token_bytes / stats["kv_store"]["read_bytes_per_s"]
    write_us = stats["kv_store"]["write_ns_per_kb"] * bench.token_bytes / 1e6
    saved_us = compute_us - load_us
    latency_us = stats["kv_store"]["load_latency_us"]
    return compute_us, load_us, write_us, latency_us / saved_us if saved_us > 0 else float("inf")


def _ask(runtime: Runtime, workload: Workload, params: SamplingParams) -> int:
    """All rounds of a workload; returns the prompt tokens computed."""
    histories: list[list[int]] = [[] for _ in workload.rounds[0]]
    computed = 0
    for additions in workload.rounds:
        prompts = [[*old, *new] for old, new in zip(histories, additions, strict=True)]
        completions = runtime.generate(prompts, params)
        computed += sum(completion.usage.computed_tokens for completion in completions)
        histories = [
            prompt + completion.token_ids
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
    return computed


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
    counts, orders = (32, 256, 512), [("in order", 1), ("shuffled", 16), ("shuffled", 1)]
    rows = [_files_of(bench, count) for count in counts]
    title, columns = (
        "runs beside plain files of the same bytes",
        [
            *("tokens", "bytes a token", "x K/V", "write GB/s", "read GB/s", "x write", "x read"),
            *(f"x load, {page_size} {order}" for order, page_size in orders),
        ],
    )
    for row, count in zip(rows, counts, strict=True):
        row += [_load_ratio(bench, count, page_size, order) for order, page_size in orders]
    return Section(title, Table(columns, rows))


class RunFiles:
    """Runs of so many tokens in a store, and plain files of the same bytes."""

    def __init__(self, bench: Bench, num_tokens: int) -> None:
        layout = bench.layout
        self.folder = bench.folder / f"files-{num_tokens}"
        self.prefixes = StoredPrefixes(FolderStore(self.folder, 1 << 40), "0" * 32, layout)
        kv_shape = layout.num_layers, 2, num_tokens, layout.row_bytes
        self.kv = np.random.default_rng(0).integers(0, 255, kv_shape, np.uint8)
        self.data = self.kv.tobytes()
        self.count = min(200, max(8, (64 << 20) // len(self.data)))
        prompts = bench.prompts(self.count, num_tokens - 1, 5)
        self.sequences = [np.array([first, *rest], np.int32) for first, rest in enumerate(prompts)]
        self.used = np.zeros(self.prefixes.max_file_bytes, np.uint8)  # the system has mapped it

    def write_runs(self) -> None:
        for tokens in self.sequences:
            list(self.prefixes.put(tokens, "", StoredPrefix(0, [], ""), [self.kv]))

    def read_runs(self) -> Iterator[np.ndarray]:
        for tokens in self.sequences:
            (run,) = self.prefixes.match(tokens).runs
            kv = self.prefixes.read(run, tokens, self.used.data)
            assert kv is not None
            yield kv

    def write_files(self) -> None:
        for index in range(self.count):
            (self.folder / "new").write_bytes(self.data)
            (self.folder / "new").replace(self.folder / f"plain-{index}")

    def read_files(self) -> None:
        for index in range(self.count):
            with open(self.folder / f"plain-{index}", "rb", buffering=0) as file:
                file.readinto(self.used.data[: len(self.data)])

    def compare(
        self, ours: Callable[[], object], plain: Callable[[], object], repeats: int
    ) -> tuple[float, float]:
        """Median bytes a second of `ours`, and the median ratio to those of `plain`; the two take
        turns."""
        samples: tuple[list[float], list[float]] = [], []
        for number in range(repeats):
            for side in (0, 1) if number % 2 else (1, 0):
                seconds = _seconds((ours, plain)[side])
                samples[side].append(len(self.data) * self.count / seconds)
        os.sync()  # else what was written is still written to the disk beside what follows
        return median(samples[0]), median(a / b for a, b in zip(*samples, strict=True))


def _files_of(bench: Bench, num_tokens: int) -> list[Cell]:
    """A row of `files`: runs of so many tokens."""
    files, repeats = RunFiles(bench, num_tokens), 1 if bench.args.quick else 10
    rates, ratios = zip(
        files.compare(files.write_runs, files.write_files, repeats),
        files.compare(lambda: list(files.read_runs()), files.read_files, repeats),
        strict=True,
    )
    on_disk = sum(file.num_bytes for file in files.prefixes.store.list())
    on_disk_token = on_disk / (files.count * num_tokens)
    shutil.rmtree(files.folder)
    numbers = round(on_disk_token), round(on_disk_token / bench.token_bytes, 3)
    return [num_tokens, *numbers, *(round(rate / 1e9, 2) for rate in rates), *np.round(ratios, 2)]


def _load_ratio(bench: Bench, num_tokens: int, page_size: int, order: str) -> Cell:
    """A run is read and put into pages: its speed beside that of reading a plain file."""
    files, num_pages = RunFiles(bench, num_tokens), 4 * num_tokens // page_size
    with bench.engine(None, num_pages=num_pages, page_size=page_size) as runtime:
        pool, *_ = runtime._core._engine.runner.storable_pool()  # type: ignore[attr-defined]
        pages = np.arange(num_pages)
        if order == "shuffled":
            pages = np.random.default_rng(0).permutation(num_pages)
        slots = slots_of(pages, 0, num_tokens, page_size)

        def load() -> None:
            for kv in files.read_runs():
                pool.write(slots, kv)

        files.write_runs()
        files.write_files()
        os.sync()
        _, ratio = files.compare(load, files.read_files, 1 if bench.args.quick else 10)
    shutil.rmtree(files.folder)
    return round(ratio, 2)


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def agents(bench: Bench) -> Section:
    trace = read_trace(bench.args.trace)
    count = min(bench.args.requests, len(trace))
    prompts = [trace.request(index).prompt % (bench.vocab - 8) + 8 for index in range(count)]
    longest = max(map(len, prompts)) + 8
    folder = bench.folder / "agents"
    folder.mkdir()
    save_checkpoint(replace(SHAPES["tiny"], max_positions=longest), bench.args.dtype, folder)
    pool, total = 2 * longest, sum(map(len, prompts))
    rows: list[list[Cell]] = []
    rates: list[float] = []
    for name in ("everything", "two prompts", "two prompts and a store of 20 times that"):
        settings: dict[str, Any] = {"num_pages": total if name == "everything" else pool}
        if "store" in name:
            settings["kv_store"] = str(bench.folder / "agents-kv")
            token_bytes = 4 * 2 * 2 * 64 * (4 if bench.args.dtype == "float32" else 2)
            settings["kv_store_size"] = 20 * pool * token_bytes
        with Runtime(str(folder), **settings) as runtime:
            began = time.perf_counter()
            for prompt in prompts:
                runtime.generate(prompt.tolist(), GREEDY)
            seconds = time.perf_counter() - began
            stats = runtime.cache_stats()
        rates.append(stats["hit_rate"])
        loaded = stats.get("kv_store", {}).get("loaded_tokens", 0)
        ratio = round(rates[-1] / rates[0], 4)
        rows.append([name, round(rates[-1], 4), ratio, loaded, round(seconds, 1)])
    title = f"{count} prompts of {bench.args.trace}, {total} tokens, the longest of {longest - 8}"
    columns = ["pool", "hit rate", "x everything", "loaded", "s"]
    return Section(title, Table(columns, rows))


def break_even(bench: Bench) -> Section:
    """By what an engine has measured after a prompt was computed and loaded."""
    (prompt,) = bench.prompts(1, bench.args.tokens, 6)
    store = bench.folder / "break-even"
    with bench.engine(store) as runtime:
        runtime.generate(prompt, GREEDY)
    with bench.engine(store) as runtime:
        runtime.generate(prompt, GREEDY)  # loads
        runtime.generate(bench.prompts(1, bench.args.tokens, 7), GREEDY)  # computes
        stats = runtime.cache_stats()
    bandwidth = stats["kv_store"]["read_bytes_per_s"]
    compute_us, load_us, _, tokens = _costs(bench, stats)
    row = [round(bandwidth / 1e9, 2), round(load_us, 2), round(compute_us, 1), round(tokens, 1)]
    columns = ["read GB/s", "us a token, loaded", "us a token, computed", "break-even, tokens"]
    return Section("when a load pays", Table(columns, [row]))


def path(bench: Bench) -> Section:
    """CPU seconds of the engine's thread, which other work on the machine changes little."""
    rows: list[list[Cell]] = []
    for name in ("W1", "W4"):
        workload = make_workload(name, (QUICK if bench.args.quick else FULL)[name], bench.vocab, 0)
        for pool, num_pages in (("all", 65_536), ("half", workload.num_tokens // 2)):
            spent = {"store": 0.0, "steps": 0.0}
            with ExitStack() as stack:
                for owner, method, part in (
                    (KVConnector, "on_release", "store"),
                    (KVConnector, "after_step", "store"),
                    (KVConnector, "before_step", "store"),
                    (KVConnector, "hold", "store"),
                    (Engine, "begin_step", "steps"),
                    (Engine, "end_step", "steps"),
                ):
                    timed = _timed(getattr(owner, method), spent, part)
                    stack.enter_context(patch.object(owner, method, timed))
                _run_workload(bench, [workload], num_pages, "finish")
            share = round(100 * spent["store"] / spent["steps"], 2)
            rows.append([name, pool, round(spent["steps"], 3), round(spent["store"], 4), share])
    columns = ["workload", "pool", "CPU s of steps", "of the store", "%"]
    return Section("the store in the engine's thread", Table(columns, rows))


def _timed(function: Callable[..., Any], spent: dict[str, float], part: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[part] += time.thread_time() - began

    return call


def late(bench: Bench) -> Section:
    """The other requests' gaps beside a store that hangs."""
    rows: list[list[Cell]] = []
    gaps_of: dict[bool, list[list[float]]] = {False: [], True: []}  # by whether the store hangs
    for turn in range(bench.args.repeats):
        for hangs in (False, True) if turn % 2 == 0 else (True, False):
            gaps, waits = _gaps(bench, turn, hangs=hangs)
            p50, p99 = (1e3 * float(np.percentile(gaps, share)) for share in (50, 99))
            gaps_of[hangs].append(gaps)
            name = "hangs" if hangs else "answers"
            rows.append([name, len(gaps), round(p50, 2), round(p99, 2), round(max(waits), 3)])
    hanging, quiet = ([_p99(gaps) for gaps in gaps_of[hangs]] for hangs in (True, False))
    ratios = [late / calm for late, calm in zip(hanging, quiet, strict=True)]
    pooled = _p99(np.concatenate(gaps_of[True])) / _p99(np.concatenate(gaps_of[False]))
    columns = ["store", "gaps", "p50 ms", "p99 ms", "longest prompt s"]
    lines = [
        f"p99, hanging against answering: {median(ratios):.2f} (median of pairs), "
        f"{pooled:.2f} (all gaps together)"
    ]
    return Section("other requests beside a store that hangs", Table(columns, rows), lines)


def _p99(gaps: Sequence[float] | np.ndarray) -> float:
    return float(np.percentile(gaps, 99))


def _gaps(bench: Bench, turn: int, *, hangs: bool) -> tuple[list[float], list[float]]:
    """Seconds between the tokens of two streams, and seconds that the prompts took."""
    folder, let_go = bench.folder / f"late-{turn}-{hangs}", threading.Event()
    gaps: list[float] = []
    waits: list[float] = []
    get = FolderStore.get

    def hang(store: FolderStore, *args: Any) -> Any:
        let_go.wait(60)
        return get(store, *args)

    with ExitStack() as stack:
        runtime = stack.enter_context(bench.engine(folder, kv_store_write="evict"))
        runtime.generate(bench.prompts(1, 40, 1), GREEDY)
        if hangs:
            stack.enter_context(patch.object(FolderStore, "get", hang))
        stack.callback(let_go.set)
        end = time.monotonic() + (0.5 if bench.args.quick else 8.0)

        def stream(number: int) -> None:
            last = 0.0
            params = SamplingParams(max_tokens=50_000, temperature=0.0, ignore_eos=True)
            for _ in runtime.stream([5, 6, 7 + number], params):
                now = time.monotonic()
                if last:
                    gaps.append(now - last)
                last = now
                if now > end:
                    return

        def ask(number: int) -> None:
            (prompt,), began = bench.prompts(1, 40, 1000 * turn + number + 2), time.monotonic()
            runtime.generate([prompt], GREEDY)
            waits.append(time.monotonic() - began)

        threads = [threading.Thread(target=stream, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        number = 0
        while not number or time.monotonic() < end - 1.5:
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            number += 1
            time.sleep(0.5)
        for thread in threads:
            thread.join()
    return gaps, waits


SECTIONS = {
    "restart": restart,
    "workloads": workloads,
    "path": path,
    "thrash": thrash,
    "files": files,
    "break-even": break_even,
    "agents": agents,
    "late": late,
}


def main() -> None:
    models = tuple(name for name in SHAPES if name in ("tiny", "small"))
    only = Names("section", SECTIONS)
    options = {"model": models, "dtype": DTYPES, "tokens": 4000, "only": only, **RUN}
    options["workload"] = Names("workload", FULL)
    args = parse(__doc__, trace=str, requests=600, passes=2, **options)
    if args.quick:
        args.tokens = 400
    report = Report(f"K/V on disk, {args.model} model, {args.dtype}, CPU", NOTES, args)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        for name in args.only:
            if name != "agents" or args.trace is not None:
                report.add(SECTIONS[name](bench))
    tables = {section.title: section.table.rows for section in report.sections}
    report.finish(f"store-cpu-{args.model}-{args.dtype}", {"tables": tables})


if __name__ == "__main__":
    main()
