"""What a start costs: imports, a refusal, `Runtime()`, its first answer, memory, the first second,
the first compile.

    python benchmarks/bench_start.py [--models demo,smollm2] [--repeats 3] [--json]

Every figure is taken in a process of its own; seconds are the least of the repeats, by the clock
and of the processor. x weights: the peak of private memory, pages of files apart, over that after
torch's import, as a multiple of the weights. Of the first second: how many times as long a token
takes the processor there as later.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from harness.arguments import parse
from harness.processes import python_path
from harness.report import print_table

COLUMNS = ("", "wall s", "CPU s", "first answer s", "MB: torch", "started", "peak", "weights",
           "x weights", "x later")  # fmt: skip

PRELUDE = """
import json, resource, sys, time
def megabytes():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 1e6
def private():
    _, resident, of_files = map(int, open("/proc/self/statm").read().split()[:3])
    return (resident - of_files) * resource.getpagesize() / 1e6
def timed(call):
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, [time.perf_counter() - wall, time.process_time() - cpu]
"""
IMPORTS = """
torch = timed(lambda: __import__("torch"))[1]
print(json.dumps([torch, timed(lambda: __import__("radixserve").Runtime)[1]]))
"""
REFUSE = """
from radixserve import InvalidRequest, Runtime
def refuse():
    try:
        Runtime("/nonexistent")
    except InvalidRequest:
        pass
print(json.dumps([timed(refuse)[1]]))
"""
START = """
import torch
from radixserve import Runtime, SamplingParams
base, before = megabytes(), private()
rt, seconds = timed(lambda: Runtime(sys.argv[1]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
started, weights = megabytes(), rt.memory.weight_bytes / 1e6
own = private() + peak - started - before
memory = [base, started, peak, weights, own / weights]
params = SamplingParams(max_tokens=8, ignore_eos=True)
answer = timed(lambda: rt.generate([list(range(5, 40))], params))[1]
print(json.dumps([[*seconds, answer[0], *memory]]))
rt.close()
"""
FIRST_SECOND = """
import random
from radixserve import Runtime, SamplingParams
rt = Runtime("demo")
rng, params = random.Random(0), SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
costs = []
while len(costs) < 6:
    num_tokens, begun, spent = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < 1:
        prompts = [[rng.randrange(5, 4000) for _ in range(64)] for _ in range(8)]
        num_tokens += sum(len(out.token_ids) for out in rt.generate(prompts, params))
    costs.append((time.process_time() - spent) / num_tokens)
print(json.dumps([[costs[0] / sorted(costs[1:])[2]]]))
rt.close()
"""
COMPILE = """
import torch
from radixserve_kernels.cpu_ops import unsupported_reason
wall = timed(lambda: unsupported_reason(torch.float32))[1][0]
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([[wall, used.ru_utime + used.ru_stime]]))
"""


def measure(code: str, repeats: int, model: str = "", **environment: str) -> list[list[float]]:
    """What fresh processes print as JSON: the least of each figure."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    runs = []
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + code, model],
            env={"OMP_NUM_THREADS": "1", **inherited, "PYTHONPATH": python_path(), **environment},
            stdout=subprocess.PIPE,
            check=True,
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return [[min(figure) for figure in zip(*rows, strict=True)] for rows in zip(*runs, strict=True)]


def main() -> None:
    args = parse(__doc__, models=["random:tiny-llama", "demo", "smollm2"], repeats=3, json=False)
    measure(START, 1, "demo")  # files into the cache, kernels compiled
    torch, radixserve = measure(IMPORTS, args.repeats)
    (refusal,) = measure(REFUSE, args.repeats)
    figures = {"import torch": torch, "import radixserve": radixserve, "refusal": refusal}
    for model in args.models:
        (figures[f"Runtime({model!r})"],) = measure(START, args.repeats, model)
    with tempfile.TemporaryDirectory() as folder:
        (figures["first compile"],) = measure(COMPILE, 1, RADIXSERVE_CACHE=folder)
    ((ratio,),) = measure(FIRST_SECOND, args.repeats)
    rows = [[name, *row, *[None] * (len(COLUMNS) - 1 - len(row))] for name, row in figures.items()]
    rows.append(["demo, first second", *[None] * (len(COLUMNS) - 2), ratio])
    print_table(args, COLUMNS, rows)


if __name__ == "__main__":
    main()
