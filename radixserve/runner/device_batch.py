"""A step's metadata on the device: uploaded in one copy; kv_indices is gathered there.

`PageTable` keeps the pages of every running request on the device, so that a step sends only those
that are new.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.attention.base import ForwardBatch, IndexArray, StateRows
from radixserve.models.device_lora import LoraArrays, lora_arrays, step_lora
from radixserve.runner.input_batch import InputBatch, indptr, padding_batch
from radixserve.runner.recurrent_states import RecurrentStates
from radixserve.runner.transfers import DeviceQueue, H2DBuffer
from radixserve.runner.window_table import DeviceWindows
from radixserve_kernels import gpu_ops

_EXTRA_BYTES = 1 << 16  # of the fixed buffer, for what a decode step sends besides its index
_FIRST_BYTES = 1 << 18  # of the growing one
_ROW_BYTES = 256  # most that the index of a row of one token takes, rounding apart
_NUM_ARRAYS = 16  # each is rounded up to 64 bytes


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """A step's changes to the page table; a flat slot is row * max_pages + column."""

    table_rows: IndexArray  # [R] of each row of the batch, padding included
    last_slots: IndexArray  # [R] flat slot of each row's last page
    last_pages: IndexArray  # [R] that page
    slots: IndexArray  # [n] other flat slots that change; distinct
    pages: IndexArray  # [n]


