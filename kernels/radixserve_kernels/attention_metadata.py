"""The record of a step's rows on the host, from which attention plans are made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IndexArray = NDArray[np.int64]


class AttentionMetadata:
    """R rows of a step, whose T new tokens are laid end to end: numpy arrays, each contiguous. The
    names are FlashInfer's.

    kv_indices is put together when it is first read, which copies every page id of every row: a
    flat plan on a device does without. `copy_kv_indices` writes them elsewhere. `release` gives the
    borrowed page tables back.
    """

    __slots__ = (
        "_kv_indices",
        "first_new_page",
        "kv_indptr",
        "page_tables",
        "qo_indptr",
        "row_slots",
        "seq_lens",
        "start",
    )

    def __init__(
        self,
        start: IndexArray,
        qo_indptr: IndexArray,
        kv_indptr: IndexArray,
        seq_lens: IndexArray,
        page_tables: Sequence[NDArray[np.int32]],
        row_slots: IndexArray | None = None,
        first_new_page: IndexArray | None = None,
    ) -> None:
        self.start = start  # [R] position of each row's first new token
        self.qo_indptr = qo_indptr  # [R + 1] bounds of each row's new tokens
        self.kv_indptr = kv_indptr  # [R + 1] bounds of each row's pages in kv_indices
        self.seq_lens = seq_lens  # [R] tokens of each row after the step
        self.page_tables = page_tables  # end to end they are kv_indices
        # [R] where known: slot of each row's sequence, -1 of padding; the pages before that index
        # are as in the last step of the slot, which was of the same sequence.
        self.row_slots, self.first_new_page = row_slots, first_new_page
        self._kv_indices: NDArray[np.int32] | None = None

    def take_page_tables(self, page_tables: Sequence[NDArray[np.int32]]) -> None:
        """Refer to another step's page tables. Its other arrays were written over those of this."""
        self.page_tables, self._kv_indices = page_tables, None

    @property
    def kv_indices(self) -> NDArray[np.int32]:
        """[total pages] the page ids of all rows."""
        flat = self._kv_indices
        if flat is None:
            flat = self._kv_indices = np.concatenate(self.page_tables, dtype=np.int32)
        return flat

    def copy_kv_indices(self, into: NDArray[np.int32]) -> None:
        """Write the page ids of all rows to `into` [total pages]."""
        if self._kv_indices is not None:
            into[:] = self._kv_indices
        elif len(self.page_tables) == 1:
            into[:] = self.page_tables[0]
        else:
            np.concatenate(self.page_tables, out=into)

    @property
    def is_flattened(self) -> bool:
        """Whether kv_indices has been put together."""
        return self._kv_indices is not None

    def release(self) -> None:
        """Drop the page tables: kv_indices is not read for the first time any more."""
        self.page_tables = ()
