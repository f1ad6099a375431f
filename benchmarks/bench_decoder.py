"""The CPU's decoder alone, without the engine, by form of its weights, beside llama.cpp's.

    python benchmarks/bench_decoder.py [--model smollm2] [--threads 1,2] [--depths 0,4096]
        [--rows 8,32] [--rounds 3] [--forms float32,bfloat16,int8,file] [--llama DIR] [--clock cpu]
        [--activation-bits 16] [--json]

Tokens a second of the wall clock, the best of the rounds: prefill of 512 tokens and decode of one
sequence, each after `depth` tokens; decode steps of several sequences after 128 tokens each. Forms
and programs take turns in each round. DIR holds llama.cpp's llama-bench, llama-batched-bench and
llama-quantize; the files that they read are written from the same GGUF file into DIR. Keys and
values have 16 bits, beside float32 weights 32 bits in ours and in llama-batched-bench; llama-bench
takes no float32 for them.

--clock cpu, on a machine with other work: seconds are those of the process's CPU time, divided by
the threads. Of the time that one thread waits for the other only what it spins counts, up to 50 us:
rates of two threads are what they reach at best. llama.cpp does not tell its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np
import torch
from engine.llama import quantize
from harness.arguments import Names, parse
from harness.cpu_model import CpuModel
from harness.report import Cell, print_table

from radixserve.models.cpu_decoder import CpuDecoder, load_cpu_decoder
from radixserve.models.source import find_model

NUM_PREFILL = 512
NUM_DECODES = 32
ROW_DEPTH = 128  # tokens of each sequence before decode steps of several
FORMS = {  # our dtype of activations, K and V, and weight_dtype; llama.cpp's file type
    "float32": (torch.float32, None, "F32"),
    "bfloat16": (torch.bfloat16, None, "BF16"),
    "int8": (torch.bfloat16, "int8", "Q8_0"),
    "file": (torch.bfloat16, "auto", None),
}
COLUMNS = ("form", "threads", "step", "radixserve, best (median)", "llama.cpp", "ratio")
Rates = dict[str, float]  # tokens a second by what is measured


def ours(
    model: CpuDecoder, threads: int, depths: list[int], rows: list[int], is_cpu_time: bool
) -> Rates:
    torch.set_num_threads(threads)
    rates: Rates = {}
    clock = (lambda: time.process_time() / threads) if is_cpu_time else time.perf_counter
    ids = np.arange(max(depths) + NUM_PREFILL, dtype=np.int32) * 97 % model.info.vocab_size

    def spent(cache: CpuModel, sequences: range, first: int, count: int, calls: int = 1) -> float:
        """Seconds of so many steps of `count` tokens of each sequence after `first` ones."""
        began = clock()
        for start in range(first, first + calls * count, count):
            cache.forward(sequences, ids[start : start + count], start, 1)
        return clock() - began

    def fill(cache: CpuModel, sequences: range, num_tokens: int) -> None:
        for first in range(0, num_tokens, NUM_PREFILL):
            spent(cache, sequences, first, min(NUM_PREFILL, num_tokens - first))

    alone = CpuModel(model, 1, len(ids))
    for depth in sorted(depths):
        fill(alone, range(1), depth)
        rates[f"prefill at {depth}"] = NUM_PREFILL / spent(alone, range(1), depth, NUM_PREFILL)
        seconds = spent(alone, range(1), depth, 1, NUM_DECODES)
        rates[f"decode at {depth}"] = NUM_DECODES / seconds
    if rows:
        several = CpuModel(model, max(rows), ROW_DEPTH + NUM_DECODES)
        for row in range(max(rows)):
            fill(several, range(row, row + 1), ROW_DEPTH)
        for size in rows:
            seconds = spent(several, range(size), ROW_DEPTH, 1, NUM_DECODES)
            rates[f"decode of {size} rows"] = size * NUM_DECODES / seconds
    return rates


def llama(file: Path, kv_type: str, threads: int, args: argparse.Namespace) -> Rates:
    rates: Rates = {}
    folder, rows = args.llama, args.rows
    bench = [folder / "llama-bench", "-p", NUM_PREFILL, "-n", NUM_DECODES, "-r", 1,
             "-o", "jsonl", "-d", _text(args.depths), "-m", file, "-t", threads]  # fmt: skip
    for line in _json_lines(bench):
        kind = "prefill" if line["n_prompt"] else "decode"
        rates[f"{kind} at {line['n_depth']}"] = line["avg_ts"]
    if rows:
        size = max(rows) * (ROW_DEPTH + NUM_DECODES)
        kv = ["-ctk", kv_type, "-ctv", kv_type]
        batched = [folder / "llama-batched-bench", *kv, "-m", file, "-t", threads, "-tb", threads,
                   "-c", size, "-npp", ROW_DEPTH, "-ntg", NUM_DECODES, "-npl", _text(rows),
                   "--output-format", "jsonl"]  # fmt: skip
        for line in _json_lines(batched):
            rates[f"decode of {line['pl']} rows"] = line["speed_tg"]
    return rates


def _json_lines(command: list[object]) -> Iterator[dict[str, float]]:
    text = subprocess.run(
        list(map(str, command)), check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).stdout.decode()
    return (json.loads(line) for line in text.splitlines() if line.startswith("{"))


def main() -> None:
    numbers: dict[str, list[int]] = {"threads": [1], "depths": [0], "rows": []}
    more = {"forms": Names("form", FORMS), "llama": Path, "json": False}
    args = parse(
        __doc__, model="smollm2", rounds=3, clock="wall", activation_bits=16, **numbers, **more
    )
    if args.clock not in ("wall", "cpu") or (args.clock == "cpu" and args.llama):
        sys.exit("--clock is wall or cpu, and wall beside llama.cpp")
    source = find_model(args.model)
    bits = args.activation_bits
    models = {name: load_cpu_decoder(source, *FORMS[name][:2], bits) for name in args.forms}
    rates: dict[tuple[Cell, ...], dict[str, list[float]]] = {}
    for number in range(args.rounds):
        for threads, (name, model) in product(args.threads, models.items()):
            is_cpu = args.clock == "cpu"
            programs = {"radixserve": ours(model, threads, args.depths, args.rows, is_cpu)}
            if args.llama:
                kv_type = "f32" if name == "float32" else "f16"
                file = quantize(args.llama, Path(source.path), FORMS[name][2], args.llama)
                programs["llama.cpp"] = llama(file, kv_type, threads, args)
            for program, own in programs.items():
                for what, rate in own.items():
                    of_step = rates.setdefault((name, threads, what), defaultdict(list))
                    of_step[program].append(rate)
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    table = [[*key, *_cells(of["radixserve"], of["llama.cpp"])] for key, of in rates.items()]
    print_table(args, COLUMNS, table, ("torch",))


def _cells(ours: list[float], peers: list[float]) -> list[Cell]:
    """The last three of COLUMNS."""
    ratio = f"{max(ours) / max(peers):.2f}" if peers else None
    rates = [f"{max(of):.1f} ({median(of):.1f})" if of else None for of in (ours, peers)]
    return [*rates, ratio]


def _text(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


if __name__ == "__main__":
    main()
