"""How fast decode attention reads K and V, beside how fast the same cores read weights.

    python benchmarks/bench_attention.py [--dtypes float32,bfloat16,int8] [--threads 1]
        [--cases 1x4096,1x16384,32x512,256x512] [--orders sequence,runs,scattered,interleaved]
        [--heads 9x3x64] [--rounds 5] [--clock cpu] [--json]

GB of K and V a second in decode steps of a layer. A case is rows x tokens of each; every row has K
and V of its own. Heads are query heads x K/V heads x features, by default those of SmolLM2-135M.
RADIXSERVE_CPU_LEVEL=avx2 (or another level of this processor) chooses the instructions.

sequence     a row's tokens follow one another in the pool
runs         16 tokens follow one another; where the next 16 lie is random
scattered    where a token lies is random
interleaved  the rows' first tokens come first, then their second ones, as when rows decode together

Weights are those of an output layer of 49,152 tokens and 576 features, multiplied with one row, in
bfloat16, beside float32 in float32. A step's layers, and the weights, are 192 MB or more together,
so that none is in a cache. Weights and attention take turns in each round; the best of the rounds
counts, and beside it the ratio of both, with the median of the rounds' ratios. Of each call, what
it takes for one token of one row is taken off. K and V lie in large memory pages, as those of a
pool of 1 GiB or more do.

Two more columns say what bounds it, each measured alone. "reads", with one thread: a loop that only
reads the same rows in the same order. It prefetches in one of twelve ways: not at all, 8 to 32 rows
ahead into the first or second cache level, or, as attention does, at two or three distances of up
to 192 rows into the second. The one with the best median counts. "arithmetic": attention itself,
with keys and values that are all in the first cache level, since a row has the same 8 tokens again
and again.
The last column is attention beside the slower of both: 1 where all of the other hides behind it.
The lines of a case are printed when it has been measured.

int8 is the dtype of K and V in a bfloat16 model. --clock cpu, on a machine with other work:
seconds of the process's CPU time, divided by the threads.
"""

from __future__ import annotations

import argparse
import math
import time
from itertools import product
from statistics import median

import numpy as np
import torch
from harness.arguments import Names, parse
from harness.read_rows import PREFETCHES, Prefetch, RowReader
from harness.report import Cell, TablePrinter

from radixserve.arrays import IntArray
from radixserve.attention.cpu import CpuBackend
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest
from radixserve_kernels.cpu_attention import PagedAttention
from radixserve_kernels.cpu_weights import PackedWeight, fresh_memory
from radixserve_kernels.stored_kv import stored_width, to_stored

LEAST_BYTES = 192e6  # that are read before any of them is read again
VOCAB, FEATURES = 49_152, 576
RUN = 16
NEAR = 8  # tokens whose K and V are in the first cache level
COLUMNS = (
    *("dtype", "rows", "tokens", "order", "GB/s"),
    *("weights, GB/s", "ratio (median)", "reads, GB/s", "ratio (median)"),
    *("arithmetic, GB/s", "of the slower (median)"),
)
WIDEST: tuple[Cell, ...] = ("bfloat16", 1_000, 100_000, "interleaved", *("0.00 (0.00)",) * 7)
ORDERS = ("sequence", "runs", "scattered", "interleaved")
DTYPES = {  # of the model, of K and V
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "int8": (torch.bfloat16, torch.int8),
}


def slots(order: str, rows: int, tokens: int) -> IntArray:
    """[rows, tokens] where each token of each row lies."""
    numbers = np.arange(rows * tokens, dtype=np.int32)
    rng = np.random.default_rng(0)
    if order == "interleaved":
        return np.ascontiguousarray(numbers.reshape(tokens, rows).T)
    if order == "scattered":
        numbers = rng.permutation(numbers)
    if order == "runs":
        numbers = rng.permutation(numbers.reshape(-1, RUN))
    return numbers.reshape(rows, tokens)


