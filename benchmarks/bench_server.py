"""What HTTP costs: the server against the same requests through `Runtime`, in turns.

    python benchmarks/bench_server.py [--model tiny|small] [--dtype float32|bfloat16]
        [--streams 64] [--tokens 64] [--crowd 1000] [--repeats N] [--threads N] [--quick]
        [--json] [--save DIR]

throughput   tokens a second of so many streams at once, over HTTP (an event a token, with text) and
             by `Runtime.generate` (a list, text at the end) and `Runtime.astream`
first token  of a warm short request, over HTTP and by `Runtime.stream`
idle         the server's processor time while it has nothing to do
crowd        so many connections at once, of which a quarter leaves and a quarter reads slowly; not
             with 0

The model is a Llama shape with seeded random weights and the demo model's tokenizer. Server, direct
engine and load generator are processes of their own on the same cores: only ratios mean anything.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from harness.arguments import RUN, parse
from harness.machine import cpu_s, read_status
from harness.processes import Processes, Resident, ServerProcess, python_path, take_turns
from harness.report import Cell, Report, Section, Table
from harness.shapes import DEMO_VOCAB, DTYPES, SHAPES, save_checkpoint
from harness.workloads import random_prompts
from server import clients
from server.clients import Client, read_streams

from radixserve import Runtime

SETTINGS = {"num_pages": 65_536, "max_running_requests": 64, "dtype": "auto"}
PROMPT = 100  # tokens
IDLE_S = 5.0
NUM_QUEUED = 4_096  # what the server takes beside what runs
NOTES = (
    "Server, direct engine and load generator are processes of their own on the same cores,"
    " measured in turns: only ratios mean anything. generate: a list, its text made at the end;"
    " astream: a task a request, text with every token; http: an event a token, with its text."
)
Found = tuple[Section, dict[str, Any]]


@dataclass(frozen=True)
class Bench:
    """The server, the direct engine, and what was asked for."""

    served: ServerProcess
    direct: Resident
    args: argparse.Namespace


def throughput(bench: Bench) -> Found:
    count, tokens, ask = bench.args.streams, bench.args.tokens, bench.direct.call

    def over_http(number: int) -> float:
        clients = [Client(prompt, tokens) for prompt in prompts(number)]
        seconds, streams = read_streams(bench.served.port, clients)
        assert all(stream.is_done for stream in streams), "a stream was cut off"
        return seconds

    def prompts(seed: int) -> list[list[int]]:
        return random_prompts(count, PROMPT, DEMO_VOCAB, seed)

    operations: dict[str, Callable[[int], float]] = {
        "generate": lambda number: ask(clients.generate, prompts(number), tokens),
        "astream": lambda number: ask(clients.astream, prompts(1_000 + number), tokens),
        "http": over_http,
    }
    seconds = take_turns(operations, bench.args.repeats, warm_up=1)
    rates = {name: count * tokens / min(samples) for name, samples in seconds.items()}
    rows: list[list[Cell]] = [
        [name, round(rate), *(round(rate / rates[base], 3) for base in ("generate", "astream"))]
        for name, rate in rates.items()
    ]
    title = f"throughput: {count} streams of {tokens} tokens, prompts of {PROMPT}, best of turns"
    table = Table(["path", "tokens/s", "of generate", "of astream"], rows)
    return Section(title, table), {"tokens_per_s": rates, "seconds": seconds}


def first_token(bench: Bench) -> Found:
    (prompt,) = random_prompts(1, PROMPT, DEMO_VOCAB, 7)
    client = Client(prompt, 4)
    operations: dict[str, Callable[[int], float]] = {
        "stream": lambda _: bench.direct.call(clients.first_token, prompt, 4),
        "http": lambda _: read_streams(bench.served.port, [client])[1][0].first_s,
    }
    delays = take_turns(operations, 10 * bench.args.repeats, warm_up=5)
    rows: list[list[Cell]] = [
        [name, round(1e3 * median(samples), 2), round(1e3 * min(samples), 2)]
        for name, samples in delays.items()
    ]
    table = Table(["path", "median ms", "least ms"], rows)
    return Section(f"first token of a warm prompt of {PROMPT} tokens", table), delays


def idle(bench: Bench) -> Found:
    start = cpu_s(bench.served.pid)
    time.sleep(IDLE_S)
    used = cpu_s(bench.served.pid) - start
    table = Table(["seconds", "CPU s"], [[IDLE_S, round(used, 3)]])
    return Section("idle", table), {"seconds": IDLE_S, "cpu": used}


def crowd(bench: Bench) -> Found:
    """Every fourth client leaves early, another fourth reads slowly."""
    count, tokens, pid = bench.args.crowd, 16, bench.served.pid
    rng = random.Random(1)

    def held() -> tuple[int, int]:
        """MiB resident, open files."""
        return (read_status("VmRSS", pid) or 0) >> 20, len(os.listdir(f"/proc/{pid}/fd"))

    clients = [
        replace(
            Client(prompt, tokens),
            **({"max_events": rng.randint(1, 8)}, {"pause_s": 0.05}, {}, {})[number % 4],
        )
        for number, prompt in enumerate(random_prompts(count, PROMPT, DEMO_VOCAB, 99))
    ]
    before = held()
    seconds, streams = read_streams(bench.served.port, clients)
    staying = [stream for client, stream in zip(clients, streams, strict=True)
               if client.max_events > tokens]  # fmt: skip
    done, wanted = sum(stream.is_done for stream in staying), len(staying)
    time.sleep(1)
    with urllib.request.urlopen(bench.served.address + "/v1/cache/stats", timeout=60) as answer:
        stats = json.load(answer)
    after = held()
    left = stats["running"] + stats["waiting"] + stats["pages_private"]
    assert done == wanted, f"{wanted - done} requests were not answered"
    assert left == 0, "something was left over"
    changes = [f"{old} -> {new}" for old, new in zip(before, after, strict=True)]
    row = [count, round(seconds, 1), f"{done} of {wanted}", *changes, left]
    names = ["connections", "s", "answered", "resident MiB", "files", "left over"]
    data = {"seconds": seconds, "wanted": wanted, "done": done, "before": before, "after": after}
    return Section(f"crowd: streams of {tokens} tokens", Table(names, [row])), data


def main() -> None:
    sizes = {"streams": 64, "tokens": 64, "crowd": 1_000}
    args = parse(__doc__, model=tuple(SHAPES), dtype=DTYPES, **sizes, **RUN)
    shape = replace(SHAPES[args.model], vocab=DEMO_VOCAB)
    packages = ("torch", "fastapi", "uvicorn")
    report = Report("The server against Runtime", NOTES, args, packages, shape=str(shape))
    processes, data = Processes(args.threads), {}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes.call(save_checkpoint, shape, args.dtype, folder, has_tokenizer=True)
        command = [sys.executable, "-m", "radixserve", "serve", name,
                   f"--max-queued-requests={NUM_QUEUED}", *flags]  # fmt: skip
        served = ServerProcess(command, "/health/ready", folder / "log", PYTHONPATH=python_path())
        cases = [throughput, first_token, idle, *([crowd] if args.crowd else [])]
        with Resident(processes, Runtime, folder, **SETTINGS) as runtime:
            for case in cases:
                section, data[case.__name__] = case(Bench(served, runtime, args))
                report.add(section)
        assert served.close() == 0
    report.finish(f"server-cpu-{args.model}-{args.dtype}", data)


if __name__ == "__main__":
    main()
