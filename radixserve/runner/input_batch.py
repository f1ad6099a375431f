"""One step's rows as numpy arrays, end to end: built once, for the CPU and for a device.

The arrays lie in host memory. On the CPU the tensors of the `ForwardBatch` share it; for a device
device_batch.py uploads them. Per row the host looks at its new tokens and their pages, never at all
pages, unless `AttentionMetadata.kv_indices` is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, repeat
from typing import Any

import numpy as np
import torch

from radixserve.attention.base import AttentionMetadata, ForwardBatch, IndexArray
from radixserve.schedule import PLACEHOLDER, ScheduledRequest


@dataclass(frozen=True, slots=True)
class InputBatch:
    """R rows with T new tokens, padding included. A padding row is one token at position 0 of a
    sequence of one token, on page 0, whose K and V are not stored."""

    requests: Sequence[ScheduledRequest]  # [<= R] of the rows without padding; borrowed for a step
    columns: Any  # their fields: a ScheduledRequest of tuples [<= R]
    input_ids: IndexArray  # [T]; PLACEHOLDER where only the device has the token
    positions: IndexArray  # [T]
    slot_mapping: IndexArray  # [T] page id * page size + offset; -1 of padding
    logits_indices: IndexArray  # [S] tokens after which logits are computed, ascending
    host: AttentionMetadata  # of all R rows
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

    def future_tokens(self) -> tuple[IndexArray, IndexArray]:
        """[n] places in input_ids, and [n] outputs of the previous step that belong there."""
        future_index = np.fromiter(self.columns.future_index, np.int64, len(self.requests))
        rows = np.flatnonzero(future_index >= 0)
        return self.host.qo_indptr[rows + 1] - 1, future_index[rows]

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
        assert host.row_slots is not None
        assert host.first_new_page is not None
        zeros, ones = np.zeros(missing, np.int64), np.ones(missing, np.int64)
        if not missing and len(self.logits_indices) == num_rows:
            return self
        num_pages = np.concatenate((np.diff(host.kv_indptr), ones))
        return replace(
            self,
            input_ids=np.concatenate((self.input_ids, zeros)),
            positions=np.concatenate((self.positions, zeros)),
            slot_mapping=np.concatenate((self.slot_mapping, -ones)),
            logits_indices=np.arange(num_rows),
            host=AttentionMetadata(
                start=np.concatenate((host.start, zeros)),
                qo_indptr=np.arange(num_rows + 1),
                kv_indptr=indptr(num_pages),
                seq_lens=np.concatenate((host.seq_lens, ones)),
                page_tables=(*host.page_tables, np.zeros(missing, np.int32)),
                row_slots=np.concatenate((host.row_slots, -ones)),
                first_new_page=np.concatenate((host.first_new_page, ones)),
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
    columns = _columns(requests)
    num_rows = len(requests)
    are_placeholders = min(columns.future_index) >= 0  # of one token each
    num_new = [1] * num_rows if are_placeholders else list(map(len, columns.token_ids))
    if max(num_new) == 1 and not any(targets is not None for targets in columns.logprob_targets):
        return _single_tokens(requests, columns, page_size, are_placeholders=are_placeholders)
    start, counts = np.array(columns.start, np.int64), np.array(num_new, np.int64)
    num_pages = np.fromiter(map(len, columns.page_ids), np.int64, num_rows)
    seq_lens = start + counts
    if (num_pages != -(-seq_lens // page_size)).any():
        raise next(filter(None, (_wrong_pages(row, page_size) for row in requests)))
    qo_indptr = indptr(counts)
    of_row = np.repeat(np.arange(num_rows), counts)  # [T]
    positions = np.arange(len(of_row)) + (start - qo_indptr[:-1])[of_row]
    first_page = start // page_size  # of each row's first new token
    written = [pages[at:] for pages, at in zip(columns.page_ids, first_page.tolist(), strict=True)]
    begin = indptr(num_pages - first_page)[:-1]
    pages = np.concatenate(written, dtype=np.int64)
    return InputBatch(
        requests=requests,
        columns=columns,
        input_ids=np.concatenate(columns.token_ids, dtype=np.int64),
        positions=positions,
        slot_mapping=pages[(begin - first_page)[of_row] + positions // page_size] * page_size
        + positions % page_size,
        logits_indices=_logits_indices(num_logits(requests), qo_indptr),
        host=AttentionMetadata(
            start=start,
            qo_indptr=qo_indptr,
            kv_indptr=indptr(num_pages),
            seq_lens=seq_lens,
            page_tables=columns.page_ids,
            row_slots=np.array(columns.req_pool_idx, np.int64),
            first_new_page=np.array(columns.first_new_page, np.int64),
        ),
        page_size=page_size,
    )


def _columns(requests: Sequence[ScheduledRequest]) -> Any:
    """The fields of all rows: a ScheduledRequest of tuples, made without Python for each row."""
    make: Any = ScheduledRequest
    return make(*zip(*requests, strict=True)) if requests else make(*[()] * len(make._fields))


def _single_tokens(
    requests: Sequence[ScheduledRequest], columns: Any, page_size: int, *, are_placeholders: bool
) -> InputBatch:
    """Rows of one token, as nearly every step has them, with few calls of numpy: after a forward
    pass the code of each has to come from memory again."""
    num_rows, samples, tables = len(requests), columns.sample, columns.page_ids
    num_pages = list(map(len, tables))
    if num_pages != [start // page_size + 1 for start in columns.start]:
        raise next(filter(None, (_wrong_pages(row, page_size) for row in requests)))
    token_ids: Iterable[int] = repeat(PLACEHOLDER, num_rows)
    if not are_placeholders:
        token_ids = [ids[0] for ids in columns.token_ids]
    lasts = [pages[-1] for pages in tables]
    bounds = accumulate(num_pages, initial=0)
    slots_of = columns.req_pool_idx, columns.first_new_page
    values = chain(token_ids, columns.start, lasts, *slots_of, bounds)
    flat = np.fromiter(values, np.int64, 6 * num_rows + 1)
    index = flat[: 5 * num_rows].reshape(5, num_rows)
    start, slots = index[1], index[2]
    slots *= page_size
    if page_size > 1:
        slots += start % page_size
    sampled = np.arange(num_rows)
    if not all(samples):
        sampled = np.array([at for at in range(num_rows) if samples[at] is not None], np.int64)
    return InputBatch(
        requests=requests,
        columns=columns,
        input_ids=index[0],
        positions=start,
        slot_mapping=slots,
        logits_indices=sampled,
        host=AttentionMetadata(
            start=start,
            qo_indptr=np.arange(num_rows + 1),
            kv_indptr=flat[5 * num_rows :],
            seq_lens=start + 1,
            page_tables=tables,
            row_slots=index[3],
            first_new_page=index[4],
        ),
        page_size=page_size,
    )


def padding_batch(num_rows: int, page_size: int) -> InputBatch:
    """Padding rows alone."""
    none, zero = np.empty(0, np.int64), np.zeros(1, np.int64)
    host = AttentionMetadata(none, zero, zero, none, (), row_slots=none, first_new_page=none)
    batch = InputBatch((), _columns(()), none, none, none, none, host, page_size)
    return batch.padded(num_rows)


def build_forward_batch(
    requests: Sequence[ScheduledRequest], page_size: int, device: torch.device
) -> ForwardBatch:
    """`prepare_inputs`, then `InputBatch.to_device`."""
    return prepare_inputs(requests, page_size).to_device(device)


def num_logits(requests: Sequence[ScheduledRequest]) -> IndexArray:
    """[R] after how many of each row's last tokens a token is sampled or scored."""
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


def _wrong_pages(row: ScheduledRequest, page_size: int) -> ValueError | None:
    """An error unless the row has the pages of its tokens."""
    if len(row.page_ids) == -(-row.end // page_size):
        return None
    return ValueError(
        f"request {row.request_id!r} has {len(row.page_ids)} pages of {page_size} tokens "
        f"for {row.end} tokens"
    )
