"""Jobs in processes of their own, several at a time if asked: none of them can hurt another.

A job is a group of a part: `run(bench, group)` of the part's module. It tells rows while it runs;
they are kept whatever becomes of it: an exception, a crash, or a time limit, at which its process
and all that it started are killed.
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
PRELOAD = ("gpu_preload",)  # imported once, in the process that jobs are forked from


class Skip(Exception):
    """A part, or what is left of it, cannot run here; the message says why."""


class Opens(Protocol):
    """The settings of a run."""

    def open(self, tell: Tell) -> Any:
        """What a part's `run` is handed first."""
        ...


@dataclass(frozen=True)
class Job:
    """What to run, and for how long at most."""

    module: str
    group: str
    limit_s: float

    def say(self, text: str) -> str:
        """Which group says it."""
        return f"{self.group}: {text}" if self.group else text


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
    waiting, running, ended = list(jobs), [], {}
    try:
        while waiting or running:
            while waiting and len(running) < width:
                running.append(_Running(context, waiting.pop(0), settings, log))
            soonest = min(one.deadline for one in running)
            wait([one.reader for one in running], max(0.0, soonest - time.monotonic()))
            for one in list(running):
                if (end := one.read(tell)) is not None:
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
        self._process = context.Process(target=work, args=(job, settings, writer, log))
        self._process.start()
        writer.close()

    def read(self, tell: Callable[[str, str, Any], None]) -> Ended | None:
        """Pass on what was told; how it ended, if it has."""
        while self.reader.poll():
            try:
                kind, value = self.reader.recv()
            except EOFError:
                return self._fallen()
            if kind == "ended":
                self._process.join(5)
                self.kill()
                return Ended(**value)
            tell(self.job.group, kind, value)
        if time.monotonic() > self.deadline:
            self.kill()
            return Ended(self.job.say(f"no end after {self.job.limit_s:.0f} s"))
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

    def _fallen(self) -> Ended:
        self._process.join(5)
        code = self._process.exitcode
        self.kill()
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
            return Ended(self.job.say(f"{how}, see the log"))
        return Ended(self.job.say(f"ended with exit code {code}, see the log"))


def work(job: Job, settings: Opens, writer: Connection, log: Path) -> None:
    """In the job's process."""
    os.setsid()
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    print(f"-- {job.module} {job.group}", flush=True)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")

    def tell(kind: str, value: Any) -> None:
        writer.send((kind, value))

    end = attempt(job, settings, tell)
    spent = os.times()
    cpu_s = spent.user + spent.system + spent.children_user + spent.children_system
    print(f"-- {job.module} {job.group}: {cpu_s:.1f} CPU s {end.trouble}{end.skipped}", flush=True)
    writer.send(("ended", {"trouble": end.trouble, "skipped": end.skipped}))
    writer.close()


def attempt(job: Job, settings: Opens, tell: Tell) -> Ended:
    """Run the job here, whatever it does."""
    try:
        import_module(job.module).run(settings.open(tell), job.group)
    except Skip as reason:
        return Ended(skipped=str(reason))
    except Exception as error:
        traceback.print_exc()
        text = " ".join(str(error).split())[:240]
        return Ended(job.say(f"{type(error).__name__}: {text}"))
    return Ended()
