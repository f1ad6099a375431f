"""A GGUF file of a random Qwen 3.5 of a billion parameters, beside llama.cpp in the same process.

    python benchmarks/bench_gguf.py --libraries DIR [--kind Q4_K] [--head Q6_K] [--layers 20]
        [--prompt 512] [--new 32] [--rounds 3] [--file PATH] [--json] [--save DIR]

Tokens a second of the process's CPU time, with one thread. Both engines take turns in each round,
each round has another prompt, and nothing is cached. prefill: a prompt and its first token. decode:
the tokens after the first, of a prompt of 16 tokens. Rates are those of the medians. Pin it to a
core with taskset. The last line says how far apart the log-probabilities are: both engines round
activations, in different blocks.

DIR holds llama.cpp's shared libraries: `npm install @node-llama-cpp/linux-x64` has them in
bins/linux-x64. Without --libraries radixserve runs alone. --file keeps the model, which a later run
reads again.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from engine.base import Unavailable
from engine.llama_library import LlamaLibrary
from harness.arguments import REPORT, parse
from harness.random_gguf import Qwen35Shape, write_random_qwen35
from harness.report import Report, Section, Table

from radixserve import Runtime, SamplingParams

NOTES = "CPU seconds of one thread; medians of the rounds, in which both engines take turns."
SHORT = 16  # tokens of the prompt before a decode
Generate = Callable[[list[int], int], list[int]]


class Measured:
    """The seconds of one engine, by kind of work."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def run(self, prompt: list[int], num_new: int) -> None:
        self.seconds["prefill"].append(self._timed(prompt, 1))
        short = prompt[:SHORT]
        first = self._timed(short, 1)
        self.seconds["decode"].append(self._timed(short, num_new + 1) - first)

    def _timed(self, prompt: list[int], num_new: int) -> float:
        start = time.process_time()
        self._generate(prompt, num_new)
        return time.process_time() - start


def measure(
    args: argparse.Namespace, file: Path, shape: Qwen35Shape
) -> tuple[dict[str, Measured], list[str]]:
    """Both engines, interleaved, and lines about them. Raises Unavailable."""
    num_tokens = args.prompt + args.new + 2
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, shape.vocab, (args.rounds + 1, args.prompt)).tolist()
    llama = None
    if args.libraries is not None:
        llama = LlamaLibrary(args.libraries, file, num_tokens, 1)
    with Runtime(str(file), num_pages=2 * num_tokens, cache="off") as rt:

        def ours(prompt: list[int], num_new: int) -> list[int]:
            params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
            return list(rt.generate([prompt], params)[0].token_ids)

        engines = {"radixserve": Measured(ours)}
        if llama is not None:
            engines["llama.cpp"] = Measured(llama.generate)
        for number, prompt in enumerate(prompts):
            for engine in engines.values():
                engine.run(prompt, args.new)
            if not number:  # the first warms up
                for engine in engines.values():
                    engine.seconds.clear()
        lines = [] if llama is None else [llama.features, compare(rt, llama, prompts[0][:SHORT])]
    if llama is not None:
        llama.close()
    return engines, lines


def compare(rt: Runtime, llama: LlamaLibrary, prompt: list[int]) -> str:
    """How far apart the log-probabilities of our likeliest next tokens are."""
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)
    own = rt.generate([prompt], params)[0].top_logprobs[0]
    logits = llama.logits(prompt).astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits)
    apart = np.mean([abs(logprobs[token_id] - logprob) for token_id, logprob in own.items()])
    return (
        f"log-probabilities of {len(own)} tokens are {apart:.2f} apart on average, of all they "
        f"spread by {logprobs.std():.2f}"
    )


def make_section(
    args: argparse.Namespace, engines: dict[str, Measured], lines: list[str]
) -> Section:
    counts = {"prefill": args.prompt, "decode": args.new}
    own = {kind: median(values) for kind, values in engines["radixserve"].seconds.items()}
    rows = []
    for name, engine in engines.items():
        cells = []
        for kind, num_tokens in counts.items():
            middle = median(engine.seconds[kind])
            cells += [f"{num_tokens / middle:,.1f}", f"{middle / own[kind]:.2f}"]
        rows.append((name, *cells))
    columns = ("", "prefill tokens/s", "x our time", "decode tokens/s", "x our time")
    return Section(f"qwen35 in {args.kind}", Table(columns, rows), lines)


def main() -> None:
    options = {"kind": "Q4_K", "head": "Q6_K", "layers": 20, "prompt": 512, "new": 32, "rounds": 3}
    args = parse(__doc__, libraries=Path, file=Path, **options, **REPORT)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    shape = Qwen35Shape(num_layers=args.layers)
    with tempfile.TemporaryDirectory(prefix="bench-gguf-") as folder:
        file = args.file or Path(folder) / "model.gguf"
        if not file.exists():
            write_random_qwen35(file, shape, args.kind, args.head)
        size = f"{shape.num_parameters / 1e9:.2f} billion parameters, {file.stat().st_size:,} bytes"
        report = Report("A GGUF file beside llama.cpp, CPU", NOTES, args, shape=size)
        try:
            engines, lines = measure(args, file, shape)
        except Unavailable as error:
            raise SystemExit(f"llama.cpp: {error}") from error
    report.add(make_section(args, engines, lines))
    report.finish("gguf-cpu", {name: engine.seconds for name, engine in engines.items()})


if __name__ == "__main__":
    main()
