"""The CPU's decoder alone, without the engine, by form of its weights, beside llama.cpp's.

    python benchmarks/bench_decoder.py [--model smollm2] [--threads 1,2] [--depths 0,4096]
        [--rows 8,32] [--rounds 3] [--forms float32,bfloat16,int8,file] [--llama DIR] [--json FILE]

Tokens a second of the wall clock, the best of the rounds: prefill of 512 tokens and decode of one
sequence, each after `depth` tokens; decode steps of several sequences after 128 tokens each. Forms
and programs take turns in each round. DIR holds llama.cpp's llama-bench, llama-batched-bench and
llama-quantize; the files that they read are written from the same GGUF file into DIR. Keys and
values have 16 bits, beside float32 weights 32 bits in ours and in llama-batched-bench; llama-bench
takes no float32 for them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from radixserve.attention.base import ForwardBatch, HostIndex
from radixserve.attention.cpu import CpuBackend
from radixserve.models.cpu_decoder import CpuDecoder, load_cpu_decoder
from radixserve.models.source import find_model

NUM_PREFILL = 512
NUM_DECODES = 32
ROW_DEPTH = 128  # tokens of each sequence before decode steps of several
FORMS = {  # our weight_dtype and dtype of activations, K and V; llama.cpp's file type
    "float32": (None, torch.float32, "F32"),
    "bfloat16": (None, torch.bfloat16, "BF16"),
    "int8": ("int8", torch.bfloat16, "Q8_0"),
    "file": ("auto", torch.bfloat16, None),
}
Rates = dict[str, float]  # tokens a second by what is measured


class Sequences:
    """Sequences in one model, with a pool of their own in which each has a stretch of pages."""

    def __init__(self, model: CpuDecoder, num_sequences: int, num_tokens: int) -> None:
        info = model.info
        shape = (info.num_layers, 2, num_sequences * num_tokens, 1, info.num_kv_heads,
                 info.head_dim)  # fmt: skip
        self._model, self._num_tokens = model, num_tokens
        self._backend = CpuBackend(torch.zeros(shape, dtype=info.dtype), info.num_heads)

    @torch.inference_mode()
    def step(self, sequences: range, first: int, count: int) -> float:
        """Seconds of a step of `count` tokens of each after `first` earlier ones."""
        end, size = first + count, len(sequences)
        starts = [number * self._num_tokens for number in sequences]
        positions = torch.arange(first, end).repeat(size)
        slots = torch.cat([torch.arange(first, end) + start for start in starts])
        last = torch.arange(1, size + 1) * count - 1
        pages = [np.arange(start, start + end, dtype=np.int32) for start in starts]
        indptr = np.arange(size + 1)
        host = HostIndex(
            np.full(size, first), indptr * count, indptr * end, np.full(size, end), pages
        )
        tokens = positions * 97 % self._model.info.vocab_size
        batch = ForwardBatch(tokens, positions, slots, last, host, 1)
        began = time.perf_counter()
        self._backend.plan(batch)
        self._model.forward(batch, self._backend)
        return time.perf_counter() - began

    def fill(self, sequences: range, num_tokens: int) -> None:
        for first in range(0, num_tokens, NUM_PREFILL):
            self.step(sequences, first, min(NUM_PREFILL, num_tokens - first))


def ours(model: CpuDecoder, threads: int, depths: list[int], rows: list[int]) -> Rates:
    torch.set_num_threads(threads)
    found: Rates = {}
    one = range(1)
    alone = Sequences(model, 1, max(depths) + NUM_PREFILL)
    for depth in sorted(depths):
        alone.fill(one, depth)
        found[f"prefill at {depth}"] = NUM_PREFILL / alone.step(one, depth, NUM_PREFILL)
        seconds = [alone.step(one, depth + at, 1) for at in range(NUM_DECODES)]
        found[f"decode at {depth}"] = NUM_DECODES / sum(seconds)
    if rows:
        several = Sequences(model, max(rows), ROW_DEPTH + NUM_DECODES)
        for number in range(max(rows)):
            several.fill(range(number, number + 1), ROW_DEPTH)
        for size in rows:
            steps = [several.step(range(size), ROW_DEPTH + at, 1) for at in range(NUM_DECODES)]
            found[f"decode of {size} rows"] = size * NUM_DECODES / sum(steps)
    return found


def llama(
    folder: Path, file: Path, kv_type: str, threads: int, depths: list[int], rows: list[int]
) -> Rates:
    found: Rates = {}
    bench = [folder / "llama-bench", "-p", NUM_PREFILL, "-n", NUM_DECODES, "-r", 1,
             "-o", "jsonl", "-d", _text(depths), "-m", file, "-t", threads]  # fmt: skip
    for line in _json_lines(bench):
        kind = "prefill" if line["n_prompt"] else "decode"
        found[f"{kind} at {line['n_depth']}"] = line["avg_ts"]
    if rows:
        size = max(rows) * (ROW_DEPTH + NUM_DECODES)
        kv = ["-ctk", kv_type, "-ctv", kv_type]
        batched = [folder / "llama-batched-bench", *kv, "-m", file, "-t", threads, "-tb", threads,
                   "-c", size, "-npp", ROW_DEPTH, "-ntg", NUM_DECODES, "-npl", _text(rows),
                   "--output-format", "jsonl"]  # fmt: skip
        for line in _json_lines(batched):
            found[f"decode of {line['pl']} rows"] = line["speed_tg"]
    return found


def _json_lines(command: list[object]) -> Iterator[dict[str, float]]:
    text = subprocess.run(
        list(map(str, command)), check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).stdout.decode()
    return (json.loads(line) for line in text.splitlines() if line.startswith("{"))


def llama_file(folder: Path, file: Path, kind: str | None) -> Path:
    """The GGUF file with weights of that type, written once."""
    if kind is None:
        return file
    made = folder / f"{file.stem}-{kind}.gguf"
    if not made.exists():
        command = [folder / "llama-quantize", "--allow-requantize", file, made, kind]
        subprocess.run(command, check=True, capture_output=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=_numbers, default=[1])
    parser.add_argument("--depths", type=_numbers, default=[0])
    parser.add_argument("--rows", type=_numbers, default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--llama", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    source = find_model(args.model)
    names = args.forms.split(",")
    models = {name: load_cpu_decoder(source, FORMS[name][1], FORMS[name][0]) for name in names}
    rates: dict[tuple[str, int, str, str], list[float]] = defaultdict(list)
    for number in range(args.rounds):
        for threads in args.threads:
            for name, model in models.items():
                found = {"radixserve": ours(model, threads, args.depths, args.rows)}
                if args.llama is not None:
                    file = llama_file(args.llama, source.path, FORMS[name][2])
                    kv_type = "f32" if name == "float32" else "f16"
                    found["llama.cpp"] = llama(
                        args.llama, file, kv_type, threads, args.depths, args.rows
                    )
                for program, own in found.items():
                    for what, rate in own.items():
                        rates[name, threads, what, program].append(rate)
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    if args.json is not None:
        rows = [[*key, *values] for key, values in rates.items()]
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rates, has_peer=args.llama is not None))


def table(rates: dict[tuple[str, int, str, str], list[float]], *, has_peer: bool) -> str:
    """Markdown: best and median of ours, of llama.cpp's, and the ratio of the best."""
    lines = ["| form | threads | step | radixserve, best (median) | llama.cpp | ratio |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for (name, threads, what, program), own in rates.items():
        if program == "radixserve":
            peer = rates[name, threads, what, "llama.cpp"] if has_peer else []
            cells = [_rate(own), _rate(peer), f"{max(own) / max(peer):.2f}" if peer else "-"]
            lines.append(f"| {name} | {threads} | {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _text(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _rate(values: list[float]) -> str:
    return f"{max(values):.1f} ({statistics.median(values):.1f})" if values else "-"


if __name__ == "__main__":
    main()
