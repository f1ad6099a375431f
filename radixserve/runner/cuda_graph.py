"""Decode steps as captured graphs: one per number of rows; the smallest that fits is replayed.

A graph is captured from one forward over rows of one token each. It reads its input from buffers
that never move and leaves its logits in one; fewer rows are padded. On the CPU the "graph" is the
forward itself, run again over the same buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch
from radixserve.models.base import LanguageModel
from radixserve.runner.device_batch import BatchUploader
from radixserve.runner.input_batch import InputBatch

logger = logging.getLogger("radixserve")

CAPTURE_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_NUM_WARM_UP = 2


def capture_sizes(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows to capture, ascending. The last is `max_rows`, at most 256: larger steps need
    no graph."""
    most = min(max_rows, CAPTURE_SIZES[-1])
    return (*[size for size in CAPTURE_SIZES if size < most], most)


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """A captured decode graph for `num_rows` rows with at most `max_pages` page ids in all."""

    num_rows: int
    max_pages: int
    backends: tuple[AttentionBackend, ...]  # by how many levels of shared pages they read together
    replays: tuple[Callable[[], None], ...]
    logits: Tensor  # [num_rows, V] float32, of the last replay
    shared_levels: Callable[[ForwardBatch], int]  # which of the backends to take

    def plan(self, batch: ForwardBatch) -> Callable[[], Tensor]:
        """Prepare for a padded batch from the fixed buffer. Returns what computes its logits
        [num_rows, V], valid until the next graph runs."""
        level = self.shared_levels(batch) if len(self.backends) > 1 else 0
        self.backends[level].plan(batch)

        def replay() -> Tensor:
            self.replays[level]()
            return self.logits

        return replay

    def captured_again(
        self, model: LanguageModel, uploader: BatchUploader, capturer: GraphCapturer | None
    ) -> DecodeGraph:
        """See `DecodeGraphs.with_adapters`."""
        batch, replays = uploader.upload_padding(self.num_rows, has_adapters=True), []
        for backend in self.backends:
            backend.plan(batch)
            run = partial(model.forward_into, self.logits, batch, backend)
            replays.append(run if capturer is None else capturer.capture(run))
        return replace(self, replays=tuple(replays))


class DecodeGraphs:
    """All graphs of a runner, ascending."""

    def __init__(
        self, graphs: tuple[DecodeGraph, ...] = (), capturer: GraphCapturer | None = None
    ) -> None:
        self._graphs, self._capturer = graphs, capturer

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(graph.num_rows for graph in self._graphs)

    @torch.inference_mode()
    def with_adapters(self, model: LanguageModel, uploader: BatchUploader) -> DecodeGraphs:
        """The same steps where adapters compute some of the rows, in the same memory."""
        return DecodeGraphs(
            tuple(
                graph.captured_again(model, uploader, self._capturer)
                for graph in reversed(self._graphs)
            )[::-1],
            self._capturer,
        )

    def pick(self, batch: InputBatch) -> DecodeGraph | None:
        """The smallest for these rows; None if they are not a plain decode step or do not fit."""
        if batch.num_tokens != batch.num_rows:
            return None
        for graph in self._graphs:
            missing = graph.num_rows - batch.num_rows  # padding has a page each
            if missing >= 0 and batch.num_pages + missing <= graph.max_pages:
                return graph
        return None


@torch.inference_mode()
def capture_decode_steps(
    model: LanguageModel,
    backend: AttentionBackend,
    uploader: BatchUploader,
    sizes: tuple[int, ...],
    max_pages: Callable[[int], int],
    *,
    shares: bool,
) -> DecodeGraphs:
    """Capture every size, from the largest down: the smaller ones reuse its memory. K and V have
    their final place by now.

    max_pages: of a number of rows, see `DecodeGraph`. shares: with a level of shared pages, too.
    """
    device = backend.kv.device
    shape = sizes[-1], model.info.vocab_size
    logits = torch.empty(shape, dtype=torch.float32, device=device)
    capturer = GraphCapturer(device) if device.type == "cuda" else None
    graphs: list[DecodeGraph] = []
    for size in reversed(sizes):
        batch, out = uploader.upload_padding(size), logits[:size]
        backends, replays = [], []
        for num_levels in range(2 if shares else 1):
            graph_backend = backend.make_graph_backend(size, max_pages(size), num_levels)
            graph_backend.plan(batch)
            backends.append(graph_backend)
            run = partial(model.forward_into, out, batch, graph_backend)
            replays.append(run if capturer is None else capturer.capture(run))
        graphs.insert(
            0,
            DecodeGraph(
                num_rows=size,
                max_pages=max_pages(size),
                backends=tuple(backends),
                replays=tuple(replays),
                logits=out,
                shared_levels=backend.shared_levels,
            ),
        )
        logger.debug("captured a decode step of %d rows", size)
    return DecodeGraphs(tuple(graphs), capturer)


class GraphCapturer:
    """Captures graphs on one device; they share a stream and a memory pool: one is replayed at a
    time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], object]) -> Callable[[], None]:
        """Returns a function that repeats `run` over the same tensors."""
        main = torch.cuda.current_stream(self._device)
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            for _ in range(_NUM_WARM_UP):  # compiles and allocates: no graph may do that
                run()
        main.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"
        ):
            run()
        replay: Callable[[], None] = graph.replay
        return replay
