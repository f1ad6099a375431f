"""A group of a part in a process of its own: none of them can hurt another.

What a group tells lies in a file, a JSON object a line, however it ends: by an exception, a crash,
or a time limit, at which its process and all that it started are killed. So are they when the
process that started it is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from gpu.limits import Ceilings

# Kills a job's process group, $0, once nothing holds the other end of its input.
WATCH = ("/bin/sh", "-c", 'read _; kill -9 "-$0" "$0"')


class Skip(Exception):
    """A part, or the rest of it, cannot run here; the message says why."""


@dataclass(frozen=True)
class Settings:
    """The same for all parts. This module is light: what starts the jobs imports no torch."""

    is_dry: bool = False
    backend: str = "auto"
    page_size: int = 1
    ceilings: Ceilings | None = None  # None: not measured yet


class Job:
    """`run(bench, group)` of a module."""

    def __init__(
        self,
        module: str,
        group: str,
        settings: Settings,
        folder: Path,
        limit_s: float,
        until: float = math.inf,
    ) -> None:
        """It begins now. until: when it ends at the latest, of `time.monotonic`."""
        self.group = group
        self.deadline = min(time.monotonic() + limit_s, until)
        self._file = folder / f"{module}-{group or 'all'}.jsonl"
        self._file.write_text("")
        words = (module, group, self._file, json.dumps(asdict(settings)))
        with (folder / "log.txt").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gpu.jobs", *map(str, words)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._watch = subprocess.Popen(
            [*WATCH, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def finish(self) -> None:
        """Wait for its end, or make one."""
        trouble = ""
        try:
            code = self._process.wait(max(0.0, self.deadline - time.monotonic()))
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            trouble = f"{how}, see the log" if code else ""
        except subprocess.TimeoutExpired:
            trouble = "no end before its time limit or the deadline"
        finally:
            self._watch.kill()
            self._watch.communicate()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if trouble:
            teller(self._file)("trouble", trouble)

    def told(self) -> list[tuple[str, Any]]:
        """(kind, value) of all that it has told so far."""
        return [tuple(json.loads(line)) for line in self._file.read_text().splitlines()]


def teller(file: Path) -> Callable[[str, Any], None]:
    """Tells by a line in the file."""

    def tell(kind: str, value: Any) -> None:
        with file.open("ab", buffering=0) as lines:  # whole lines, also of a process that is killed
            lines.write(json.dumps([kind, value], default=float).encode() + b"\n")

    return tell


def attempt(module: str, group: str, settings: Settings, tell: Callable[[str, Any], None]) -> None:
    """Run a group in this process, however it ends."""
    from gpu.bench import Bench

    try:
        import_module(module).run(Bench(settings, tell), group)
    except Skip as reason:
        tell("skipped", str(reason))
    except Exception as error:
        traceback.print_exc()
        tell("trouble", describe_error(error))


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"


def main(module: str, group: str, file: str, settings: str) -> None:
    print(f"-- {module} {group}", flush=True)
    logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    given = json.loads(settings)
    if given["ceilings"]:
        given["ceilings"] = Ceilings(**given["ceilings"])
    attempt(module, group, Settings(**given), teller(Path(file)))
    print(f"-- {module} {group}: {sum(os.times()[:4]):.1f} CPU s", flush=True)


if __name__ == "__main__":
    from gpu.jobs import main as run_job  # not this copy of the module: parts raise its Skip

    run_job(*sys.argv[1:])
