"""What the host does in a step with many running requests: schedule, prepare, sample, commit.

    python benchmarks/engine_host.py [--running 32] [--prompt 544] [--shared 512] [--steps 200]
        [--json] [--save DIR]

The tiny model of bench_engine.py, float32, one thread; every step decodes one token of each
request. Twice: where requests share `--shared` tokens, and where they share nothing and the forward
pass, which is not counted, reads more keys and values than any processor's cache holds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from harness.machine import describe_machine
from harness.report import Report, Section, Table, add_report_arguments
from harness.shapes import SHAPES, save_checkpoint
from harness.step_loop import StepLoop

from radixserve.config import EngineConfig
from radixserve.runner.cpu_runner import CpuModelRunner

PARTS = ("schedule", "prepare", "sample", "commit")
WARM_UP = 20  # steps that only decode, before those that count
NOTES = "Milliseconds of a step, medians. host: all four parts together."


def measure(folder: Path, args: argparse.Namespace, shared: int) -> dict[str, float]:
    num_running, length = args.running, args.prompt
    num_prefills = num_running + num_running * length // EngineConfig().chunked_prefill_size
    num_new = num_prefills + WARM_UP + args.steps + 4  # prefill steps decode as well
    config = EngineConfig(
        dtype="float32",
        num_pages=num_running * (length + num_new + 1),
        max_running_requests=num_running,
    )
    loop = StepLoop(CpuModelRunner(str(folder), config), config, SHAPES["tiny"].vocab)
    prefix = loop.tokens(shared)
    prompts = [np.concatenate((prefix, loop.tokens(length - shared))) for _ in range(num_running)]
    loop.start_decoding(prompts, num_new)
    samples: list[list[float]] = []
    before = loop.engine.stats()
    for _ in range(WARM_UP + args.steps):
        loop.step()
        after = loop.engine.stats()
        samples.append([(after[f"{part}_s"] - before[f"{part}_s"]) * 1e3 for part in PARTS])
        before = after
    assert before["running"] == num_running
    samples = samples[WARM_UP:]
    parts = zip(PARTS, zip(*samples, strict=True), strict=True)
    return {
        "running": num_running,
        "shared": shared,
        "host_ms": median(map(sum, samples)),
        **{f"{part}_ms": median(spent) for part, spent in parts},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--running", type=int, default=32, help="requests (default: 32)")
    parser.add_argument("--prompt", type=int, default=544, help="tokens of each (default: 544)")
    parser.add_argument("--shared", type=int, default=512, help="of them the same (default: 512)")
    parser.add_argument("--steps", type=int, default=200, help="that count (default: 200)")
    add_report_arguments(parser)
    args = parser.parse_args()
    if not 0 <= args.shared < args.prompt:
        parser.error("--shared must be at least 0 and less than --prompt")
    torch.set_num_threads(1)
    report = Report("Host's part of a step, CPU", describe_machine(), NOTES, args)
    report.begin()
    with tempfile.TemporaryDirectory(prefix="engine-host-") as folder:
        save_checkpoint(SHAPES["tiny"], "float32", Path(folder))
        lines = [measure(Path(folder), args, shared) for shared in (args.shared, 0)]
    columns = ("", *lines[0])
    rows = [
        ("requests share" if one["shared"] else "nothing shared", *one.values()) for one in lines
    ]
    report.add(Section("a decode step", Table(columns, rows)))
    report.finish("engine-host", {"figures": lines})


if __name__ == "__main__":
    main()
