"""Processes of ranks as such: started, fed, missed when they die, and always ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from radixserve.config import EngineConfig
from radixserve.errors import EngineDead
from radixserve.runner.tensor_parallel import worker_group
from radixserve.runner.tensor_parallel.worker_group import WorkerGroup
from radixserve.runner.tensor_parallel.worker_process import WorkerArgs
from tests.pacing import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
HEAD = """\
import json, os, signal, sys, time
sys.path[:] = json.loads(sys.argv[1])
import radixserve.runner.tensor_parallel.worker_process as worker_process
def work(link):
    job = link.recv()
    {body}
worker_process.main(int(sys.argv[2]), work)
"""
SERVE = """link.send("ready")
    while True:
        try:
            message = link.recv_bytes()
        except EOFError:
            return
        if message == b"fail":
            raise ValueError(f"no more in rank {job.rank}")
        if message == b"exit":
            os._exit(7)"""


def job(rank: int) -> WorkerArgs:
    no_runner: Any = object  # a process that reads of none does not import torch
    return WorkerArgs(rank, 3, 1, "model", EngineConfig(), no_runner, 1)


@contextlib.contextmanager
def workers_of(body: str, count: int = 2) -> Iterator[WorkerGroup]:
    workers = WorkerGroup([job(rank + 1) for rank in range(count)], HEAD.format(body=body))
    try:
        yield workers
    finally:
        workers.shut_down()
    assert not any(map(is_alive, workers.process_ids))


def is_alive(pid: int) -> bool:
    """Whether there is such a process, or a zombie of it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_are_sent_to_and_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "STOP_S", PATIENCE_S)
    deaths: list[None] = []
    with workers_of(SERVE) as workers:
        workers.wait_until_ready()
        workers.watch(lambda: deaths.append(None))
        for _ in range(3):
            workers.send(b"step")
            workers.check_alive()
    workers.shut_down()
    assert not deaths
    assert workers.exit_codes == [0, 0]
    with pytest.raises(EngineDead, match="ended"):
        workers.send(b"step")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"fail", r"rank [12] failed: ValueError\('no more in rank"),
        (b"exit", "the process of rank [12] ended with exit code 7"),
    ],
)
def test_a_death_is_noticed(message: bytes, words: str) -> None:
    died = threading.Event()
    with workers_of(SERVE) as workers:
        workers.wait_until_ready()
        workers.watch(died.set)
        workers.send(message)
        assert died.wait(PATIENCE_S)
        with pytest.raises(EngineDead, match=words) as caught:
            workers.check_alive()
        with pytest.raises(EngineDead, match=words):
            workers.send(b"step")
        assert str(workers.explain(RuntimeError("broken pipe"))) == str(caught.value)
        if message == b"fail":
            assert "in work\n" in str(caught.value.__cause__)  # of a traceback


def test_killed_and_stuck_ones_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "STOP_S", 0.3)
    stuck = 'signal.signal(signal.SIGTERM, signal.SIG_IGN); link.send("ready"); time.sleep(600)'
    with workers_of(stuck) as workers:
        workers.wait_until_ready()
        died = threading.Event()
        workers.watch(died.set)
        os.kill(workers.process_ids[0], signal.SIGKILL)
        assert died.wait(PATIENCE_S)
        with pytest.raises(EngineDead, match="rank 1 was ended by signal 9"):
            workers.check_alive()


def test_an_end_does_not_wait_for_unread_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "STOP_S", 0.3)
    with workers_of('link.send("ready"); time.sleep(600)', 1) as workers:
        workers.wait_until_ready()
        workers.watch(lambda: None)
        feeder = threading.Thread(target=feed_until_dead, args=(workers,))
        feeder.start()
        feeder.join(0.5)
        assert feeder.is_alive()  # nobody reads
        workers.shut_down(by_force=True)
        feeder.join(PATIENCE_S)
        assert not feeder.is_alive()


def feed_until_dead(workers: WorkerGroup) -> None:
    with contextlib.suppress(EngineDead):
        while True:
            workers.send(bytes(100_000))


def test_our_own_failure_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "NOTICE_S", 0.1)
    with workers_of(SERVE, 1) as workers:
        workers.wait_until_ready()
        workers.watch(lambda: None)
        death = workers.explain(MemoryError("full"))
        assert "rank 0 failed, and the others with it: MemoryError('full')" in str(death)
        assert isinstance(death.__cause__, MemoryError)
        with pytest.raises(EngineDead, match="rank 0 failed"):
            workers.send(b"step")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ImportError('no such module')", "rank 1 failed: ImportError"),
        ("os._exit(3)", "rank 1 ended with exit code 3"),
        ("time.sleep(600)", "rank 1 did not start within 0 s"),
    ],
)
def test_one_that_does_not_start(monkeypatch: pytest.MonkeyPatch, body: str, words: str) -> None:
    if "sleep" in body:
        monkeypatch.setattr(worker_group, "START_S", 0.2)
        monkeypatch.setattr(worker_group, "STOP_S", 0.2)
    with workers_of(body) as workers, pytest.raises(EngineDead, match=words):
        workers.wait_until_ready()


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGINT,
        *(pytest.param(how, marks=pytest.mark.long) for how in (signal.SIGKILL, signal.SIGTERM)),
    ],
)
def test_ranks_end_with_their_parent(tmp_path: Path, how: signal.Signals) -> None:
    """However it ends; by Ctrl-C, which they see themselves, not before it."""
    child = tmp_path / "child.py"
    body = 'link.send("ready"); time.sleep(600)'  # deaf for its link
    child.write_text(HEAD.format(body=body))
    parent = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from tests.runner.test_worker_group import job\n"
        "from radixserve.runner.tensor_parallel.worker_group import WorkerGroup\n"
        f"workers = WorkerGroup([job(1)], open({str(child)!r}).read())\n"
        "workers.wait_until_ready()\n"
        "print(workers.process_ids[0], flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        if how == signal.SIGINT:
            os.kill(pid, how)
            time.sleep(0.2)
            assert is_alive(pid)
            os.killpg(process.pid, how)
        else:
            os.kill(process.pid, how)
        process.wait(PATIENCE_S)
        wait_until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    """Whether it runs: an orphan's zombie is init's."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"