class PageTable:
    """pages [num_rows + 1, max_pages] int32 on the device: row `slot` has the pages of the
    request in that slot; the last row is that of padding, page 0."""

    def __init__(self, num_rows: int, max_pages: int, device: torch.device) -> None:
        self.num_rows, self.max_pages = num_rows, max_pages
        self.pages = torch.zeros((num_rows + 1, max_pages), dtype=torch.int32, device=device)

    def update(self, batch: InputBatch) -> TableUpdate:
        """The entries to write before the step, as `ScheduledRows.first_new_pages` has it.

        O(rows + pages that changed). Raises ValueError if a row has more pages than fit.
        """
        host, num_pages = batch.host, np.diff(batch.host.kv_indptr)
        assert host.row_slots is not None
        assert host.first_new_page is not None
        if (most := int(num_pages.max())) > self.max_pages:
            name = batch.rows.request_ids[int(num_pages.argmax())]
            raise ValueError(f"request {name!r} has {most} pages, at most {self.max_pages} fit")
        table_rows = np.where(host.row_slots < 0, self.num_rows, host.row_slots)
        begin = table_rows * self.max_pages
        last_tokens, first = host.qo_indptr[1:] - 1, host.first_new_page
        several = np.flatnonzero(first < num_pages - 1)
        slots = pages = np.empty(0, np.int64)
        if len(several):
            new = [host.page_tables[row][first[row] : -1] for row in several.tolist()]
            pages = np.concatenate(new, dtype=np.int64)
            bounds = indptr(np.array([len(page_ids) for page_ids in new], np.int64))
            shift = begin[several] + first[several] - bounds[:-1]
            slots = np.arange(len(pages)) + np.repeat(shift, np.diff(bounds))
        return TableUpdate(
            table_rows=table_rows,
            last_slots=begin + num_pages - 1,
            last_pages=np.maximum(batch.slot_mapping[last_tokens] // batch.page_size, 0),
            slots=slots,
            pages=pages,
        )

    def write(self, slots: Tensor, pages: Tensor) -> None:
        """slots [n] int64, pages [n] int32, on the device; queued there."""
        self.pages.view(-1).index_copy_(0, slots, pages)


class BatchUploader:
    """Uploads InputBatches. `num_fixed` rows of one token have a buffer that never moves: the graph
    of a decode step was captured on it."""

    def __init__(
        self, queue: DeviceQueue, table: PageTable, page_size: int, num_fixed: int
    ) -> None:
        self._table, self._page_size = table, page_size
        self.windows: DeviceWindows | None = None  # of a pool with window pages
        self.states: RecurrentStates | None = None  # whose ids the layers of a step read
        self._growing = H2DBuffer(queue, _FIRST_BYTES)
        fixed_bytes = num_fixed * _ROW_BYTES + _NUM_ARRAYS * 64 + _EXTRA_BYTES
        self._fixed = H2DBuffer(queue, fixed_bytes, can_grow=False)

    def upload(
        self,
        batch: InputBatch,
        extra: dict[str, NDArray[Any]],
        previous: Tensor,
        future: tuple[IndexArray, IndexArray],
        *,
        lora: LoraArrays | None = None,
        is_fixed: bool = False,
    ) -> tuple[ForwardBatch, dict[str, Tensor]]:
        """Queue everything that a step needs; returns its batch and `extra` on the device, both
        valid until the next upload.

        previous [n] int64, on the device: the tokens that the previous step drew, by output.
        future: the batch's `future_tokens`. lora: of the rows that adapters compute.
        """
        update = self._table.update(batch)
        more: dict[str, NDArray[Any]] = {}
        if len(update.slots):
            more["table_slots"], more["pages"] = update.slots, _int32(update.pages)
        num_in_order = _num_in_order(*future)
        if len(future[0]) > num_in_order:
            more["future_places"], more["future_outputs"] = future
        index: dict[
            str, NDArray[Any]
        ] = {  # first of all: their places depend on the number of rows alone
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "slot_mapping": batch.slot_mapping,
            "logits_indices": batch.logits_indices,
            "kv_indptr": _int32(batch.host.kv_indptr),
            "table_rows": _int32(update.table_rows),
            "last_slots": update.last_slots,
            "last_pages": _int32(update.last_pages),
        }
        if self.windows is not None:
            index["window_slots"] = self.windows.slots(batch.slot_mapping)
            more |= self.windows.changes()
        if self.states is not None:
            ids = self.states.row_ids(batch)
            index |= {f"state_{name}": array for name, array in ids.items()}
        if lora is not None:
            index |= lora.arrays
        assert extra.keys().isdisjoint(index | more), "two arrays of one name"
        tensors = self._send(index, extra | more, is_fixed)
        if self.windows is not None:
            self.windows.apply(tensors)
        if len(update.slots):
            self._table.write(tensors["table_slots"], tensors["pages"])
        self._table.write(tensors["last_slots"], tensors["last_pages"])
        if num_in_order:
            tensors["input_ids"][:num_in_order].copy_(previous[:num_in_order])
        elif len(future[0]):
            sampled = previous.index_select(0, tensors["future_outputs"])
            tensors["input_ids"].index_copy_(0, tensors["future_places"], sampled)
        forward_batch = self._forward_batch(batch, tensors)
        if lora is not None:
            forward_batch = replace(forward_batch, lora=step_lora(tensors, lora.max_rank))
        return forward_batch, tensors

    def upload_padding(self, num_rows: int, *, has_adapters: bool = False) -> ForwardBatch:
        """A batch of padding alone in the fixed buffer, to capture a graph of `num_rows` rows."""
        lora = lora_arrays([], num_rows) if has_adapters else None
        nothing = torch.empty(0, dtype=torch.int64, device=self._table.pages.device)
        padding = padding_batch(num_rows, self._page_size)
        future = padding.future_tokens()
        return self.upload(padding, {}, nothing, future, lora=lora, is_fixed=True)[0]

    def _send(
        self, index: dict[str, NDArray[Any]], more: dict[str, NDArray[Any]], is_fixed: bool
    ) -> dict[str, Tensor]:
        """One copy, or two where a decode step has more to send than the fixed buffer holds."""
        everything = index | more
        if not is_fixed:
            return self._growing.send(everything)
        if self._fixed.fits(everything):
            return self._fixed.send(everything)
        return self._fixed.send(index) | self._growing.send(more)

    def _forward_batch(self, batch: InputBatch, tensors: dict[str, Tensor]) -> ForwardBatch:
        table = self._table.pages
        kv_indices = torch.empty(batch.num_pages, dtype=torch.int32, device=table.device)
        gpu_ops.flat_indices(table, tensors["table_rows"], tensors["kv_indptr"], kv_indices)
        window = None
        if self.windows is not None:
            window = self.windows.of_batch(batch, tensors["window_slots"])
        recurrent = None
        if self.states is not None:
            names = StateRows._fields
            recurrent = self.states.of_rows(
                StateRows(*(tensors[f"state_{name}"] for name in names))
            )
        return ForwardBatch(
            input_ids=tensors["input_ids"],
            positions=tensors["positions"],
            slot_mapping=tensors["slot_mapping"],
            logits_indices=tensors["logits_indices"],
            host=batch.host,
            page_size=self._page_size,
            device_kv_indices=kv_indices,
            window=window,
            recurrent=recurrent,
        )


def _num_in_order(places: IndexArray, outputs: IndexArray) -> int:
    """The number of future tokens if they are the first outputs, in order, at the first positions,
    as between two decode steps; else 0."""
    count = len(places)
    in_order = count and places[-1] == count - 1 and np.array_equal(outputs, places)
    return count if in_order else 0


def _int32(array: NDArray[np.int64]) -> NDArray[np.int32]:
    return array.astype(np.int32)
