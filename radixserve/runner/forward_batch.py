"""From a `Schedule`'s rows to the `ForwardBatch` that the model and the attention read.

Built with numpy once a step and moved to the device once. Nothing of a row is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixserve.attention.base import ForwardBatch, HostIndex, IndexArray
from radixserve.schedule import Row

__all__ = [
    "ForwardBatch",
    "build_forward_batch",
    "check_pages",
    "indptr",
    "logits_places",
    "num_logits",
]


def build_forward_batch(rows: Sequence[Row], page_size: int, device: torch.device) -> ForwardBatch:
    """Lay the rows (at least one) end to end. Raises ValueError if one's pages do not fit it."""
    if len(rows) == 1 and len(rows[0].token_ids) == 1 and rows[0].targets is None:
        return _single_token(rows[0], page_size, device)
    start, num_new, num_pages = np.array(
        [(row.start, len(row.token_ids), len(row.page_ids)) for row in rows], np.int64
    ).T
    seq_lens = start + num_new
    check_pages(rows, seq_lens, num_pages, page_size)
    qo_indptr, kv_indptr = indptr(num_new), indptr(num_pages)
    kv_indices = np.concatenate([row.page_ids for row in rows], dtype=np.int32)
    num_tokens = int(qo_indptr[-1])
    index = np.empty((3, num_tokens), np.int64)  # moved to the device at once
    input_ids, positions, slots = index
    np.concatenate([row.token_ids for row in rows], out=input_ids)
    if num_tokens == len(rows):
        positions[:] = start
        pages = kv_indices[kv_indptr[1:] - 1]
    else:
        of_row = np.repeat(np.arange(len(rows)), num_new)  # [T]
        positions[:] = np.arange(num_tokens) + (start - qo_indptr[:-1])[of_row]
        pages = kv_indices[kv_indptr[of_row] + positions // page_size]
    np.multiply(pages, page_size, out=slots)
    if page_size > 1:
        slots += positions % page_size
    last_tokens = logits_places(num_logits(rows), qo_indptr)
    on_device = torch.from_numpy(index).to(device).unbind()
    return ForwardBatch(
        input_ids=on_device[0],
        positions=on_device[1],
        slot_mapping=on_device[2],
        logits_indices=torch.from_numpy(last_tokens).to(device),
        host=HostIndex(start, qo_indptr, kv_indptr, kv_indices, seq_lens),
        page_size=page_size,
    )


def _single_token(row: Row, page_size: int, device: torch.device) -> ForwardBatch:
    """A batch of one row of one token, as a chat without company has it at nearly every step: what
    numpy does for many rows would take a tenth of such a step."""
    start, pages = row.start, np.array(row.page_ids, np.int32)
    bounds = np.array([[0, 1], [0, len(pages)], [start, start + 1]], np.int64)
    if len(pages) != -(-(start + 1) // page_size):
        check_pages([row], bounds[2, 1:], bounds[1, 1:], page_size)
    slot = int(pages[-1]) * page_size + start % page_size
    index = np.array([[row.token_ids[0]], [start], [slot], [0]], np.int64)
    input_ids, positions, slots, last = torch.from_numpy(index).to(device).unbind()
    return ForwardBatch(
        input_ids=input_ids,
        positions=positions,
        slot_mapping=slots,
        logits_indices=last if row.sample is not None else last[:0],
        host=HostIndex(bounds[2, :1], bounds[0], bounds[1], pages, bounds[2, 1:]),
        page_size=page_size,
    )


def num_logits(rows: Sequence[Row]) -> IndexArray:
    """[R] behind how many of each row's last tokens something is drawn or scored."""
    return np.array(
        [
            (row.sample is not None) + (0 if row.targets is None else len(row.targets))
            for row in rows
        ],
        np.int64,
    )


def logits_places(counts: IndexArray, qo_indptr: IndexArray) -> IndexArray:
    """[S] the tokens behind which something is drawn or scored: of each row the last `counts`."""
    sampled = np.flatnonzero(counts)
    last_tokens = qo_indptr[1:][sampled] - 1
    if len(sampled) < counts.sum():  # of a row with targets the last few
        ends = np.cumsum(counts[sampled])
        back = np.repeat(ends, counts[sampled]) - np.arange(ends[-1]) - 1
        last_tokens = np.repeat(last_tokens, counts[sampled]) - back
    return last_tokens


def check_pages(
    rows: Sequence[Row], seq_lens: IndexArray, num_pages: IndexArray, page_size: int
) -> None:
    """Raise ValueError, naming the request, unless each row has the pages of its tokens."""
    unfit = num_pages != -(-seq_lens // page_size)
    if unfit.any():
        bad = int(np.argmax(unfit))
        raise ValueError(
            f"request {rows[bad].request_id!r} has {num_pages[bad]} pages of {page_size} tokens "
            f"for {seq_lens[bad]} tokens"
        )


def indptr(lengths: IndexArray) -> IndexArray:
    """[n + 1] where each of n parts of these lengths begins, and where the last one ends."""
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds
