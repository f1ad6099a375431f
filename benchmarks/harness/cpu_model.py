"""Forward passes of the CPU's decoder without an engine."""

from __future__ import annotations

import numpy as np
import torch

from radixserve.arrays import IntArray
from radixserve.attention.cpu import CpuBackend
from radixserve.models.cpu_decoder import CpuDecoder
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest
from radixserve_kernels.stored_kv import stored_width, to_stored

CPU = torch.device("cpu")


class CpuModel:
    """A decoder, and a pool of K and V in which each row has a stretch of pages of one token.

    kv_dtype: of stored K and V, by default that of the model.
    """

    def __init__(
        self,
        model: CpuDecoder,
        num_rows: int,
        row_len: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        info, dtype = model.info, kv_dtype or model.info.dtype
        width = stored_width(info.head_dim, dtype)
        pool = (info.num_layers, 2, num_rows * row_len, 1, info.num_kv_heads, width)
        self._model, self._row_len = model, row_len
        self._kv = torch.zeros(pool, dtype=dtype)
        self._backend = CpuBackend(self._kv, info.num_heads, dtype=info.dtype)

    def fill(self) -> None:
        """Write random K and V to all slots, the same in all layers."""
        info = self._model.info
        shape = (*self._kv.shape[1:-1], info.head_dim)
        generator = torch.Generator().manual_seed(0)
        self._kv[:] = to_stored(torch.randn(shape, generator=generator), self._kv.dtype)

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
