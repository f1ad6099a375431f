"""The process of rank 1, 2 ...: loads its part of the model, then runs every step of rank 0.

It reads from rank 0 over a pipe, answers over it only when it is ready and when it fails, and ends
with it. Ctrl-C on the terminal reaches it too, and is left to rank 0.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from radixserve.config import EngineConfig

if TYPE_CHECKING:  # torch is imported after SIGINT is ignored
    from radixserve.runner.base import ModelRunner, RunnerKind

PARENT_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerArgs:
    """The first message to a worker."""

    rank: int
    size: int
    port: int  # of the store
    model_path: str
    config: EngineConfig  # of this rank: of one device
    kind: RunnerKind
    num_threads: int  # of torch


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """The last message of a worker that failed."""

    error: str  # a line
    details: str  # the traceback


def main(link_fd: int, work: Callable[[Connection], None] | None = None) -> None:
    """Never returns. `work` takes the place of a worker's own, for tests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    link, code = Connection(link_fd), 0
    try:
        (work or _work)(link)
    except BaseException as error:
        code = 1
        with contextlib.suppress(OSError):
            link.send(WorkerFailure(repr(error), traceback.format_exc()))
    finally:
        os._exit(code)  # device memory and calls that wait for other ranks end with the process


def _work(link: Connection) -> None:
    import torch

    from radixserve.runner.tensor_parallel.group import ProcessTPGroup, open_store

    args: WorkerArgs = link.recv()
    torch.set_num_threads(args.num_threads)
    device = torch.device(args.config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = open_store(args.size, args.port)
    link.send("ready")
    group = ProcessTPGroup(store, args.rank, args.size, device)
    serve(link, args.kind(args.model_path, args.config, group))


def serve(link: Connection, runner: ModelRunner) -> None:
    """Run every step that rank 0 runs, until its end of the pipe is closed.

    Like rank 0 it launches a step before it collects the one before, where steps overlap.
    """
    from radixserve.runner.tensor_parallel.schedule_wire import ScheduleUnpacker

    unpacker, pending = ScheduleUnpacker(), None
    while True:
        try:
            message = link.recv_bytes()
        except EOFError:
            return
        launched = runner.launch(unpacker.unpack(message))
        if not runner.overlap_depth:
            runner.collect(launched)
            continue
        if pending is not None:
            runner.collect(pending)
        pending = launched


def _end_with_parent(parent: int) -> None:
    """End however rank 0 ends, and whatever this process waits for then."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)
