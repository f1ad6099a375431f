"""`radixserve serve demo` in a process that also says how long its event loop was held, and its
memory. Run as a program this is the process; `WatchedServer` is the test's end of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.server.served_process import Served

_LOOK_EVERY_S = 0.001


class Hold(NamedTuple):
    """The longest time since the last report in which the loop did not get to its next task.

    loop_s     CPU seconds of the loop's thread: other programs of the machine do not count
    process_s  CPU seconds of all threads meanwhile: also where another one kept the interpreter
    """

    loop_s: float
    process_s: float


class Memory(NamedTuple):
    """Resident bytes of the server and of its children: now, and at most since `reset_peaks`."""

    present: int
    peak: int


class WatchedServer(Served):
    def __init__(self, *arguments: str) -> None:
        pipe = subprocess.PIPE
        super().__init__(
            *arguments, program=("-m", "tests.server.watched_server"), stdin=pipe, stdout=pipe
        )

    def hold(self) -> Hold:
        """Since the last call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return Hold(*json.loads(self.process.stdout.readline()))

    def reset_peaks(self) -> int:
        """Returns the present size."""
        for pid in self._pids():
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        return self.memory().present

    def memory(self) -> Memory:
        present = peak = 0
        for pid in self._pids():
            with contextlib.suppress(OSError):  # a child that has just ended
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                sizes = dict(line.split(":", 1) for line in lines)
                present += int(sizes.get("VmRSS", "0").split()[0]) * 1024
                peak += int(sizes.get("VmHWM", "0").split()[0]) * 1024
        return Memory(present, peak)

    def _pids(self) -> list[int]:
        pids = [self.process.pid]
        for path in Path(f"/proc/{pids[0]}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread that has just ended
                pids += map(int, path.read_text().split())
        return pids


async def _watch() -> None:
    """Answer each line of standard input with the Hold since the one before."""
    loop = asyncio.get_running_loop()
    longest = [0.0, 0.0]
    is_asked = False

    def ask() -> None:
        nonlocal is_asked
        if not os.read(0, 1):
            os._exit(1)  # the test has ended without `stop`
        is_asked = True

    loop.add_reader(0, ask)
    before = time.thread_time(), time.process_time()
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        now = time.thread_time(), time.process_time()
        longest = [max(longest[part], now[part] - before[part]) for part in range(2)]
        if is_asked:
            print(json.dumps(longest), flush=True)
            is_asked, longest = False, [0.0, 0.0]
        before = time.thread_time(), time.process_time()


def main() -> int:
    from radixserve.cli import main as run_command
    from radixserve.server.process import Process

    run = Process.run

    async def run_watched(process: Process) -> int:
        watching = asyncio.create_task(_watch())
        try:
            return await run(process)
        finally:
            watching.cancel()

    Process.run = run_watched  # type: ignore[method-assign]
    return run_command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
