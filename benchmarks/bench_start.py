"""What a start costs: import, `Runtime()`, refusals, memory, the first second, the first compile.

    python benchmarks/bench_start.py [--models demo smollm2] [--repeat 3] [--no-compile]

Every figure is taken in a process of its own; seconds are the least of the repeats, by the clock
and of the processor.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODELS = ("random:tiny-llama", "demo", "smollm2")

PRELUDE = """
import json, resource, sys, time
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 1e6
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
class Timed:
    def __enter__(self):
        self.start = time.perf_counter(), time.process_time()
        return self
    def __exit__(self, *_):
        self.wall = time.perf_counter() - self.start[0]
        self.cpu = time.process_time() - self.start[1]
model = sys.argv[1]
"""
IMPORT = """
with Timed() as torch_import:
    import torch
with Timed() as face:
    from radixserve import Runtime
print(json.dumps({"torch": torch_import.wall, "torch_cpu": torch_import.cpu,
                  "radixserve": face.wall, "radixserve_cpu": face.cpu}))
"""
START = """
import torch
from radixserve import Runtime, SamplingParams
base = rss()
with Timed() as start:
    rt = Runtime(model)
memory = {"mb": rss(), "peak_mb": peak(), "torch_mb": base}
memory["weights_mb"] = rt.memory.weight_bytes / 1e6
with Timed() as answer:
    rt.generate([list(range(5, 40))], SamplingParams(max_tokens=8, ignore_eos=True))
print(json.dumps({"wall": start.wall, "cpu": start.cpu, **memory, "first_answer": answer.wall,
                  "answered_mb": rss()}))
rt.close()
"""
REFUSE = """
from radixserve import InvalidRequest, Runtime
with Timed() as refusal:
    try:
        Runtime("/nonexistent")
    except InvalidRequest:
        pass
print(json.dumps({"wall": refusal.wall, "cpu": refusal.cpu}))
"""
SECONDS = """
import random
import torch
from radixserve import Runtime, SamplingParams
rt = Runtime(model)
rng, params = random.Random(0), SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
counts, begun, spent = [], time.perf_counter(), time.process_time()
while len(counts) < 6:  # tokens for each CPU second, so that other processes do not count
    done = 0
    while time.perf_counter() - begun < len(counts) + 1:
        prompts = [[rng.randrange(5, 4000) for _ in range(64)] for _ in range(8)]
        done += sum(len(out.token_ids) for out in rt.generate(prompts, params))
    now = time.process_time()
    counts.append(done / (now - spent))
    spent = now
later = sorted(counts[1:])[len(counts) // 2]
print(json.dumps({"first": counts[0], "later": later}))
rt.close()
"""
COMPILE = """
import torch
from radixserve_kernels.cpu_ops import unsupported_reason
with Timed() as compile:
    assert not unsupported_reason(torch.float32)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"wall": compile.wall, "cpu": used.ru_utime + used.ru_stime}))
"""


def measure(code: str, model: str = "", **environment: str) -> dict[str, float]:
    """What a fresh process prints as JSON."""
    path = os.pathsep.join((str(ROOT / "kernels"), str(ROOT)))
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, model],
        env={"OMP_NUM_THREADS": "1", **inherited, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def best(code: str, repeat: int, model: str = "") -> dict[str, float]:
    """The least of each figure."""
    runs = [measure(code, model) for _ in range(repeat)]
    return {name: min(run[name] for run in runs) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    measure(START, "demo")  # files into the cache, kernels compiled
    found = best(IMPORT, args.repeat)
    print("seconds by the clock (of the processor); least of", args.repeat)
    for name in ("torch", "radixserve"):
        print(f"import {name:<24} {found[name]:6.2f} ({found[name + '_cpu']:.2f})")
    found = best(REFUSE, args.repeat)
    print(f"Runtime('/nonexistent') refuses {found['wall']:6.3f} ({found['cpu']:.3f})")
    for model in args.models:
        found = best(START, args.repeat, model)
        print(f"Runtime({model!r})".ljust(31), f"{found['wall']:6.2f} ({found['cpu']:.2f})", end="")
        print(f"; first answer of 8 tokens {found['first_answer']:.2f} s; MB resident: ", end="")
        print(f"torch {found['torch_mb']:.0f}, started {found['mb']:.0f}", end="")
        print(f" (peak {found['peak_mb']:.0f}, weights {found['weights_mb']:.0f})", end="")
        print(f", answered {found['answered_mb']:.0f}")
    runs = [measure(SECONDS, "demo") for _ in range(args.repeat)]
    ratio = sorted(run["first"] / run["later"] for run in runs)[len(runs) // 2]
    print(f"demo, tokens in the first second over a later one (median): {ratio:.3f}")
    if not args.no_compile:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(COMPILE, RADIXSERVE_CACHE=folder)
        print(f"first compile, float32          {found['wall']:6.2f} ({found['cpu']:.2f})")


if __name__ == "__main__":
    main()
