"""What a step costs as the engine fills: waiting requests, cached nodes, requests served.

    python benchmarks/engine_growth.py [--waiting 10,1000,20000] [--nodes 1000,100000,1000000]
        [--requests 20000] [--steps 40] [--json]

The tiny model of bench_engine.py, float32, one thread. Every timed step decodes one token for each
of the same eight requests; only what stands around them grows. Times are CPU seconds of the
engine's thread. Resident memory is read while `--requests` short requests pass through a pool that
is full after the first of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from cache_report import describe_machine
from engine_lanes import read_status
from engine_models import SHAPES, save_checkpoint

from radixserve.config import EngineConfig
from radixserve.engine.engine import Engine
from radixserve.request import Request, SamplingParams
from radixserve.runner.cpu_runner import CpuModelRunner

RUNNING, PROMPT = 8, 64  # requests that decode in every timed step, and tokens of their prompts
OWN = 2  # tokens of a node made beside them
POOL_PAGES = 4_096  # of the pool that requests pass through
ROUND = 500  # of them sent at once
NO_TOKENS = np.empty(0, np.int32)


class World:
    """An engine on the tiny model, with requests that are decoding."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        config = EngineConfig(dtype="float32", **settings)
        self.engine = Engine(CpuModelRunner(str(folder), config), config)
        self._vocab = SHAPES["tiny"].vocab
        self._rng = np.random.default_rng(0)
        self._num_requests = 0

    def prompt(self, length: int) -> np.ndarray:
        return self._rng.integers(8, self._vocab, length).astype(np.int32)

    def add(self, length: int, num_new: int, prefix: np.ndarray = NO_TOKENS) -> None:
        params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
        self._num_requests += 1
        request = Request(
            request_id=str(self._num_requests),
            token_ids=np.concatenate((prefix, self.prompt(length))),
            params=params,
            seed=0,
            end_ids=frozenset(),
            max_len=len(prefix) + length + num_new + 1,
        )
        self.engine.add(request)

    def start_decoding(self, num_new: int) -> None:
        for _ in range(RUNNING):
            self.add(PROMPT, num_new)
        for _ in range(RUNNING + 4):
            self.engine.step()

    def step_ms(self, num_steps: int) -> dict[str, float]:
        """CPU milliseconds of a step: the median, and the fastest tenth of a noisy machine."""
        steps = []
        for _ in range(num_steps):
            start = time.thread_time()
            self.engine.step()
            steps.append((time.thread_time() - start) * 1e3)
        return {"step_ms": median(steps), "fastest_tenth_ms": float(np.percentile(steps, 10))}

    def drain(self) -> None:
        while self.engine.has_work():
            self.engine.step()


def with_waiting(folder: Path, num_waiting: int, num_steps: int) -> dict[str, float]:
    """`num_waiting` requests have no place to run."""
    world = World(folder, num_pages=8_192, max_running_requests=RUNNING)
    world.start_decoding(num_steps + 100)
    for _ in range(num_waiting):
        world.add(PROMPT, 4)
    world.engine.step()  # the pass that meets them first
    gc.collect()
    figures = world.step_ms(num_steps)
    assert world.engine.stats()["waiting"] == num_waiting
    return {"waiting": num_waiting, **figures}


def with_nodes(folder: Path, num_nodes: int, num_steps: int) -> dict[str, float]:
    """The tree holds `num_nodes` leaves besides what the requests have made.

    Its pages are taken and named, not computed: nobody reads them.
    """
    world = World(folder, num_pages=OWN * num_nodes + 8_192, max_running_requests=RUNNING)
    cache = world.engine._cache  # no request could make a million nodes in reasonable time
    for number in range(num_nodes):
        tokens = np.array([number, 1], np.int32)
        sequence = cache.acquire(tokens, "filler")
        sequence.extend(tokens[sequence.length :])
        sequence.commit(OWN)
        sequence.release()
    world.start_decoding(num_steps + 100)
    gc.collect()
    gc.freeze()
    figures = world.step_ms(num_steps)
    gc.unfreeze()
    return {"nodes": num_nodes, **figures}


def resident(folder: Path, num_requests: int) -> list[dict[str, float]]:
    """MiB resident as requests are served, ten times on the way."""
    world = World(folder, num_pages=POOL_PAGES)
    figures = []
    each = max(ROUND, num_requests // 10)
    for served in range(ROUND, num_requests + 1, ROUND):
        for _ in range(ROUND):
            world.add(16, 4)
        world.drain()
        if served % each == 0:
            gc.collect()
            figures.append({"served": served, "resident_mib": (read_status("VmRSS") or 0) / 2**20})
    return figures


def arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--waiting", type=numbers, default=[10, 1_000, 20_000])
    parser.add_argument("--nodes", type=numbers, default=[1_000, 100_000, 1_000_000])
    parser.add_argument("--requests", type=int, default=20_000, help="0: leave memory out")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


def main() -> None:
    import torch

    torch.set_num_threads(1)
    args = arguments()
    lines: list[dict[str, float]] = []

    def show(figures: dict[str, float]) -> None:
        lines.append(figures)
        text = "   ".join(f"{name} {value:,.6g}" for name, value in figures.items())
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    with tempfile.TemporaryDirectory(prefix="engine-growth-") as name:
        folder = Path(name)
        save_checkpoint(SHAPES["tiny"], "float32", folder)
        with_waiting(folder, 1, 10)  # warm
        for count in args.waiting:
            show(with_waiting(folder, count, args.steps))
        for count in args.nodes:
            show(with_nodes(folder, count, args.steps))
        if args.requests:
            for figures in resident(folder, args.requests):
                show(figures)
    if args.json:
        print(json.dumps({"settings": describe_machine(), "figures": lines}, indent=1))


if __name__ == "__main__":
    main()
