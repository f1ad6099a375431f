"""What a start costs: imports, a refusal, `Runtime()`, its first answer, memory, the first second,
the first compile; the server until it is ready, and its first requests.

    python benchmarks/bench_start.py [--models demo,smollm2] [--repeats 3] [--json]

Every figure is taken in a process of its own; seconds are the least of the repeats, by the clock
and of the processor. x weights: the peak of private memory, pages of files apart, over that after
torch's import, as a multiple of the weights. Of the first second: how many times as long a token
takes the processor there as later.

The second table: seconds from the start of the process until its port takes connections, answers
/health/live, and /health/ready; the process's CPU time until then, also as a multiple of that of
`python -c "import torch"`; then requests of eight tokens, the first one and the least of the next.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.arguments import parse
from harness.machine import cpu_s
from harness.processes import free_port, python_path
from harness.report import Table, print_tables

COLUMNS = ("", "wall s", "CPU s", "first answer s", "MB: torch", "started", "peak", "weights",
           "x weights", "x later")  # fmt: skip
SERVER_COLUMNS = ("", "bound s", "live s", "ready s", "CPU s", "x torch", "first request s",
                  "CPU s", "next s", "CPU s")  # fmt: skip
NUM_NEXT = 4  # requests after the first one
START_S = 120  # a server must be ready by then

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
    runs = []
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + code, model],
            env={**own_environment(), **environment},
            stdout=subprocess.PIPE,
            check=True,
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    return [[min(figure) for figure in zip(*rows, strict=True)] for rows in zip(*runs, strict=True)]


def own_environment() -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return {"OMP_NUM_THREADS": "1", **inherited, "PYTHONPATH": python_path()}


def whole_cpu_s(*arguments: str) -> float:
    """CPU seconds of a Python process from its start to its end."""
    process = subprocess.Popen([sys.executable, *arguments], env=own_environment())
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = status
    assert status == 0
    return usage.ru_utime + usage.ru_stime


def measure_server(model: str, torch_s: float) -> list[float]:
    """The figures of SERVER_COLUMNS, of one start. `torch_s`: CPU seconds of torch's import."""
    port = free_port()
    command = [sys.executable, "-m", "radixserve", "serve", model, "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        begun = time.perf_counter()
        process = subprocess.Popen(command, env=own_environment(), stdout=log, stderr=log)
        try:
            reached = []
            for is_reached in (
                lambda: is_bound(port),
                lambda: ask(port, "GET", "/health/live") == 200,
                lambda: ask(port, "GET", "/health/ready") == 200,
            ):
                while not is_reached():
                    if process.poll() is not None or time.perf_counter() - begun > START_S:
                        raise RuntimeError(f"the server did not start:\n{log.read()}")
                    time.sleep(0.005 if len(reached) < 2 else 0.05)  # answers take CPU time, too
                reached.append(time.perf_counter() - begun)
            ready_cpu = cpu_s(process.pid)
            first, *others = (
                timed_request(port, process.pid, model, n) for n in range(1 + NUM_NEXT)
            )
        finally:
            process.terminate()
            process.wait()
    least = [min(figures) for figures in zip(*others, strict=True)]
    return [*reached, ready_cpu, ready_cpu / torch_s, *first, *least]


def is_bound(port: int) -> bool:
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def ask(port: int, method: str, path: str, body: object = None) -> int:
    """The status of the server's answer; 0 without one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=START_S)
    headers = {} if body is None else {"content-type": "application/json"}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except OSError:
        return 0
    finally:
        connection.close()


def timed_request(port: int, pid: int, model: str, number: int) -> tuple[float, float]:
    """Seconds and CPU seconds of a request: a chat, or ids for a model without text. Requests
    share few tokens, so that the later ones compute as many."""
    path, fields = "/v1/completions", {"prompt": [5 + number, *range(40, 80)], "ignore_eos": True}
    if not model.startswith("random:"):
        text = f"Tell me about the number {number}."
        about = {"role": "system", "content": f"{number} is the number of this request. Be brief."}
        messages = [about, {"role": "user", "content": text}]
        path, fields = "/v1/chat/completions", {"messages": messages}
    begun, cpu = time.perf_counter(), cpu_s(pid)
    status = ask(port, "POST", path, {"max_tokens": 8, "temperature": 0, **fields})
    assert status == 200, f"{path} was answered with {status}"
    return time.perf_counter() - begun, cpu_s(pid) - cpu


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
    torch_s = min(whole_cpu_s("-c", "import torch") for _ in range(args.repeats))
    servers = []
    for model in args.models:
        runs = [measure_server(model, torch_s) for _ in range(args.repeats)]
        servers.append([f"serve {model}", *map(min, zip(*runs, strict=True))])
    servers.append(["import torch", None, None, None, torch_s, 1.0, None, None, None, None])
    print_tables(args, [Table(COLUMNS, rows), Table(SERVER_COLUMNS, servers)])


if __name__ == "__main__":
    main()
