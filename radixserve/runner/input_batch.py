"""One step's rows as numpy arrays, end to end: built once, for the CPU and for a device.

The arrays lie in host memory. On the CPU the tensors of the `ForwardBatch` share it; for a device
device_batch.py uploads them. Per row the host looks at its new tokens and their pages, never at all
pages, unless `HostIndex.kv_indices` is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import torch

from radixserve.attention.base import ForwardBatch, HostIndex, IndexArray
from radixserve.schedule import ScheduledRequest


@dataclass(frozen=True, slots=True)
class InputBatch:
    """R rows with T new tokens, padding included. A padding row is one token at position 0 of a
    sequence of one token, on page 0, whose K and V are not stored."""

    requests: Sequence[ScheduledRequest]  # [<= R] of the rows without padding; borrowed for a step
    input_ids: IndexArray  # [T]; UNKNOWN where only the device has the token
    positions: IndexArray  # [T]
    slot_mapping: IndexArray  # [T] page id * page size + offset; -1 of padding
    logits_indices: IndexArray  # [S] tokens after which logits are computed, ascending
    host: HostIndex  # of all R rows
    page_size: int

    @property
    def num_rows(self) -> int:
        """R, padding included."""
        return len(self.host.start)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_pages(self) -> int:
        """Page-table entries of all rows; shared pages count once per row."""
        return int(self.host.kv_indptr[-1])

    def column(self, field: str) -> IndexArray:
        """[len(requests)] an integer field of `ScheduledRequest`."""
        requests = self.requests
        return np.fromiter(map(attrgetter(field), requests), np.int64, len(requests))

    def future_tokens(self) -> IndexArray:
        """[2, n] places in input_ids, and the outputs of the previous step that belong there."""
        future_index = self.column("future_index")
        rows = np.flatnonzero(future_index >= 0)
        return np.stack((self.host.qo_indptr[rows + 1] - 1, future_index[rows]))

    def logit_ranges(self) -> tuple[IndexArray, IndexArray]:
        """The first of each request's logits, and how many it has: two [len(requests)]."""
        counts = num_logits(self.requests)
        if self.num_tokens == self.num_rows == len(self.logits_indices):
            return np.arange(len(counts)), counts
        return np.cumsum(counts) - counts, counts

    def padded(self, num_rows: int) -> InputBatch:
        """Rows of one token each with padding up to `num_rows`, and logits after every row."""
        host, missing = self.host, num_rows - self.num_rows
        assert self.num_tokens == self.num_rows == len(self.requests) <= num_rows
        zeros, ones = np.zeros(missing, np.int64), np.ones(missing, np.int64)
        num_pages = np.concatenate((np.diff(host.kv_indptr), ones))
        return replace(
            self,
            input_ids=np.concatenate((self.input_ids, zeros)),
            positions=np.concatenate((self.positions, zeros)),
            slot_mapping=np.concatenate((self.slot_mapping, -ones)),
            logits_indices=np.arange(num_rows),
            host=HostIndex(
                start=np.concatenate((host.start, zeros)),
                qo_indptr=np.arange(num_rows + 1),
                kv_indptr=indptr(num_pages),
                seq_lens=np.concatenate((host.seq_lens, ones)),
                page_tables=(*host.page_tables, np.zeros(missing, np.int32)),
            ),
        )

    def to_device(self, device: torch.device) -> ForwardBatch:
        """One copy an array; on the CPU the tensors share the arrays' memory."""
        arrays = self.input_ids, self.positions, self.slot_mapping, self.logits_indices
        tensors = [torch.from_numpy(array) for array in arrays]
        if device.type != "cpu":
            tensors = [tensor.to(device) for tensor in tensors]
        input_ids, positions, slot_mapping, logits_indices = tensors
        return ForwardBatch(
            input_ids, positions, slot_mapping, logits_indices, self.host, self.page_size
        )


