"""Jobs in processes of their own, several at a time if asked: none of them can hurt another.

A job is a group of a part: `run(bench, group)` of the part's module. It tells rows while it runs;
they are kept however it ends: by an exception, a crash, or a time limit, at which its process and
all that it started are killed. So are they when the process that started it is.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from gpu.limits import Ceilings

Tell = Callable[[str, Any], None]

# Kills a job's process group, $0, once nothing holds the other end of its input.
WATCH = ("/bin/sh", "-c", 'read _; kill -9 "-$0" "$0"')
METHODS = ("forkserver", "spawn")  # the first one saves each job the imports
PRELOAD = (  # heavy imports of the jobs, loaded once before these are forked; none touches a device
    "transformers.models.llama.modeling_llama",
    "radixserve.api.runtime",
    "radixserve.runner.cuda_runner",
)


class Skip(Exception):
    """A part, or the rest of it, cannot run here; the message says why."""


@dataclass(frozen=True)
class Settings:
    """The same for all parts. This module is light: what starts the jobs imports no torch."""

    is_dry: bool = False
    is_quick: bool = False
    backend: str = "auto"
    page_size: int = 1
    seed: int = 0
    ceilings: Ceilings | None = None  # None: not measured yet

    def open(self, tell: Tell) -> Any:
        """The first argument of a part's `run`, in its process. Raises Skip without a GPU."""
        from gpu.bench import Bench

        return Bench(self, tell)


@dataclass(frozen=True)
class Job:
    """What to run, and for how long at most."""

    module: str
    group: str
    limit_s: float


@dataclass(frozen=True)
class Ended:
    """How a job ended: at most one of the two is set."""

    trouble: str = ""
    skipped: str = ""


def run_jobs(
    jobs: Sequence[Job],
    settings: Settings,
    log: Path,
    tell: Callable[[str, str, Any], None],
    *,
    width: int = 1,
    method: str = METHODS[0],
    preload: Sequence[str] = PRELOAD,
    until: float = math.inf,
) -> dict[str, Ended]:
    """Run all, `width` at a time; `tell(group, kind, value)` gets what they tell. How each
    group ended. until: when the last one ends at the latest, of `time.monotonic`."""
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(list(preload))
    waiting, ended = list(jobs), {}
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < width:
                job = waiting.pop(0)
                if time.monotonic() < until:
                    running.append(_Running(context, job, settings, log, until))
                else:
                    ended[job.group] = _trouble(job, "not begun before the deadline")
            if not running:
                break
            soonest = min(one.deadline for one in running)
            wait([one.reader for one in running], max(0.0, soonest - time.monotonic()))
            for one in list(running):
                if (end := one.read(tell)) is not None:
                    one.kill()
                    running.remove(one)
                    ended[one.job.group] = end
    finally:
        for one in running:
            one.kill()
    return ended


class _Running:
    def __init__(self, context: Any, job: Job, settings: Settings, log: Path, until: float) -> None:
        self.job, self.deadline = job, time.monotonic() + job.limit_s
        self._limit = f"after {job.limit_s:.0f} s"
        if until < self.deadline:
            self.deadline, self._limit = until, "before the deadline"
        self.reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(job, settings, writer, log))
        self._process.start()
        writer.close()
        self._watch = subprocess.Popen(
            [*WATCH, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def read(self, tell: Callable[[str, str, Any], None]) -> Ended | None:
        """Pass on what was told; how it ended, if it has."""
        while self.reader.poll():
            try:
                kind, value = self.reader.recv()
            except EOFError:
                return self._crashed()
            if kind == "ended":
                self._process.join(5)
                return Ended(**value)
            tell(self.job.group, kind, value)
        if time.monotonic() > self.deadline:
            return _trouble(self.job, f"no end {self._limit}")
        return None

    def kill(self) -> None:
        """The process and what it started: it leads a group of its own."""
        self._watch.kill()
        self._watch.communicate()
        pid = self._process.pid
        if pid is not None:
            try:
                os.killpg(pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()
        self._process.join()

    def _crashed(self) -> Ended:
        self._process.join(5)
        code = self._process.exitcode
        how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        return _trouble(self.job, f"{how}, see the log")


def _trouble(job: Job, text: str) -> Ended:
    return Ended(f"{job.group}: {text}" if job.group else text)


def _work(job: Job, settings: Settings, writer: Connection, log: Path) -> None:
    """In the job's process."""
    os.setsid()
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    print(f"-- {job.module} {job.group}", flush=True)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    end = attempt(job, settings, lambda kind, value: writer.send((kind, value)))
    spent = os.times()
    cpu_s = spent.user + spent.system + spent.children_user + spent.children_system
    print(f"-- {job.module} {job.group}: {cpu_s:.1f} CPU s {end.trouble}{end.skipped}", flush=True)
    writer.send(("ended", {"trouble": end.trouble, "skipped": end.skipped}))
    writer.close()


def attempt(job: Job, settings: Settings, tell: Tell) -> Ended:
    """Run the job in this process, however it ends."""
    try:
        import_module(job.module).run(settings.open(tell), job.group)
    except Skip as reason:
        return Ended(skipped=str(reason))
    except Exception as error:
        traceback.print_exc()
        return _trouble(job, describe_error(error))
    return Ended()


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"
