"""A step's rows as numpy arrays, end to end, padded if asked: what is sent to a device.

Host work only. Per row it looks at the new tokens and their pages, never at all pages: those are on
the device already (page_table.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from radixserve.attention.base import HostIndex, IndexArray
from radixserve.runner.forward_batch import check_pages, indptr, logits_places, num_logits
from radixserve.schedule import ScheduledRequest


class LazyHostIndex(HostIndex):
    """A HostIndex whose kv_indices is put together when somebody asks for it.

    That costs a copy of every page id of every row: a flat plan does without. Good until `close`:
    the rows' page ids are only lent.
    """

    __slots__ = ("_flat", "tables")

    tables: Sequence[NDArray[np.int32]] | None  # [R] each row's page ids, until `close`
    _flat: NDArray[np.int32] | None

    def __init__(
        self,
        start: IndexArray,
        qo_indptr: IndexArray,
        kv_indptr: IndexArray,
        seq_lens: IndexArray,
        tables: Sequence[NDArray[np.int32]],
    ) -> None:
        put = object.__setattr__
        for name, value in (
            ("start", start),
            ("qo_indptr", qo_indptr),
            ("kv_indptr", kv_indptr),
            ("seq_lens", seq_lens),
            ("tables", tables),
            ("_flat", None),
        ):
            put(self, name, value)

    @property
    def kv_indices(self) -> NDArray[np.int32]:
        flat: NDArray[np.int32] | None = self._flat
        if flat is None:
            assert self.tables is not None, "the page ids were given back"
            flat = np.concatenate(self.tables, dtype=np.int32)
            object.__setattr__(self, "_flat", flat)
        return flat

    def close(self) -> None:
        """Give the rows' page ids back."""
        object.__setattr__(self, "tables", None)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """R rows with T new tokens, padding included. A padding row is one token at position 0 of a
    sequence of one token, on page 0, that is not stored."""

    names: tuple[str, ...]  # of the rows without padding
    input_ids: IndexArray  # [T]; 0 where the token is still on the device
    positions: IndexArray  # [T]
    slots: IndexArray  # [T], -1 of padding
    logits_indices: IndexArray  # [S]
    num_logits: IndexArray  # [R] how many logits each row asked for; padding for none
    first_logit: IndexArray  # [R] which of the S are the row's: num_logits of them from here on
    num_pages: IndexArray  # [R]
    last_pages: IndexArray  # [R] the last page of each row
    first_new_page: IndexArray  # [rows without padding] see `ScheduledRequest`
    future_tokens: IndexArray  # [2, n] places in input_ids, and their outputs of the last step
    host: LazyHostIndex

    @classmethod
    def empty(cls) -> StepLayout:
        """No rows, to be padded."""
        none, zero = np.empty(0, np.int64), np.zeros(1, np.int64)
        host = LazyHostIndex(none, zero, zero, none, [])
        future_tokens = np.empty((2, 0), np.int64)
        return cls((), none, none, none, none, none, none, none, none, none, future_tokens, host)

    @property
    def num_rows(self) -> int:
        """Without padding."""
        return len(self.names)

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_all_rows(self) -> int:
        return len(self.num_pages)

    @property
    def num_all_pages(self) -> int:
        return int(self.host.kv_indptr[-1])


def prepare_inputs(rows: Sequence[ScheduledRequest], page_size: int) -> StepLayout:
    """Rows (at least one) as they are. Raises ValueError if one's pages do not fit it."""
    columns = dict(
        zip(ScheduledRequest._fields, zip(*rows, strict=True), strict=True)
    )  # one pass, in C
    tokens, tables = columns["token_ids"], columns["page_ids"]
    start = np.array(columns["start"], np.int64)
    num_new, num_pages = _lengths(tokens), _lengths(tables)
    seq_lens = start + num_new
    check_pages(rows, seq_lens, num_pages, page_size)
    qo_indptr = indptr(num_new)
    input_ids = np.concatenate(tokens, dtype=np.int64)
    last_pages = np.array([pages.item(-1) for pages in tables], np.int64)
    if len(input_ids) == len(rows):
        positions, pages = start, last_pages
    else:
        positions, pages = _places(tables, start, num_new, page_size)
    slots = pages * page_size
    if page_size > 1:
        slots += positions % page_size
    counts = np.array([spec is not None for spec in columns["sample"]], np.int64)
    if any(targets is not None for targets in columns["logprob_targets"]):
        counts = num_logits(rows)
    future_tokens = _future_tokens(np.array(columns["future_index"], np.int64), qo_indptr)
    input_ids[future_tokens[0]] = 0
    return StepLayout(
        names=columns["request_id"],
        input_ids=input_ids,
        positions=positions,
        slots=slots,
        logits_indices=logits_places(counts, qo_indptr),
        num_logits=counts,
        first_logit=np.cumsum(counts) - counts,
        num_pages=num_pages,
        last_pages=last_pages,
        first_new_page=np.array(columns["first_new_page"], np.int64),
        future_tokens=future_tokens,
        host=LazyHostIndex(start, qo_indptr, indptr(num_pages), seq_lens, tables),
    )


def pad(layout: StepLayout, num_rows: int) -> StepLayout:
    """Rows of one token each, with padding up to `num_rows`, and logits after every row."""
    host, more = layout.host, num_rows - layout.num_rows
    assert layout.num_tokens == layout.num_all_rows == layout.num_rows <= num_rows
    assert host.tables is not None
    zeros, ones = np.zeros(more, np.int64), np.ones(more, np.int64)
    num_pages = np.concatenate((layout.num_pages, ones))
    padded = LazyHostIndex(
        start=np.concatenate((host.start, zeros)),
        qo_indptr=np.arange(num_rows + 1),
        kv_indptr=indptr(num_pages),
        seq_lens=np.concatenate((host.seq_lens, ones)),
        tables=(*host.tables, np.zeros(more, np.int32)),
    )
    return replace(
        layout,
        input_ids=np.concatenate((layout.input_ids, zeros)),
        positions=np.concatenate((layout.positions, zeros)),
        slots=np.concatenate((layout.slots, -ones)),
        logits_indices=np.arange(num_rows),
        num_logits=np.concatenate((layout.num_logits, zeros)),
        first_logit=np.arange(num_rows),
        num_pages=num_pages,
        last_pages=np.concatenate((layout.last_pages, zeros)),
        host=padded,
    )


def _future_tokens(source: IndexArray, qo_indptr: IndexArray) -> IndexArray:
    """[2, n] the last tokens of rows whose `source` says that the device alone knows them yet."""
    rows = np.flatnonzero(source >= 0)
    return np.stack((qo_indptr[rows + 1] - 1, source[rows]))


def _places(
    tables: Sequence[NDArray[np.int32]], start: IndexArray, num_new: IndexArray, page_size: int
) -> tuple[IndexArray, IndexArray]:
    """Position and page of every new token, each [T]."""
    of_row = np.repeat(np.arange(len(tables)), num_new)
    positions = np.arange(len(of_row)) + (start - indptr(num_new)[:-1])[of_row]
    first = start // page_size  # page of each row's first new token
    written = [pages[page:] for pages, page in zip(tables, first.tolist(), strict=True)]
    begin = indptr(_lengths(written))[:-1]
    flat = np.concatenate(written, dtype=np.int64)
    return positions, flat[(begin - first)[of_row] + positions // page_size]


def _lengths(arrays: Sequence[NDArray[np.int32]]) -> IndexArray:
    return np.fromiter(map(len, arrays), np.int64, len(arrays))
