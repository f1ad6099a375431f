"""What a decode step costs around its forward pass, by part.

    python benchmarks/bench_step.py [--model tiny|small] [--dtype float32|bfloat16] [--rows 1,8,32]
        [--tokens 400] [--max-draft-tokens N] [--repeats N] [--threads N] [--quick] [--json]
        [--save DIR]

Each run generates so many tokens for each of the rows by `Runtime.generate`, greedily; prompts are
64 random tokens. Microseconds a step, medians of the repeats, by `Runtime.cache_stats`:

    schedule  the step is planned     prepare  its arrays are laid out
    forward   all layers, to logits   sample   tokens are chosen
    commit    they are published      other    the engine's thread beside these: outputs, messages

overhead is the share of all but forward in the time from step to step. Without --max-draft-tokens
no drafts are made: with them the rows of a step have several tokens.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from harness.arguments import RUN, parse
from harness.processes import Processes, Resident
from harness.report import Cell, Report, Section, Table
from harness.shapes import DTYPES, SHAPES, save_checkpoint
from harness.workloads import random_prompts

from radixserve import Runtime, SamplingParams
from radixserve.commands.terminal import PARTS

PROMPT = 64  # tokens
NOTES = (
    "Microseconds a step, medians of the repeats. other: the engine's thread beside the parts."
    " overhead: all but forward, of the time from step to step."
)


def measure(rt: Runtime, prompts: list[list[int]], num_new: int) -> dict[str, float]:
    """Microseconds a step by part, and of the whole step."""
    params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
    before, begun = rt.cache_stats(), time.perf_counter()
    rt.generate(prompts, params, progress=False)
    spent, after = time.perf_counter() - begun, rt.cache_stats()
    rt.flush_cache()
    gained = {part: after[f"{part}_s"] - before[f"{part}_s"] for part in PARTS}
    gained["other"] = spent - sum(gained.values())
    scale = 1e6 / (after["steps"] - before["steps"])
    return {name: seconds * scale for name, seconds in {**gained, "step": spent}.items()}


def row_of(runtime: Resident, num_rows: int, args: argparse.Namespace, vocab: int) -> list[Cell]:
    runs: list[dict[str, float]] = []
    for number in range(1 + args.repeats):  # the first one warms up
        prompts = random_prompts(num_rows, PROMPT, vocab, number)
        runs.append(runtime.call(measure, prompts, args.tokens))
    figures = {name: median(run[name] for run in runs[1:]) for name in runs[0]}
    overhead = 1 - figures["forward"] / figures["step"]
    return [num_rows, *(round(value, 1) for value in figures.values()), f"{overhead:.1%}"]


def main() -> None:
    args = parse(
        __doc__,
        model=tuple(SHAPES),
        dtype=DTYPES,
        rows=[1, 8, 32],
        tokens=400,
        max_draft_tokens=0,
        **RUN,
    )
    shape = SHAPES[args.model]
    report = Report(f"A decode step, {args.model} model", NOTES, args, ("torch",), shape=str(shape))
    processes = Processes(args.threads)
    settings: dict[str, Any] = {
        "num_pages": 65_536,
        "dtype": "auto",
        "max_draft_tokens": args.max_draft_tokens,
    }
    with tempfile.TemporaryDirectory() as name:
        processes.call(save_checkpoint, shape, args.dtype, Path(name))
        with Resident(processes, Runtime, Path(name), **settings) as runtime:
            rows = [row_of(runtime, count, args, shape.vocab) for count in args.rows]
    report.add(Section("decode steps", Table(["rows", *PARTS, "other", "step", "overhead"], rows)))
    report.finish(f"step-cpu-{args.model}-{args.dtype}", {"rows": rows})


if __name__ == "__main__":
    main()
