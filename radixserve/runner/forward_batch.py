"""From a `Schedule`'s rows to the `ForwardBatch` that the model and the attention read.

Built with numpy once a step and moved to the device once. Nothing of a row is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from radixserve.attention.base import ForwardBatch, HostIndex, IndexArray
from radixserve.schedule import Row

__all__ = ["ForwardBatch", "build_forward_batch"]


def build_forward_batch(rows: Sequence[Row], page_size: int, device: torch.device) -> ForwardBatch:
    """Lay the rows (at least one) end to end. Raises ValueError if one's pages do not fit it."""
    start = np.array([row.start for row in rows], np.int64)
    num_new = np.array([len(row.token_ids) for row in rows], np.int64)
    num_pages = np.array([len(row.page_ids) for row in rows], np.int64)
    seq_lens = start + num_new
    unfit = num_pages != -(-seq_lens // page_size)
    if bool(unfit.any()):
        bad = int(np.argmax(unfit))
        raise ValueError(
            f"request {rows[bad].request_id!r} has {num_pages[bad]} pages of {page_size} tokens "
            f"for {seq_lens[bad]} tokens"
        )
    qo_indptr, kv_indptr = _indptr(num_new), _indptr(num_pages)
    kv_indices = np.concatenate([row.page_ids for row in rows]).astype(np.int32, copy=False)
    host = HostIndex(start, qo_indptr, kv_indptr, kv_indices, seq_lens)
    of_row = np.repeat(np.arange(len(rows)), num_new)  # [T]
    positions = np.arange(len(of_row)) - qo_indptr[of_row] + start[of_row]
    pages = kv_indices[kv_indptr[of_row] + positions // page_size].astype(np.int64)
    sampled = np.array([row.sample is not None for row in rows], bool)

    def move(array: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device)

    return ForwardBatch(
        input_ids=move(np.concatenate([row.token_ids for row in rows]), np.int64),
        positions=move(positions, np.int64),
        slot_mapping=move(pages * page_size + positions % page_size, np.int64),
        qo_indptr=move(qo_indptr, np.int32),
        kv_indptr=move(kv_indptr, np.int32),
        kv_indices=move(kv_indices, np.int32),
        last_page_len=move((seq_lens - 1) % page_size + 1, np.int32),
        seq_lens=move(seq_lens, np.int32),
        logits_indices=move(qo_indptr[1:][sampled] - 1, np.int64),
        host=host,
        page_size=page_size,
    )


def _indptr(lengths: IndexArray) -> IndexArray:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
