"""Decode rows over one shared prefix: the attention of all layers, without an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from harness.shapes import Shape

from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest


class SharedPrefix:
    """Rows of one token after `shared` tokens in common and `own` ones each, over a pool of random
    K and V; pages lie in random order unless `is_contiguous`."""

    def __init__(
        self,
        shape: Shape,
        num_rows: int,
        shared: int,
        own: int,
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        is_contiguous: bool = False,
    ) -> None:
        prefix_pages, row_pages = -(-shared // page_size), -(-(own + 1) // page_size)
        num_pages = prefix_pages + num_rows * row_pages
        pool = (shape.num_layers, 2, num_pages, page_size, shape.num_kv_heads, shape.head_dim)
        heads = (num_rows, shape.num_heads, shape.head_dim)
        self.kv = torch.randn(pool, device=device, dtype=dtype)
        self.q = torch.randn(heads, device=device, dtype=dtype)
        pages = np.arange(num_pages, dtype=np.int32)
        if not is_contiguous:
            np.random.default_rng(0).shuffle(pages)
        token, start = np.zeros(1, np.int32), prefix_pages * page_size + own
        rows = [
            ScheduledRequest("", token, start, np.concatenate([pages[:prefix_pages], mine]), None)
            for mine in pages[prefix_pages:].reshape(num_rows, row_pages)
        ]
        self.num_rows, self.num_layers = num_rows, shape.num_layers
        self.num_row_pages = num_rows * (prefix_pages + row_pages)  # of all rows, shared ones too
        self.batch = build_forward_batch(rows, page_size, device)

    def attend(self, backend: Any) -> torch.Tensor:
        """Attention of all layers; the last one's result."""
        for layer in range(self.num_layers):
            out: torch.Tensor = backend.attend(self.q, layer)
        return out
