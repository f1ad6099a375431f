"""`ProcessTPGroup`: ranks that are processes of one machine, by NCCL on CUDA and by gloo elsewhere.

The groups are separate objects: torch.distributed's default group belongs to the program that uses
this library and is not touched.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=30)  # for the slowest rank to load; a death is noticed at once


def open_store(size: int, port: int = 0) -> dist.TCPStore:
    """Where ranks find each other: rank 0 opens it on a free port, the others on its `port`."""
    return dist.TCPStore(HOST, port, size, port == 0, TIMEOUT, wait_for_workers=False)


class ProcessTPGroup:
    """See `TPGroup`. Every rank makes one, at the same time, on a device of its own or the CPU."""

    def __init__(self, store: dist.TCPStore, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._host: Any = _gloo(dist.PrefixStore("host", store), rank, size)
        self._device: Any = self._host
        self.all_reduce_min(0)  # wait for all of them
        if device.type == "cuda":
            self._device = _nccl(dist.PrefixStore("device", store), rank, size)
            self._connect(device)

    def all_reduce(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            # In the order of the ranks: gloo's own sum begins with another rank for each part of x,
            # and rounds bfloat16 once a rank.
            total, *others = self._gather(x)
            total = total.float()
            for part in others:
                total += part
            return x.copy_(total)
        self._run("allreduce", [x], dist.AllreduceOptions())
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        return self._gather(x).transpose(0, 1).flatten(1)

    def _gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape]: every rank's x [m, n]."""
        x = x.contiguous()
        parts = x.new_empty((self.size * len(x), *x.shape[1:]))
        self._run("_allgather_base", parts, x, AllgatherOptions())
        return parts.view(self.size, *x.shape)

    def broadcast(self, x: Tensor) -> None:
        self._run("broadcast", [x], dist.BroadcastOptions())

    def all_reduce_min(self, number: int) -> int:
        value = torch.tensor([number])
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._host.allreduce([value], options).wait()
        return int(value)

    def abort(self) -> None:
        """Break calls that wait for a rank that has died. From any thread; no call follows."""
        if self._device is not self._host:  # gloo notices by itself
            with contextlib.suppress(Exception):
                self._device.abort()

    def close(self) -> None:
        """Close the connections: their threads must not outlive the interpreter."""
        self.abort()
        self._device = self._host = None

    def _run(self, name: str, *arguments: Any) -> None:
        options = arguments[-1]
        if hasattr(options, "asyncOp"):
            options.asyncOp = False  # on the current stream, which a graph may be capturing
        work = getattr(self._device, name)(*arguments)
        if work is not None:
            work.wait()

    def _connect(self, device: torch.device) -> None:
        """The first call makes the connections, which no graph could capture."""
        with torch.cuda.device(device):
            self.all_reduce(torch.zeros(1, device=device))
            torch.cuda.synchronize(device)


def _gloo(store: dist.PrefixStore, rank: int, size: int) -> Any:
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._timeout = TIMEOUT
    options._devices = [backend.create_device(hostname=HOST)]
    return backend(store, rank, size, options)


def _nccl(store: dist.PrefixStore, rank: int, size: int) -> Any:
    backend: Any = dist.ProcessGroupNCCL
    options = backend.Options()
    options._timeout = TIMEOUT
    with _unless_set("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
        return backend(store, rank, size, options)


@contextlib.contextmanager
def _unless_set(name: str, value: str) -> Iterator[None]:
    """Set an environment variable temporarily unless it is set: by default PyTorch aborts the
    process when NCCL loses a rank; here rank 0 monitors the ranks and raises EngineDead."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
