"""Jobs in processes of their own, several at a time if asked: none of them can hurt another.

A job is a group of a part: `run(bench, group)` of the part's module. It tells rows while it runs;
they are kept however it ends: by an exception, a crash, or a time limit, at which its process and
all that it started are killed.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

Tell = Callable[[str, Any], None]

METHODS = ("forkserver", "spawn")  # the first one saves each job the imports
PRELOAD = (  # heavy imports of the jobs, loaded once before these are forked; none touches a device
    "transformers.models.llama.modeling_llama",
    "radixserve.api.runtime",
    "radixserve.runner.cuda_runner",
)


class Skip(Exception):
    """A part, or the rest of it, cannot run here; the message says why."""


class Opens(Protocol):
    """The settings of a run."""

    def open(self, tell: Tell) -> Any:
        """The first argument of a part's `run`."""
        ...


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
    settings: Opens,
    log: Path,
    tell: Callable[[str, str, Any], None],
    *,
    width: int = 1,
    method: str = METHODS[0],
    preload: Sequence[str] = PRELOAD,
) -> dict[str, Ended]:
    """Run all, `width` at a time; `tell(group, kind, value)` gets what they tell. How each
    group ended."""
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(list(preload))
    waiting, ended = list(jobs), {}
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < width:
                running.append(_Running(context, waiting.pop(0), settings, log))
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
    def __init__(self, context: Any, job: Job, settings: Opens, log: Path) -> None:
        self.job, self.deadline = job, time.monotonic() + job.limit_s
        self.reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(job, settings, writer, log))
        self._process.start()
        writer.close()

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
            return _trouble(self.job, f"no end after {self.job.limit_s:.0f} s")
        return None

    def kill(self) -> None:
        """The process and what it started: it leads a group of its own."""
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


def _work(job: Job, settings: Opens, writer: Connection, log: Path) -> None:
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


def attempt(job: Job, settings: Opens, tell: Tell) -> Ended:
    """Run the job in this process, however it ends."""
    try:
        import_module(job.module).run(settings.open(tell), job.group)
    except Skip as reason:
        return Ended(skipped=str(reason))
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:240]
        return _trouble(job, f"{type(error).__name__}: {text}")
    return Ended()
