"""From a `SchedulerOutput`'s rows to the `ForwardBatch` that the model and the attention read.

Built once a step. Nothing of a row is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixserve.attention.base import ForwardBatch, HostIndex, IndexArray
from radixserve.schedule import ScheduledRequest

__all__ = [
    "ForwardBatch",
    "build_forward_batch",
    "check_pages",
    "indptr",
    "logits_places",
    "num_logits",
]


def build_forward_batch(
    rows: Sequence[ScheduledRequest], page_size: int, device: torch.device
) -> ForwardBatch:
    """Lay the rows (at least one) end to end. Raises ValueError if one's pages do not fit it."""
    if all(len(row.token_ids) == 1 and row.logprob_targets is None for row in rows):
        return _single_tokens(rows, page_size, device)
    start, num_new, num_pages = np.array(
        [(row.start, len(row.token_ids), len(row.page_ids)) for row in rows], np.int64
    ).T
    seq_lens = start + num_new
    check_pages(rows, seq_lens, num_pages, page_size)
    qo_indptr, kv_indptr = indptr(num_new), indptr(num_pages)
    kv_indices = np.concatenate([row.page_ids for row in rows], dtype=np.int32)
    num_tokens = int(qo_indptr[-1])
    index = np.empty((3, num_tokens), np.int64)
    input_ids, positions, slots = index
    np.concatenate([row.token_ids for row in rows], out=input_ids)
    of_row = np.repeat(np.arange(len(rows)), num_new)  # [T]
    positions[:] = np.arange(num_tokens) + (start - qo_indptr[:-1])[of_row]
    pages = kv_indices[kv_indptr[of_row] + positions // page_size]
    np.multiply(pages, page_size, out=slots)
    if page_size > 1:
        slots += positions % page_size
    last_tokens = logits_places(num_logits(rows), qo_indptr)
    on_device = _tensors([*index, last_tokens], device)
    return ForwardBatch(
        input_ids=on_device[0],
        positions=on_device[1],
        slot_mapping=on_device[2],
        logits_indices=on_device[3],
        host=HostIndex(start, qo_indptr, kv_indptr, kv_indices, seq_lens),
        page_size=page_size,
    )


def _single_tokens(
    rows: Sequence[ScheduledRequest], page_size: int, device: torch.device
) -> ForwardBatch:
    """A batch of rows of one token, as nearly every step has it, with few calls of numpy and torch:
    behind a forward pass their code has to come from memory again, each for itself, and costs more
    than a loop over the rows."""
    token_ids, positions, slots, kv_indptr, seq_lens, sampled = [], [], [], [0], [0], []
    num_pages = 0
    for at, row in enumerate(rows):
        pages, start = row.page_ids, row.start
        if len(pages) != start // page_size + 1:
            check_pages([row], np.array([start + 1]), np.array([len(pages)]), page_size)
        token_ids.append(row.token_ids.item())
        positions.append(start)
        slots.append(pages.item(-1) * page_size + start % page_size)
        seq_lens.append(start + 1)
        num_pages += len(pages)
        kv_indptr.append(num_pages)
        if row.sample is not None:
            sampled.append(at)
    index = np.array([token_ids, positions, slots], np.int64)
    bounds = np.array([range(len(rows) + 1), kv_indptr, seq_lens], np.int64)
    on_device = _tensors([*index, np.array(sampled, np.int64)], device)
    return ForwardBatch(
        input_ids=on_device[0],
        positions=on_device[1],
        slot_mapping=on_device[2],
        logits_indices=on_device[3],
        host=HostIndex(
            start=index[1],
            qo_indptr=bounds[0],
            kv_indptr=bounds[1],
            kv_indices=np.concatenate([row.page_ids for row in rows], dtype=np.int32),
            seq_lens=bounds[2, 1:],
        ),
        page_size=page_size,
    )


def _tensors(arrays: Sequence[IndexArray], device: torch.device) -> list[torch.Tensor]:
    """On the CPU they share the arrays' memory."""
    tensors = [torch.from_numpy(array) for array in arrays]
    return tensors if device.type == "cpu" else [tensor.to(device) for tensor in tensors]


def num_logits(rows: Sequence[ScheduledRequest]) -> IndexArray:
    """[R] behind how many of each row's last tokens something is drawn or scored."""
    return np.array(
        [
            (row.sample is not None)
            + (0 if row.logprob_targets is None else len(row.logprob_targets))
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
    rows: Sequence[ScheduledRequest], seq_lens: IndexArray, num_pages: IndexArray, page_size: int
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
