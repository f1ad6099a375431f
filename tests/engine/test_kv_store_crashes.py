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
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixserve import Runtime, SamplingParams
from radixserve.cli import main

ROOT = Path(__file__).parents[2]
PRELOADED = ("radixserve", "radixserve_kernels", "torch", "jinja2", "tokenizers", "safetensors")
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, digest=True)

# Imports once what a server needs, and forks a server for each line of its input, which is killed.
SERVERS = """
import contextlib, importlib, json, os, sys
from tests.engine.test_kv_store_crashes import serve

for name in json.loads(sys.argv[1]):
    with contextlib.suppress(Exception):
        importlib.import_module(name)

for line in sys.stdin:
    child = os.fork()
    if not child:
        for answer in serve(*json.loads(line)):
            print(json.dumps(answer), flush=True)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("\\nend", flush=True)
"""


def prompts() -> list[list[int]]:
    """Sixteen, of 100 to 700 tokens, which share beginnings of any length."""
    rng = np.random.default_rng(0)
    bases = [[int(token) for token in rng.integers(3, 900, 700)] for _ in range(4)]
    return [base[: 100 * number] for number in (1, 3, 5, 7) for base in bases]


def serve(folder: str, seed: int) -> Iterator[tuple[int, list[int], str | None, int]]:
    """Answers prompts at random: the prompt's number, tokens, digest, and how many were loaded.
    Pool and store hold a part of the prompts: files are loaded, written and dropped."""
    numbers = random.Random(seed)
    page_size = numbers.choice([1, 16])
    settings: dict[str, Any] = {"num_pages": 1200 // page_size, "page_size": page_size}
    settings["kv_store_write"] = numbers.choice(["finish", "finish", "auto", "evict", "reuse"])
    with Runtime("demo", kv_store=folder, kv_store_size="12MB", **settings) as runtime:
        while True:
            index = numbers.randrange(len(prompts()))
            completion = runtime.generate(prompts()[index], PARAMS)
            loaded = completion.usage.loaded_tokens
            yield index, completion.token_ids, completion.digest, loaded


@pytest.fixture(scope="module")
def expected() -> list[tuple[list[int], str | None]]:
    """The answers, of an engine without a store."""
    with Runtime("demo", num_pages=20_000) as runtime:
        completions = runtime.generate(prompts(), PARAMS)
    return [(completion.token_ids, completion.digest) for completion in completions]


class Servers:
    """The process that forks servers, one at a time, and what these print."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self.output = process.stdin, process.stdout

    def start(self, folder: Path, seed: int) -> int:
        """Its process id."""
        print(json.dumps([str(folder), seed]), file=self._input, flush=True)
        return int(self.output.readline())

    def rest(self) -> list[str]:
        """What a killed server has printed up to its end."""
        return list(iter(self.output.readline, "end\n"))


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """They have imported what this process has, engines included."""
    names = [name for name in sys.modules if name.split(".")[0] in PRELOADED]
    command = [sys.executable, "-c", SERVERS, json.dumps(names)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        try:
            yield Servers(process)
        finally:
            process.kill()


def kill_servers(
    servers: Servers, folder: Path, expected: list[Any], num_kills: int
) -> tuple[int, int]:
    """Returns the tokens that the servers loaded, and how many answers were compared."""
    numbers = random.Random(2)
    num_loaded = num_answers = 0
    for number in range(num_kills):
        child = servers.start(folder, number)
        lines = []
        try:
            for _ in range(numbers.randint(1, 8)):
                lines.append(servers.output.readline())
            time.sleep(numbers.random() * 0.05)
        finally:
            os.kill(child, signal.SIGKILL)
        lines += servers.rest()
        for line in filter(None, map(str.strip, lines)):
            try:
                index, token_ids, digest, loaded = json.loads(line)
            except ValueError:  # it was killed while it printed
                continue
            assert (token_ids, digest) == expected[index], f"a wrong answer after kill {number}"
            num_loaded, num_answers = num_loaded + loaded, num_answers + 1
        assert main(["cache", "verify", str(folder)]) == 0
    return num_loaded, num_answers


def test_two_processes_write_and_read_one_folder(
    servers: Servers, tmp_path: Path, expected: list[Any]
) -> None:
    """At the same time: this one, and one that is killed."""
    num_loaded, num_answers = [0, 0], 0
    child = servers.start(tmp_path, 0)
    try:
        with closing(serve(str(tmp_path), 1)) as own:
            while num_answers < 24 or not all(num_loaded):
                assert num_answers < 500, "a process loads nothing"
                answers = json.loads(servers.output.readline()), next(own)
                for number, (index, token_ids, digest, loaded) in enumerate(answers):
                    assert (token_ids, digest) == expected[index]
                    num_loaded[number] += loaded
                    num_answers += 1
            os.kill(child, signal.SIGKILL)
            servers.rest()
            index, token_ids, digest, _ = next(own)
            assert (token_ids, digest) == expected[index]
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    assert main(["cache", "verify", str(tmp_path)]) == 0


def test_killed_servers_leave_whole_files_and_right_answers(
    servers: Servers, tmp_path: Path, expected: list[Any]
) -> None:
    num_loaded, num_answers = kill_servers(servers, tmp_path, expected, 4)
    assert num_loaded > 0
    assert num_answers >= 4


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_500_killed_servers_leave_whole_files_and_right_answers(
    servers: Servers, tmp_path: Path, expected: list[Any]
) -> None:
    num_loaded, num_answers = kill_servers(servers, tmp_path, expected, 500)
    assert num_loaded > 10_000
    assert num_answers >= 500
    assert list(tmp_path.rglob("*.kv"))
