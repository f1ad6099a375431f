"""One step's rows as numpy arrays, end to end: built once, for the CPU and for a device.

The arrays lie in host memory. On the CPU the tensors of the `ForwardBatch` share it, and those of
decode steps are kept from step to step (`HostBatches`); for a device device_batch.py uploads them.
Per row the host looks at its new tokens and their pages, never at all pages, unless
`AttentionMetadata.kv_indices` is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from radixserve.attention.base import AttentionMetadata, ForwardBatch, IndexArray
from radixserve.schedule import ScheduledRequest, ScheduledRows

_CPU = torch.device("cpu")
_MOST_KEPT = 512  # sizes of decode steps


class InputBatch(NamedTuple):
    """R rows with T new tokens, padding included. A padding row is one token at position 0 of a
    sequence of one token, on page 0, whose K and V are not stored."""

    rows: ScheduledRows  # [<= R] those without padding; borrowed for a step
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
        """[n] indices into input_ids, and [n] outputs of the previous step that belong there."""
        future_index = np.array(self.rows.future_indices, np.int64)
        rows = np.flatnonzero(future_index >= 0)
        return self.host.qo_indptr[rows + 1] - 1, future_index[rows]

    def logit_ranges(self) -> tuple[IndexArray, IndexArray]:
        """The first logit of each row without padding, and how many it has: two [len(rows)]."""
        counts = num_logits(self.rows)
        if self.num_tokens == self.num_rows == len(self.logits_indices):
            return np.arange(len(counts)), counts
        return np.cumsum(counts) - counts, counts

    def padded(self, num_rows: int) -> InputBatch:
        """Rows of one token each with padding up to `num_rows`, and logits after every row."""
        host, missing = self.host, num_rows - self.num_rows
        assert self.num_tokens == self.num_rows == len(self.rows) <= num_rows
        assert host.row_slots is not None
        assert host.first_new_page is not None
        zeros, ones = np.zeros(missing, np.int64), np.ones(missing, np.int64)
        if not missing and len(self.logits_indices) == num_rows:
            return self
        num_pages = np.concatenate((np.diff(host.kv_indptr), ones))
        return self._replace(
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
        batch = ForwardBatch(
            torch.from_numpy(self.input_ids),
            torch.from_numpy(self.positions),
            torch.from_numpy(self.slot_mapping),
            torch.from_numpy(self.logits_indices),
            self.host,
            self.page_size,
        )
        return batch if device.type == "cpu" else batch.to(device)


def prepare_inputs(rows: ScheduledRows, page_size: int) -> InputBatch:
    """Concatenate the rows (at least one). Raises ValueError if the pages of a row do not fit."""
    num_rows, input_ids = len(rows.num_tokens), rows.input_ids
    if _samples_every_token(rows):
        return DecodeArrays(num_rows, len(input_ids), page_size).take(rows)
    start, counts = np.array(rows.starts, np.int64), np.array(rows.num_tokens, np.int64)
    num_pages = np.fromiter(map(len, rows.page_ids), np.int64, num_rows)
    seq_lens = start + counts
    if (num_pages != -(-seq_lens // page_size)).any():
        raise _wrong_pages(rows, page_size)
    qo_indptr = indptr(counts)
    row_of = np.repeat(np.arange(num_rows), counts)  # [T]
    positions = np.arange(len(row_of)) + (start - qo_indptr[:-1])[row_of]
    first_page = start // page_size  # of each row's first new token
    new_pages = [
        page_ids[first:] for page_ids, first in zip(rows.page_ids, first_page.tolist(), strict=True)
    ]
    begin = indptr(num_pages - first_page)[:-1]
    pages = np.concatenate(new_pages, dtype=np.int64)
    return InputBatch(
        rows=rows,
        input_ids=np.array(input_ids, np.int64),
        positions=positions,
        slot_mapping=pages[(begin - first_page)[row_of] + positions // page_size] * page_size
        + positions % page_size,
        logits_indices=_logits_indices(num_logits(rows), qo_indptr),
        host=AttentionMetadata(
            start=start,
            qo_indptr=qo_indptr,
            kv_indptr=indptr(num_pages),
            seq_lens=seq_lens,
            page_tables=rows.page_ids,
            row_slots=np.array(rows.slots, np.int64),
            first_new_page=np.array(rows.first_new_pages, np.int64),
        ),
        page_size=page_size,
    )


class DecodeArrays:
    """The arrays of R rows with T tokens that `_samples_every_token`. `take` writes over them."""

    def __init__(self, num_rows: int, num_tokens: int, page_size: int) -> None:
        self._page_size = page_size
        sizes = [num_tokens] * 3 + [num_rows] * 4 + [num_rows + 1] * 2
        self._numbers = array("q", bytes(8 * sum(sizes)))
        columns = np.split(np.frombuffer(self._numbers, np.int64), list(accumulate(sizes[:-1])))
        start, seq_lens, row_slots, first_new_page, qo_indptr, kv_indptr = columns[3:]
        self._host = AttentionMetadata(
            start=start,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            seq_lens=seq_lens,
            page_tables=(),
            row_slots=row_slots,
            first_new_page=first_new_page,
        )
        input_ids, positions, slots = columns[:3]
        sampled = np.arange(num_tokens)
        self._arrays = input_ids, positions, slots, sampled, self._host, page_size

    def take(self, rows: ScheduledRows) -> InputBatch:
        """The rows as a batch, valid until the next call. Few calls, and of few functions: a
        forward pass evicts their code from the CPU's cache."""
        starts, counts, tables, size = rows.starts, rows.num_tokens, rows.page_ids, self._page_size
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        num_pages = list(map(len, tables))
        if num_pages != [(end - 1) // size + 1 for end in ends]:
            raise _wrong_pages(rows, size)
        positions, pages = starts, list[int]()  # of each token
        if rows.drafts:
            positions = []
            for start, end, table in zip(starts, ends, tables, strict=True):
                first = start // size
                own = table[first:].tolist()
                positions += range(start, end)
                pages += [own[position // size - first] for position in range(start, end)]
        else:
            pages = [int(table[-1]) for table in tables]
        slots = pages
        if size > 1:
            slots = [
                page * size + position % size
                for page, position in zip(pages, positions, strict=True)
            ]
        numbers = [*rows.input_ids, *positions, *slots, *starts, *ends, *rows.slots]
        numbers += rows.first_new_pages
        numbers += accumulate(counts, initial=0)
        numbers += accumulate(num_pages, initial=0)
        self._numbers[:] = array("q", numbers)
        self._host.take_page_tables(tables)
        return InputBatch(rows, *self._arrays)


def _samples_every_token(rows: ScheduledRows) -> bool:
    """Whether all rows decode, with or without drafts, as in nearly every step."""
    num_tokens = len(rows.starts) + sum(rows.drafts.values())
    return len(rows.input_ids) == num_tokens and not rows.targets and all(rows.samples)


class HostBatches:
    """Makes the batches of a runner on the CPU, which computes a step before the next is prepared.

    The arrays and tensors of decode steps are made once for each number of rows and tokens.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # By numbers of rows and tokens.
        self._kept: dict[tuple[int, int], tuple[DecodeArrays, ForwardBatch]] = {}

    def prepare(self, rows: ScheduledRows) -> tuple[InputBatch, ForwardBatch]:
        """`prepare_inputs`, and tensors that share its memory. Valid until the next call."""
        size = len(rows.starts), len(rows.input_ids)
        num_tokens = size[0] + sum(rows.drafts.values())  # `_samples_every_token` without a call
        if size[1] > num_tokens or rows.targets or not all(rows.samples):
            inputs = prepare_inputs(rows, self._page_size)
            return inputs, inputs.to_device(_CPU)
        if size not in self._kept:
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            arrays = DecodeArrays(*size, self._page_size)
            self._kept[size] = arrays, arrays.take(rows).to_device(_CPU)
        arrays, batch = self._kept[size]
        return arrays.take(rows), batch


def padding_batch(num_rows: int, page_size: int) -> InputBatch:
    """Padding rows alone."""
    none, zero = np.empty(0, np.int64), np.zeros(1, np.int64)
    host = AttentionMetadata(none, zero, zero, none, (), row_slots=none, first_new_page=none)
    batch = InputBatch(ScheduledRows(), none, none, none, none, host, page_size)
    return batch.padded(num_rows)


def build_forward_batch(
    rows: Iterable[ScheduledRequest], page_size: int, device: torch.device
) -> ForwardBatch:
    """`prepare_inputs`, then `InputBatch.to_device`, of rows that lie apart."""
    return prepare_inputs(ScheduledRows.of(rows), page_size).to_device(device)


def num_logits(rows: ScheduledRows) -> IndexArray:
    """[R] how many of each row's last tokens have logits: from the first one on after which a token
    is sampled or scored."""
    counts = np.array([spec is not None for spec in rows.samples], np.int64)
    for row, targets in rows.targets.items():
        counts[row] += len(targets.token_ids) + targets.num_after
    for row, num_drafts in rows.drafts.items():
        counts[row] += num_drafts
    return counts


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


def _wrong_pages(rows: ScheduledRows, page_size: int) -> ValueError:
    """The error of the first row that has other pages than its tokens need."""
    ends = [start + count for start, count in zip(rows.starts, rows.num_tokens, strict=True)]
    for name, pages, end in zip(rows.request_ids, rows.page_ids, ends, strict=True):
        if len(pages) != -(-end // page_size):
            return ValueError(
                f"request {name!r} has {len(pages)} pages of {page_size} tokens for {end} tokens"
            )
    raise AssertionError("the pages of all rows fit")
