"""kill -9 of serving engines that write a kv_store: each that follows finds whole files alone, and
answers as an engine without a store."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from radixserve import Runtime, SamplingParams
from radixserve.cli import main

ROOT = Path(__file__).parents[2]
PRELOADED = ("radixserve", "radixserve_kernels", "torch", "jinja2", "tokenizers", "safetensors")
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, digest=True)

# Imports once what a server needs, and forks a server for each line of its input. A server answers
# prompts at random until it is killed. Its pool and its store hold a part of them: it loads, writes
# and drops files.
SERVERS = """
import contextlib, importlib, json, os, random, sys
from tests.engine.test_kv_store_crashes import PARAMS, prompts
from radixserve import Runtime

def serve(folder, seed):
    numbers = random.Random(seed)
    page_size = numbers.choice([1, 16])
    settings = dict(num_pages=1200 // page_size, page_size=page_size, kv_store_size="12MB")
    settings["kv_store_write"] = numbers.choice(["finish", "finish", "auto", "evict", "reuse"])
    with Runtime("demo", kv_store=folder, **settings) as runtime:
        while True:
            index = numbers.randrange(len(prompts()))
            completion = runtime.generate(prompts()[index], PARAMS)
            loaded = completion.usage.loaded_tokens
            print(json.dumps([index, completion.token_ids, completion.digest, loaded]), flush=True)

for name in json.loads(sys.argv[2]):
    with contextlib.suppress(Exception):
        importlib.import_module(name)

for line in sys.stdin:
    child = os.fork()
    if not child:
        serve(sys.argv[1], int(line))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("\\nend", flush=True)
"""


def prompts() -> list[list[int]]:
    """Sixteen, of 100 to 700 tokens, which share beginnings of any length."""
    rng = np.random.default_rng(0)
    bases = [[int(token) for token in rng.integers(3, 900, 700)] for _ in range(4)]
    return [base[: 100 * number] for number in (1, 3, 5, 7) for base in bases]


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], str | None]]:
    """The answers, of an engine without a store."""
    with Runtime("demo", num_pages=20_000) as runtime:
        completions = runtime.generate(prompts(), PARAMS)
    return [(completion.token_ids, completion.digest) for completion in completions]


@contextmanager
def servers(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The process that forks servers. It has imported what this process has, engines included."""
    names = [name for name in sys.modules if name.split(".")[0] in PRELOADED]
    command = [sys.executable, "-c", SERVERS, str(folder), json.dumps(names)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def kill_servers(folder: Path, expected: list[Any], num_kills: int) -> tuple[int, int]:
    """Returns the tokens that the servers loaded, and how many answers were compared."""
    numbers = random.Random(2)
    num_loaded = num_answers = 0
    with servers(folder) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(num_kills):
            print(number, file=process.stdin, flush=True)
            child = int(process.stdout.readline())
            lines = []
            try:
                for _ in range(numbers.randint(1, 8)):
                    lines.append(process.stdout.readline())
                time.sleep(numbers.random() * 0.05)
            finally:
                os.kill(child, signal.SIGKILL)
            lines += rest_of(process.stdout)
            for line in filter(None, map(str.strip, lines)):
                try:
                    index, token_ids, digest, loaded = json.loads(line)
                except ValueError:  # it was killed while it printed
                    continue
                assert (token_ids, digest) == expected[index], f"a wrong answer after kill {number}"
                num_loaded, num_answers = num_loaded + loaded, num_answers + 1
            assert main(["cache", "verify", str(folder)]) == 0
    return num_loaded, num_answers


def test_two_processes_write_and_read_one_folder(tmp_path: Path, expected: list[Any]) -> None:
    """At the same time; one of them is killed."""
    num_loaded, num_answers = [0, 0], 0
    with servers(tmp_path) as first, servers(tmp_path) as second:
        children = []
        for number, process in enumerate((first, second)):
            print(number, file=process.stdin, flush=True)
            children.append(int(process.stdout.readline()))
        try:
            while num_answers < 24 or not all(num_loaded):
                assert num_answers < 500, "a process loads nothing"
                for number, process in enumerate((first, second)):
                    index, token_ids, digest, loaded = json.loads(process.stdout.readline())
                    assert (token_ids, digest) == expected[index]
                    num_loaded[number] += loaded
                    num_answers += 1
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
        for process in (first, second):
            rest_of(process.stdout)
    assert main(["cache", "verify", str(tmp_path)]) == 0


def rest_of(stdout: IO[str]) -> list[str]:
    """What a server has printed up to its end."""
    return list(iter(stdout.readline, "end\n"))


def test_killed_servers_leave_whole_files_and_right_answers(
    tmp_path: Path, expected: list[Any]
) -> None:
    num_loaded, num_answers = kill_servers(tmp_path, expected, 4)
    assert num_loaded > 0
    assert num_answers >= 4


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_500_killed_servers_leave_whole_files_and_right_answers(
    tmp_path: Path, expected: list[Any]
) -> None:
    num_loaded, num_answers = kill_servers(tmp_path, expected, 500)
    assert num_loaded > 10_000
    assert num_answers >= 500
    assert list(tmp_path.rglob("*.kv"))