class Layers:
    """Decode steps of several layers over one pool's K and V."""

    def __init__(self, name: str, heads: tuple[int, ...], rows: int, tokens: int) -> None:
        self._dtype, stored = DTYPES[name]
        num_heads, num_kv_heads, dim = heads
        layer = to_stored(torch.randn(2, rows * tokens, 1, num_kv_heads, dim), stored)
        self._layer_bytes = layer.nbytes
        num_layers = int(-(-LEAST_BYTES // layer.nbytes))
        width = stored_width(dim, stored)
        shape = (num_layers, 2, rows * tokens, 1, num_kv_heads, width)
        memory = fresh_memory(math.prod(shape) * stored.itemsize)
        pool = torch.from_numpy(memory).view(stored).view(shape)
        pool[:] = layer
        # Rows that have tokens in common, as those of `arithmetic_rate`, are on their own.
        self._backend = CpuBackend(pool, num_heads, dtype=self._dtype, shares=False)
        self._attention = PagedAttention(self._dtype)
        self._q = torch.randn(rows, num_heads, dim).to(self._dtype)

    def rate(self, pages: IntArray) -> float:
        """GB of K and V a second."""
        self._plan(pages[:1, :1])
        own = self._seconds(self._q[:1])
        self._plan(pages)
        return self._layer_bytes / (self._seconds(self._q) - own) / 1e9

    def arithmetic_rate(self, pages: IntArray) -> float:
        """GB of K and V a second where they are in the first cache level."""
        near = np.arange(pages.shape[1], dtype=np.int32) % NEAR
        return self.rate(np.tile(near, (pages.shape[0], 1)))

    def read_rate(self, reader: RowReader, pages: IntArray, prefetch: Prefetch) -> float:
        """GB a second where K and V are read and nothing is computed, by one thread."""
        began = CLOCK()
        for k, v in self._backend.slots:
            reader.read(k, v, pages, prefetch)
        return len(self._backend.slots) * self._layer_bytes / (CLOCK() - began) / 1e9

    def _plan(self, pages: IntArray) -> None:
        new, last = np.zeros(1, np.int32), pages.shape[1] - 1
        batch = [ScheduledRequest("", new, last, row, None, new) for row in pages]
        self._backend.plan(build_forward_batch(batch, 1, torch.device("cpu")))

    def _seconds(self, q: torch.Tensor) -> float:
        """Of a layer."""
        plan, scale = self._backend.planned, q.shape[-1] ** -0.5
        began = CLOCK()
        for k, v in self._backend.slots:
            self._attention.run(plan, q, k, v, scale)
        return (CLOCK() - began) / len(self._backend.slots)


class Weights:
    def __init__(self, dtype: torch.dtype) -> None:
        weight = torch.randn(VOCAB, FEATURES).to(dtype)
        count = int(-(-LEAST_BYTES // weight.nbytes))
        self._matrices = [PackedWeight(weight) for _ in range(count)]
        self._x = torch.randn(1, FEATURES).to(dtype)

    def rate(self) -> float:
        """GB a second."""
        began = CLOCK()
        for matrix in self._matrices:
            matrix(self._x)
        return sum(matrix.num_bytes for matrix in self._matrices) / (CLOCK() - began) / 1e9


def measure(
    name: str,
    case: tuple[int, ...],
    args: argparse.Namespace,
    weights: Weights,
    reader: RowReader | None,
) -> list[list[Cell]]:
    num_rows, num_tokens = case
    layers = Layers(name, numbers_of(args.heads), num_rows, num_tokens)
    attention: dict[str, list[float]] = {order: [] for order in args.orders}
    of_weights: dict[str, list[float]] = {order: [] for order in args.orders}
    rates_of = {
        order: {prefetch: list[float]() for prefetch in PREFETCHES} for order in args.orders
    }
    of_arithmetic: dict[str, list[float]] = {order: [] for order in args.orders}
    pages = {order: slots(order, num_rows, num_tokens) for order in args.orders}
    for _, order in product(range(args.rounds), args.orders):
        attention[order].append(layers.rate(pages[order]))
        of_weights[order].append(weights.rate())
        of_arithmetic[order].append(layers.arithmetic_rate(pages[order]))
        for prefetch in PREFETCHES if reader is not None else ():
            rates_of[order][prefetch].append(layers.read_rate(reader, pages[order], prefetch))
    rows: list[list[Cell]] = []
    for order, rates in attention.items():
        own: list[Cell] = [name, *case, order, max(rates)]
        of_reads = max(rates_of[order].values(), key=lambda rates: median(rates) if rates else 0)
        for others in (of_weights[order], of_reads):
            own += beside(rates, others) if others else [None, None]
        arithmetic, reads = of_arithmetic[order], of_reads or of_arithmetic[order]
        slower = [min(both) for both in zip(arithmetic, reads, strict=True)]
        bound = min(max(arithmetic), max(reads))
        rows.append([*own, max(arithmetic), ratio(rates, slower, max(rates) / bound)])
    return rows


def beside(rates: list[float], others: list[float]) -> list[Cell]:
    """The best of the others, and the ratio of the best, with the median of the rounds' ratios."""
    return [max(others), ratio(rates, others, max(rates) / max(others))]


def ratio(rates: list[float], others: list[float], of_best: float) -> str:
    middle = median(rate / other for rate, other in zip(rates, others, strict=True))
    return f"{of_best:.2f} ({middle:.2f})"


def numbers_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def main() -> None:
    global CLOCK
    args = parse(
        __doc__,
        dtypes=Names("dtype", DTYPES),
        threads=1,
        cases=["1x4096", "1x16384", "32x512", "256x512"],
        orders=Names("order", ORDERS),
        heads="9x3x64",
        rounds=5,
        clock=("wall", "cpu"),
        json=False,
    )
    torch.set_num_threads(args.threads)
    CLOCK = time.perf_counter
    if args.clock == "cpu":
        CLOCK = lambda: time.process_time() / args.threads  # noqa: E731
    printer = TablePrinter(args, COLUMNS, WIDEST, ("torch",))
    reader = RowReader() if args.threads == 1 else None
    for name in args.dtypes:
        weights = Weights(DTYPES[name][0])
        for case in args.cases:
            printer.add(measure(name, numbers_of(case), args, weights, reader))
    printer.finish()


if __name__ == "__main__":
    main()
