"""What the process of rank 1, 2 ... does: load its part of the model, then step as it is told.

It hears from rank 0 over a pipe, answers over it only when it is ready and when it fails, and ends
with it. Ctrl-C on the terminal reaches it too, and is left to rank 0.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from radixserve.config import EngineConfig

if TYPE_CHECKING:
    from radixserve.runner.model_runner import ModelRunner

PARENT_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerArgs:
    """What a rank is told first."""

    rank: int
    size: int
    port: int  # of the store
    model_path: str
    config: EngineConfig  # of this rank: of one device
    on_device: bool  # see `ModelRunner`
    num_threads: int  # of torch


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """What a rank says last when it failed."""

    error: str  # a line
    details: str  # the traceback


def main(link_fd: int) -> None:
    """Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    link, code = Connection(link_fd), 0
    try:
        _work(link)
    except BaseException as error:
        code = 1
        with contextlib.suppress(OSError):
            link.send(WorkerFailure(repr(error), traceback.format_exc()))
    finally:
        os._exit(code)  # what lies on the device or waits for other ranks ends with the process


def _work(link: Connection) -> None:
    import torch

    from radixserve.runner.model_runner import ModelRunner
    from radixserve.runner.tp_group import ProcessTPGroup, open_store

    job: WorkerArgs = link.recv()
    torch.set_num_threads(job.num_threads)
    device = torch.device(job.config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = open_store(job.size, job.port)
    link.send("ready")
    ranks = ProcessTPGroup(store, job.rank, job.size, device)
    _serve(link, ModelRunner(job.model_path, job.config, ranks, on_device=job.on_device))


def _serve(link: Connection, runner: ModelRunner) -> None:
    """Take every step that rank 0 takes, until there is no rank 0. Like rank 0 it may launch a
    step before it collects the one before."""
    from radixserve.runner.schedule_wire import ScheduleUnpacker

    reader, pending = ScheduleUnpacker(), None
    while True:
        try:
            message = link.recv_bytes()
        except EOFError:
            return
        launched = runner.launch(reader.unpack(message))
        if pending is not None:
            runner.collect(pending)
        pending = launched


def _end_with_parent(parent: int) -> None:
    """However rank 0 ends, and whatever this process waits for then."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)
