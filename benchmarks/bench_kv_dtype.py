"""Steps of the CPU's decoder over K/V stored in different dtypes.

    python benchmarks/bench_kv_dtype.py [--model smollm2] [--dtype bfloat16] [--threads 1]
        [--kv-dtypes auto,int8] [--depths 512,4096] [--rows 1,8] [--steps 8] [--rounds 3]
        [--clock cpu] [--json]

Tokens a second of decode steps of several sequences after `depth` tokens each, and of a prefill of
512 tokens after as many of one sequence. Every sequence has K/V of its own, random numbers, in a
stretch of pages. Dtypes take turns in each round; the best of the rounds counts, and beside it the
median ratio to the first dtype of the same round. "auto" is the dtype of the model.

--clock cpu, on a machine with other work: seconds of the process's CPU time, divided by the
threads.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from itertools import product
from statistics import median

import numpy as np
import torch
from harness.arguments import Names, parse
from harness.cpu_model import CpuModel
from harness.report import Cell, print_table

from radixserve.models.cpu_decoder import CpuDecoder, load_cpu_decoder
from radixserve.models.source import find_model

NUM_PREFILL = 512
COLUMNS = ("step", "depth", "rows", "kv_dtype", "tokens/s, best", "ratio, median")
KV_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "int8": torch.int8}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measure(
    model: CpuDecoder, kv_dtype: torch.dtype | None, depth: int, num_rows: int, num_steps: int
) -> dict[str, float]:
    """Tokens a second of each kind of step, by CPU time or the wall clock."""
    longest = depth + max(num_steps, NUM_PREFILL if num_rows == 1 else 0)
    cache = CpuModel(model, num_rows, longest, kv_dtype)
    cache.fill()
    ids = np.arange(longest, dtype=np.int32) * 97 % model.info.vocab_size

    def seconds(count: int, calls: int) -> float:
        began = CLOCK()
        for first in range(depth, depth + calls * count, count):
            cache.forward(range(num_rows), ids[first : first + count], first, 1)
        return CLOCK() - began

    seconds(1, 1)
    rates = {"decode": num_rows * num_steps / seconds(1, num_steps)}
    if num_rows == 1:
        rates["prefill"] = NUM_PREFILL / seconds(NUM_PREFILL, 1)
    return rates


def main() -> None:
    global CLOCK
    numbers: dict[str, list[int]] = {"depths": [512, 4096], "rows": [1, 8]}
    names = {"kv_dtypes": Names("kv_dtype", KV_DTYPES), "json": False}
    args = parse(
        *(__doc__,),
        model="smollm2",
        dtype="bfloat16",
        threads=1,
        steps=8,
        rounds=3,
        clock="wall",
        **numbers,
        **names,
    )
    if args.clock not in ("wall", "cpu"):
        sys.exit("--clock is wall or cpu")
    torch.set_num_threads(args.threads)
    CLOCK = time.perf_counter
    if args.clock == "cpu":
        CLOCK = lambda: time.process_time() / args.threads  # noqa: E731
    model = load_cpu_decoder(find_model(args.model), DTYPES[args.dtype], None)
    rates: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for number in range(args.rounds):
        for depth, num_rows, name in product(args.depths, args.rows, args.kv_dtypes):
            own = measure(model, KV_DTYPES[name], depth, num_rows, args.steps)
            for step, rate in own.items():
                rates.setdefault((step, depth, num_rows), defaultdict(list))[name].append(rate)
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    table: list[list[Cell]] = []
    for key, of_dtypes in rates.items():
        first = of_dtypes[args.kv_dtypes[0]]
        for name, own in of_dtypes.items():
            ratio = median(rate / base for rate, base in zip(own, first, strict=True))
            table.append([*key, name, f"{max(own):.1f}", f"{ratio:.2f}"])
    print_table(args, COLUMNS, table, ("torch",))


if __name__ == "__main__":
    main()
