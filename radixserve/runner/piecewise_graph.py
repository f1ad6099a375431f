"""Steps of a few hundred tokens with all but attention and recurrences as captured graphs.

A layer between two of these is one graph per number of tokens; the smallest that fits is replayed
on padded tokens, whose K and V are not stored. Attention and recurrences run without the padding:
their kernels and their grid depend on the rows. A launch-bound prefill step keeps three launches
per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from radixserve.attention.base import AttentionBackend, ForwardBatch, LayerKV
from radixserve.models.base import LayeredModel
from radixserve.runner.cuda_graph import GraphCapturer

CAPTURE_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512)
GRAPH_BYTES = 256 << 20  # about what the graphs of an 8B model take on the device


def capture_tokens(max_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens to capture, ascending, of steps of up to max_tokens: larger ones keep a
    device busy without graphs."""
    most = min(max_tokens, CAPTURE_TOKENS[-1])
    return (*[size for size in CAPTURE_TOKENS if size < most], most)


@dataclass(slots=True)
class _Activations:
    """What one graph leaves for the next: the layer's input and the residual [T, H]."""

    x: Tensor | None = None
    residual: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Graphs:
    """The graphs for one number of tokens, of each layer up to its `mix`."""

    replays: tuple[Callable[[], None], ...]
    last: _Activations


class PiecewiseGraphs:
    """All graphs of a runner over one set of buffers: a step is computed at a time."""

    @torch.inference_mode()
    def __init__(
        self, model: LayeredModel, backend: AttentionBackend, sizes: tuple[int, ...]
    ) -> None:
        """Capture; sizes: numbers of tokens, ascending. K and V have their final place by now."""
        device, most = backend.kv.device, sizes[-1]
        self._model, self._slots = model, backend.slots
        self._scales_last = backend.scales_last
        self._input_ids, self._positions = torch.zeros((2, most), dtype=torch.int64, device=device)
        self._slot_mapping = torch.full_like(self._positions, -1)
        self._window_layers = backend.window_layers
        self._window_slots = torch.full_like(self._positions, -1)  # of those layers
        self._memory: dict[tuple[int, ...], Tensor] = {}  # by the order and the shape of what is
        # there: layers of the same shapes use the same, one after the other
        for number in range(model.info.num_layers):
            for order, shape in enumerate((*model.projected_shapes(number), None)):
                own = (model.mixed_size(number),) if shape is None else shape
                key = (-1 if shape is None else order, *own)
                if key not in self._memory:
                    size = (most, *own)
                    self._memory[key] = torch.zeros(size, dtype=backend.dtype, device=device)
        capturer = GraphCapturer(device) if device.type == "cuda" else None
        # From the largest down: the smaller ones reuse its memory.
        self._graphs = {size: self._capture(size, capturer) for size in reversed(sizes)}
        self.sizes = sizes

    def forward(self, batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """The model's `forward` of at most sizes[-1] tokens; `backend` is planned."""
        num_tokens = batch.num_tokens
        size = next(size for size in self.sizes if size >= num_tokens)
        self._input_ids[:num_tokens].copy_(batch.input_ids)
        self._positions[:num_tokens].copy_(batch.positions)
        self._slot_mapping[:num_tokens].copy_(batch.slot_mapping)
        self._slot_mapping[num_tokens:size].fill_(-1)
        if batch.window is not None:
            self._window_slots[:num_tokens].copy_(batch.window.slot_mapping)
            self._window_slots[num_tokens:size].fill_(-1)
        graphs, model = self._graphs[size], self._model
        mixed = self._mixed(0, num_tokens)
        for number, replay in enumerate(graphs.replays):
            if number:
                self._mixed(number - 1, num_tokens).copy_(mixed)
            replay()
            mixed = model.mix(number, self._projected(number, num_tokens), batch, backend)
        x, residual = graphs.last.x, graphs.last.residual
        assert x is not None
        assert residual is not None
        rows = slice(num_tokens)
        return model.finish(mixed, x[rows], residual[rows], batch.logits_indices)

    def _projected(self, number: int, num_tokens: int) -> list[Tensor]:
        shapes = enumerate(self._model.projected_shapes(number))
        return [self._memory[(order, *shape)][:num_tokens] for order, shape in shapes]

    def _mixed(self, number: int, num_tokens: int) -> Tensor:
        return self._memory[-1, self._model.mixed_size(number)][:num_tokens]

    def _capture(self, size: int, capturer: GraphCapturer | None) -> _Graphs:
        replays: list[Callable[[], None]] = []
        before = _Activations()
        for number in range(self._model.info.num_layers):
            after = _Activations()
            run = partial(self._run, number, size, before, after)
            if capturer is None:
                replays.append(run)
            else:
                replays.append(capturer.capture(run))
                before.x = None  # the graphs to come may use its memory
            before = after
        return _Graphs(tuple(replays), before)

    def _run(self, number: int, size: int, before: _Activations, after: _Activations) -> None:
        """The layer before from what `mix` gave on, and this one up to its own."""
        model = self._model
        if number == 0:
            after.x, after.residual = model.embed(self._input_ids[:size])
        else:
            assert before.x is not None
            assert before.residual is not None
            mixed, after.residual = self._mixed(number - 1, size), before.residual
            after.x = model.finish_layer(number - 1, mixed, before.x, before.residual)
        kv, kv_layer = None, model.kv_layer(number)
        if kv_layer is not None:
            is_windowed = kv_layer in self._window_layers
            slot_mapping = self._window_slots if is_windowed else self._slot_mapping
            kv = LayerKV(*self._slots[kv_layer], slot_mapping[:size], self._scales_last)
        out = self._projected(number, size)
        model.project(number, after.x, self._positions[:size], kv, out)