def prepare_inputs(requests: Sequence[ScheduledRequest], page_size: int) -> InputBatch:
    """Concatenate the rows (at least one). Raises ValueError if one's pages do not fit it."""
    if all(len(row.token_ids) == 1 and row.logprob_targets is None for row in requests):
        return _single_tokens(requests, page_size)
    start, num_new, num_pages = np.array(
        [(row.start, len(row.token_ids), len(row.page_ids)) for row in requests], np.int64
    ).T.copy()
    seq_lens = start + num_new
    unfit = num_pages != -(-seq_lens // page_size)
    if unfit.any():
        _check_pages(requests[int(np.argmax(unfit))], page_size)
    qo_indptr = indptr(num_new)
    input_ids = np.concatenate([row.token_ids for row in requests], dtype=np.int64)
    of_row = np.repeat(np.arange(len(requests)), num_new)  # [T]
    positions = np.arange(len(of_row)) + (start - qo_indptr[:-1])[of_row]
    first_page = start // page_size  # of each row's first new token
    written = [row.page_ids[at:] for row, at in zip(requests, first_page.tolist(), strict=True)]
    begin = indptr(num_pages - first_page)[:-1]
    pages = np.concatenate(written, dtype=np.int64)
    return InputBatch(
        requests=requests,
        input_ids=input_ids,
        positions=positions,
        slot_mapping=pages[(begin - first_page)[of_row] + positions // page_size] * page_size
        + positions % page_size,
        logits_indices=_logits_indices(num_logits(requests), qo_indptr),
        host=HostIndex(
            start=start,
            qo_indptr=qo_indptr,
            kv_indptr=indptr(num_pages),
            seq_lens=seq_lens,
            page_tables=[row.page_ids for row in requests],
        ),
        page_size=page_size,
    )


def _single_tokens(requests: Sequence[ScheduledRequest], page_size: int) -> InputBatch:
    """Rows of one token, as nearly every step has them, with few calls of numpy: after a forward
    pass the code of each has to come from memory again, and costs more than a loop over the rows.
    """
    token_ids, positions, slots, kv_indptr, seq_lens, sampled = [], [], [], [0], [0], []
    num_pages, page_tables = 0, []
    for at, row in enumerate(requests):
        pages, start = row.page_ids, row.start
        if len(pages) != start // page_size + 1:
            _check_pages(row, page_size)
        token_ids.append(row.token_ids.item())
        positions.append(start)
        slots.append(pages.item(-1) * page_size + start % page_size)
        seq_lens.append(start + 1)
        num_pages += len(pages)
        kv_indptr.append(num_pages)
        page_tables.append(pages)
        if row.sample is not None:
            sampled.append(at)
    index = np.array([token_ids, positions, slots], np.int64)
    bounds = np.array([range(len(requests) + 1), kv_indptr, seq_lens], np.int64)
    return InputBatch(
        requests=requests,
        input_ids=index[0],
        positions=index[1],
        slot_mapping=index[2],
        logits_indices=np.array(sampled, np.int64),
        host=HostIndex(
            start=index[1],
            qo_indptr=bounds[0],
            kv_indptr=bounds[1],
            seq_lens=bounds[2, 1:],
            page_tables=page_tables,
        ),
        page_size=page_size,
    )


def padding_batch(num_rows: int, page_size: int) -> InputBatch:
    """Padding rows alone."""
    none, zero = np.empty(0, np.int64), np.zeros(1, np.int64)
    host = HostIndex(none, zero, zero, none, page_tables=())
    return InputBatch((), none, none, none, none, host, page_size).padded(num_rows)


def build_forward_batch(
    requests: Sequence[ScheduledRequest], page_size: int, device: torch.device
) -> ForwardBatch:
    """`prepare_inputs`, then `InputBatch.to_device`."""
    return prepare_inputs(requests, page_size).to_device(device)


def num_logits(requests: Sequence[ScheduledRequest]) -> IndexArray:
    """[R] after how many of each row's last tokens a token is drawn or scored."""
    return np.array(
        [
            (row.sample is not None)
            + (0 if row.logprob_targets is None else len(row.logprob_targets))
            for row in requests
        ],
        np.int64,
    )


def indptr(lengths: IndexArray) -> IndexArray:
    """[n + 1] where each of n parts of these lengths begins, and where the last one ends."""
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=bounds[1:])
    return bounds


def _logits_indices(counts: IndexArray, qo_indptr: IndexArray) -> IndexArray:
    """[S] of each row the last `counts` tokens."""
    sampled = np.flatnonzero(counts)
    last_tokens = qo_indptr[1:][sampled] - 1
    if len(sampled) < counts.sum():  # rows with targets to score have several
        ends = np.cumsum(counts[sampled])
        back = np.repeat(ends, counts[sampled]) - np.arange(ends[-1]) - 1
        last_tokens = np.repeat(last_tokens, counts[sampled]) - back
    return last_tokens


def _check_pages(row: ScheduledRequest, page_size: int) -> None:
    """Raise ValueError unless the row has the pages of its tokens."""
    if len(row.page_ids) != -(-row.end // page_size):
        raise ValueError(
            f"request {row.request_id!r} has {len(row.page_ids)} pages of {page_size} tokens "
            f"for {row.end} tokens"
        )
