"""Forward passes of the CPU's decoder without an engine."""

from __future__ import annotations

import numpy as np
import torch

from radixserve.arrays import IntArray
from radixserve.attention.cpu import CpuBackend
from radixserve.models.cpu_decoder import CpuDecoder
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest

CPU = torch.device("cpu")


class CpuModel:
    """A decoder, and a pool of K and V in which each row has a stretch of pages of one token."""

    def __init__(self, model: CpuDecoder, num_rows: int, row_len: int) -> None:
        info = model.info
        pool = (info.num_layers, 2, num_rows * row_len, 1, info.num_kv_heads, info.head_dim)
        self._model, self._row_len = model, row_len
        self._backend = CpuBackend(torch.zeros(pool, dtype=info.dtype), info.num_heads)

    @torch.inference_mode()
    def forward(self, rows: range, tokens: IntArray, start: int, num_logits: int) -> torch.Tensor:
        """[len(rows) * num_logits, V] after the last tokens of each row. tokens: [n], the same for
        all rows, after `start` tokens that they computed before."""
        pages = np.arange(start + len(tokens), dtype=np.int32)
        targets = tokens[-num_logits:]
        batch = [
            ScheduledRequest("", tokens, start, pages + row * self._row_len, None, targets)
            for row in rows
        ]
        forward_batch = build_forward_batch(batch, 1, CPU)
        self._backend.plan(forward_batch)
        return self._model.forward(forward_batch, self._backend)
