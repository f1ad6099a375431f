"""What the host does in a step with many running requests: schedule, prepare, sample, commit.

    python benchmarks/engine_host.py [--running 32] [--prompt 544] [--shared 512] [--steps 200]
        [--decode-steps 8] [--json]

The tiny model of bench_engine.py, float32, one thread; every step decodes one token of each
request. Three times: with a forward pass that returns kept logits at once, which leaves the host's
work alone; behind a real one, which drives the host's own data and code from the caches, where
requests share `--shared` tokens; and where they share nothing, and it reads more keys and values
than any cache holds. Milliseconds of a step, medians. What several steps share, `--decode-steps`
of them at most, counts for each by its part; a forward pass that is not one takes them one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from cache_report import describe_machine
from engine_growth import World
from engine_models import SHAPES, save_checkpoint

from radixserve.attention.base import AttentionBackend, ForwardBatch
from radixserve.config import EngineConfig
from radixserve.engine.engine import Engine

PARTS = ("schedule", "prepare", "sample", "commit")
WARM_UP = 20  # steps that only decode, before those that count


class KeptLogits:
    """A model whose forward pass costs nothing."""

    def __init__(self, vocab_size: int, num_rows: int) -> None:
        self._logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> torch.Tensor:  # noqa: ARG002
        return self._logits[: len(batch.logits_indices)]


def measure(
    folder: Path, args: argparse.Namespace, *, shared: int, computes: bool
) -> dict[str, float]:
    num_prefills = (
        args.running + args.running * args.prompt // EngineConfig().chunked_prefill_size
    )  # at most
    num_new = num_prefills + WARM_UP + args.steps + 4
    num_pages = args.running * (args.prompt + num_new + 1)
    settings = {"max_running_requests": args.running}
    world = World(folder, num_pages=num_pages, **settings)
    prefix = world.prompt(shared)
    for _ in range(args.running):
        world.add(args.prompt - shared, num_new, prefix)
    kept = KeptLogits(SHAPES["tiny"].vocab, args.running)
    with nullcontext() if computes else patch.object(world.engine._runner, "model", kept):
        steps = time_steps(world.engine, args)
    figures = {f"{part}_ms": median(spent) for part, spent in steps.items()}
    totals = [sum(parts) for parts in zip(*steps.values(), strict=True)]
    return {
        "running": args.running,
        "shared": shared,
        "computes": int(computes),
        "host_ms": median(totals),
        **figures,
    }


def time_steps(engine: Engine, args: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of each part of the steps that count."""
    before, decoded = engine.stats(), 0
    while decoded < args.running:  # until all prompts are computed
        engine.step()
        after = engine.stats()
        decoded, before = after["decoded_tokens"] - before["decoded_tokens"], after
    first = before["steps"] + WARM_UP
    steps: dict[str, list[float]] = {part: [] for part in PARTS}
    while len(steps[PARTS[0]]) < args.steps:
        engine.step()
        after = engine.stats()
        for part in PARTS:
            spent = (after[f"{part}_s"] - before[f"{part}_s"]) * 1e3
            if before["steps"] >= first:
                steps[part] += [spent]
        before = after
    assert before["running"] == args.running
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--running", type=int, default=32, help="requests (default: 32)")
    parser.add_argument("--prompt", type=int, default=544, help="tokens of each (default: 544)")
    parser.add_argument("--shared", type=int, default=512, help="of them the same (default: 512)")
    parser.add_argument("--steps", type=int, default=200, help="that count (default: 200)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    if not 0 <= args.shared < args.prompt:
        parser.error("--shared must be at least 0 and less than --prompt")
    torch.set_num_threads(1)
    lines = []
    with tempfile.TemporaryDirectory(prefix="engine-host-") as name:
        save_checkpoint(SHAPES["tiny"], "float32", Path(name))
        for shared, computes in ((args.shared, False), (args.shared, True), (0, True)):
            figures = measure(Path(name), args, shared=shared, computes=computes)
            lines.append(figures)
            text = "   ".join(f"{key} {value:,.3g}" for key, value in figures.items())
            print(text, file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        print(json.dumps({"settings": describe_machine(), "figures": lines}, indent=1))


if __name__ == "__main__":
    main()
