"""Each contender in a process of its own, so that memory and libraries' state are its own.

The lanes of a case are open together and take turns, one run at a time: a noisy moment of the
machine meets everyone. All are forked from one clean process that has imported torch and
transformers and computed nothing.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from engine_contenders import Answer, Contender, Job, Unavailable, open_contender
from engine_workloads import Conversation, Workload

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Sample:
    """One run of a workload."""

    cpu_s: float  # of all threads of the process
    wall_s: float
    first_s: list[float]  # of each request, from its submission to its first token
    num_prefilled: int
    peak_bytes: int | None  # most resident memory while it ran; None where it is not told
    outputs: list[list[int]]
    steps: dict[str, float]  # how many and the seconds of their parts; see Contender.stats


@dataclass(frozen=True)
class Absent:
    """Instead of a lane: why there is none."""

    name: str
    reason: str


class Lane:
    """A contender's process, warmed up; `run` measures once."""

    def __init__(self, name: str, process: Any, pipe: Connection, base_bytes: int | None) -> None:
        self.name, self.base_bytes = name, base_bytes  # resident before the model was loaded
        self._process, self._pipe = process, pipe

    def run(self) -> Sample:
        self._pipe.send(True)
        return _receive(self._pipe, self.name)

    def close(self) -> None:
        self._pipe.send(False)
        self._process.join()


class Lanes:
    """Opens lanes. `num_threads` holds for every library in them."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        for name in _THREAD_VARIABLES:
            os.environ[name] = str(num_threads)
        os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama"])

    def open(self, name: str, job: Job, warm_up: Workload, *, burst: bool) -> Lane | Absent:
        """Start a process, load, and run `warm_up` once; Absent if the engine cannot run here."""
        mine, its = self._context.Pipe()
        arguments = (its, self._num_threads, name, job, warm_up, burst)
        process = self._context.Process(target=_live, args=arguments, daemon=True)
        process.start()
        its.close()
        news = _receive(mine, name)
        if isinstance(news, Absent):
            process.join()
            return news
        return Lane(name, process, mine, news)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function in a clean process."""
        mine, its = self._context.Pipe()
        process = self._context.Process(
            target=_answer, args=(its, self._num_threads, function, arguments), daemon=True
        )
        process.start()
        its.close()
        result = _receive(mine, function.__name__)
        process.join()
        return result


def _receive(pipe: Connection, name: str) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise RuntimeError(f"the process of {name} has ended; its error is above") from None


def _answer(
    pipe: Connection, num_threads: int, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    _set_threads(num_threads)
    pipe.send(function(*arguments))


def _live(
    pipe: Connection, num_threads: int, name: str, job: Job, warm_up: Workload, burst: bool
) -> None:
    """The life of a lane's process."""
    _set_threads(num_threads)
    base_bytes = read_status("VmRSS")
    try:
        contender = open_contender(name, job)
    except Unavailable as error:
        pipe.send(Absent(name, str(error)))
        return
    contender.reset()
    play(contender, warm_up, burst=burst)
    gc.freeze()  # no collection walks the libraries' objects while a case runs
    pipe.send(base_bytes)
    while pipe.recv():
        pipe.send(measure(contender, job.workload, burst=burst))
    contender.close()


def _set_threads(num_threads: int) -> None:
    import torch

    torch.set_num_threads(num_threads)
    torch.set_num_interop_threads(1)


def measure(contender: Contender, workload: Workload, *, burst: bool) -> Sample:
    """One run from nothing cached."""
    contender.reset()
    gc.collect()
    reset_peak()
    before = contender.stats()
    cpu, wall = time.process_time(), time.perf_counter()
    answers = play(contender, workload, burst=burst)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Sample(
        cpu_s=cpu,
        wall_s=wall,
        first_s=[answer.first_s for answer in answers],
        num_prefilled=contender.num_prefilled,
        peak_bytes=read_status("VmHWM"),
        outputs=[answer.token_ids for answer in answers],
        steps={name: value - before[name] for name, value in contender.stats().items()},
    )


def play(contender: Contender, workload: Workload, *, burst: bool) -> list[Answer]:
    """Ask everything; in a burst all requests of a round at once, else each after the last."""
    talk = Conversation.start(workload)
    said = []
    for additions in workload.rounds:
        prompts = talk.ask(additions)
        if burst:
            answers = contender.serve(prompts, range(len(prompts)))
        else:
            answers = [contender.serve([p], [s])[0] for s, p in enumerate(prompts)]
        for answer in answers:
            assert len(answer.token_ids) == workload.num_new, "every answer has its exact length"
        talk.answer([answer.token_ids for answer in answers])
        said += answers
    return said


def read_status(field: str) -> int | None:
    """Bytes of a field of this process's status, such as VmRSS or VmHWM; None but on Linux."""
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return None


def reset_peak() -> None:
    """Let VmHWM begin again at what is resident now."""
    if _CLEAR.exists():
        _CLEAR.write_text("5")
