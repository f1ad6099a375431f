"""`WorkerGroup`: the processes of ranks 1, 2 ..., started, sent to, watched and ended by rank 0.

They are plain child processes, not multiprocessing's: a program that uses this library needs no
`if __name__ == "__main__"`, and may be a notebook.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait

from radixserve.errors import EngineDead, fresh
from radixserve.runner.tensor_parallel.worker_process import WorkerArgs, WorkerFailure

logger = logging.getLogger("radixserve")

START_S = 300.0  # for a process to import its modules
STOP_S = 5.0  # for a process to end by itself
NOTICE_S = 5.0  # until a death that has broken a call is noticed
_CODE = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from radixserve.runner.tensor_parallel.worker_process import main
main(int(sys.argv[2]))
"""


@dataclass(frozen=True, slots=True)
class _Member:
    rank: int
    process: subprocess.Popen[bytes]
    link: Connection


class WorkerGroup:
    """Started processes; end them by `shut_down`, from any thread. One thread sends."""

    def __init__(self, args: Sequence[WorkerArgs], code: str = _CODE) -> None:
        self._members: list[_Member] = []
        self._death: EngineDead | None = None
        self._is_ending = False
        self._owner = os.getpid()
        self._has_died = threading.Event()
        self._watcher: threading.Thread | None = None
        try:
            for worker_args in args:
                self._members.append(_start(worker_args, code))
        except BaseException:
            self.shut_down()
            raise

    @property
    def process_ids(self) -> list[int]:
        return [member.process.pid for member in self._members]

    @property
    def exit_codes(self) -> list[int | None]:
        """None of those that run."""
        return [member.process.poll() for member in self._members]

    def wait_until_ready(self) -> None:
        """Return when each of them is about to connect. Raises EngineDead if one cannot."""
        for member in self._members:
            try:
                if not member.link.poll(START_S):
                    raise EngineDead(f"rank {member.rank} did not start within {START_S:.0f} s")
                answer = member.link.recv()
            except (EOFError, OSError):
                answer = None
            if not isinstance(answer, str):
                raise _death_of(member, answer)

    def watch(self, on_death: Callable[[], None]) -> None:
        """From now on call `on_death` once, in another thread, when one of them ends unasked."""
        self._watcher = threading.Thread(
            target=self._watch, args=(on_death,), name="radixserve-ranks", daemon=True
        )
        self._watcher.start()

    def send(self, message: bytes) -> None:
        """Send a message to each of them. Raises EngineDead when one has ended."""
        if self._death is not None:
            raise fresh(self._death)
        try:
            for member in self._members:
                member.link.send_bytes(message)
        except OSError as error:
            raise self.explain(error) from None

    def explain(self, error: Exception) -> EngineDead:
        """The error of a call of all ranks that failed here; none of them can continue.

        Waits a moment for the notice that one has ended.
        """
        if isinstance(error, EngineDead):
            self._death = self._death or error
            return fresh(self._death)
        self._has_died.wait(NOTICE_S)
        if self._death is None:
            self._death = EngineDead(f"rank 0 failed, and the others with it: {error!r}")
            self._death.__cause__ = error
        return fresh(self._death)

    def check_alive(self) -> None:
        """Raise EngineDead when one has ended: results since then are void."""
        if self._death is not None:
            raise fresh(self._death)

    def shut_down(self, *, by_force: bool = False) -> None:
        """Close the pipes and wait; a process that does not end is terminated, then killed.

        by_force: terminate at once, as it may wait for what never comes. Can be called again.
        """
        if os.getpid() != self._owner:  # a fork of rank 0: they are not its processes
            return
        self._is_ending = True
        self._death = self._death or EngineDead("the ranks were ended")
        self._has_died.set()
        for member in self._members:
            if by_force:
                member.process.terminate()
            _close_sending(member.link)
        for member in self._members:
            _reap(member.process)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()

    def _watch(self, on_death: Callable[[], None]) -> None:
        failures: dict[int, WorkerFailure] = {}
        open_members = {member.link: member for member in self._members}
        while open_members:
            for link in wait(list(open_members)):
                assert isinstance(link, Connection)
                member = open_members[link]
                try:
                    answer = link.recv()
                    if isinstance(answer, WorkerFailure):
                        failures[member.rank] = answer
                except (EOFError, OSError):
                    del open_members[link]
                    if not self._is_ending and not self._has_died.is_set():
                        self._death = _death_of(member, failures.get(member.rank))
                        logger.error("%s", self._death)
                        self._has_died.set()
                        on_death()


def _start(args: WorkerArgs, code: str) -> _Member:
    ours, theirs = Pipe()
    assert isinstance(ours, Connection)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(sys.path), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # ours is the program's own
            pass_fds=(theirs.fileno(),),
        )
    member = _Member(args.rank, process, ours)
    with contextlib.suppress(OSError):  # it has ended; that shows soon
        ours.send(args)
    return member


def _close_sending(link: Connection) -> None:
    """The other end reads what was sent, then the end of it. Never waits, as a last message may."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(link.fileno())) as ours:
        ours.shutdown(socket.SHUT_WR)


def _death_of(member: _Member, failure: object) -> EngineDead:
    """Why a rank has ended, from its last message and the exit code of its process."""
    if isinstance(failure, WorkerFailure):
        death = EngineDead(f"rank {member.rank} failed: {failure.error}")
        death.__cause__ = RuntimeError(f"in rank {member.rank}:\n{failure.details}")
        return death
    code = _reap(member.process)
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return EngineDead(f"the process of rank {member.rank} {how}")


def _reap(process: subprocess.Popen[bytes]) -> int:
    """The exit code; terminates, then kills a process that does not end by itself."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(STOP_S)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(STOP_S)
    process.kill()
    return process.wait()
