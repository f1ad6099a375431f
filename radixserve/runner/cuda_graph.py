"""Decode steps as recorded graphs: one a number of rows, the smallest that fits is replayed.

A recording is made of one forward over rows of one token each. It reads its input from buffers that
never move and leaves its logits in one; fewer rows are padded. On the CPU the "recording" is the
forward itself, run again over the same buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch
from radixserve.models.base import LanguageModel
from radixserve.runner.device_batch import BatchSender
from radixserve.runner.device_queue import DeviceQueue
from radixserve.runner.step_layout import StepLayout

logger = logging.getLogger("radixserve")

LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_NUM_WARM_UP = 2


def ladder(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows to record, ascending. The last one holds `max_rows`, if a graph ever does:
    larger steps keep a device busy without."""
    most = min(max_rows, LADDER[-1])
    return (*[size for size in LADDER if size < most], most)


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """Of `num_rows` rows, whose page ids together are at most `max_pages`."""

    num_rows: int
    max_pages: int
    backends: tuple[Any, ...]  # by how many levels of shared pages they read together
    replays: tuple[Callable[[], None], ...]
    logits: Tensor  # [num_rows, V] float32, of the last replay
    levels_for: Callable[[ForwardBatch], int] | None  # which of them to take; None: the first

    def plan(self, batch: ForwardBatch) -> Callable[[], Tensor]:
        """Prepare for a padded batch from the fixed buffer. What is returned computes its logits
        [num_rows, V], good until the next graph runs."""
        level = 0 if self.levels_for is None else self.levels_for(batch)
        self.backends[level].plan(batch)

        def replay() -> Tensor:
            self.replays[level]()
            return self.logits

        return replay


class DecodeGraphs:
    """All recordings of a runner. `record` comes once, when K and V have their final place."""

    def __init__(self, queue: DeviceQueue, sender: BatchSender) -> None:
        self._queue, self._sender = queue, sender
        self._graphs: list[DecodeGraph] = []  # ascending

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(graph.num_rows for graph in self._graphs)

    def pick(self, layout: StepLayout) -> DecodeGraph | None:
        """The smallest for these rows; None where they are no plain decode step or do not fit."""
        if layout.num_tokens != layout.num_all_rows:
            return None
        for graph in self._graphs:
            more = graph.num_rows - layout.num_rows  # padding has a page each
            if more >= 0 and layout.num_all_pages + more <= graph.max_pages:
                return graph
        return None

    @torch.inference_mode()
    def record(
        self,
        model: LanguageModel,
        backend: Any,
        sizes: tuple[int, ...],
        max_pages: Callable[[int], int],
        *,
        shares: bool,
    ) -> None:
        """Record every size, from the largest down: the smaller ones reuse its memory.

        max_pages: of a number of rows, see `DecodeGraph`. shares: with shared pages, too.
        """
        device = self._queue.device
        shape = sizes[-1], model.info.vocab_size
        logits = torch.empty(shape, dtype=torch.float32, device=device)
        recorder = _CudaRecorder(device) if device.type == "cuda" else None
        levels_for = backend.shared_levels if shares else None
        for size in reversed(sizes):
            batch, out = self._sender.padding(size), logits[:size]
            backends, replays = [], []
            for num_levels in range(2 if shares else 1):
                own = backend.capture_backend(size, max_pages(size), num_levels)
                own.plan(batch)
                backends.append(own)
                run = _forward_into(out, model, batch, own)
                replays.append(run if recorder is None else recorder.record(run))
            graph = DecodeGraph(
                size, max_pages(size), tuple(backends), tuple(replays), out, levels_for
            )
            self._graphs.insert(0, graph)
            logger.debug("recorded a decode step of %d rows", size)


def _forward_into(
    out: Tensor, model: LanguageModel, batch: ForwardBatch, backend: AttentionBackend
) -> Callable[[], None]:
    def forward() -> None:
        out.copy_(model.forward(batch, backend))

    return forward


class _CudaRecorder:
    """Of one device. All recordings share a stream and memory: one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What repeats `run` over the same tensors."""
        main = torch.cuda.current_stream(self._device)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            for _ in range(_NUM_WARM_UP):  # compiles and allocates what may not happen below
                run()
        main.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
        ):
            run()
        replay: Callable[[], None] = graph.replay
        return replay
