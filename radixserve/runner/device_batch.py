"""A step's metadata on the device: one copy in, then views of it, and kv_indices made there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.attention.base import ForwardBatch
from radixserve.runner.device_queue import DeviceQueue
from radixserve.runner.h2d_buffer import H2DBuffer
from radixserve.runner.page_table import PageTable
from radixserve.runner.step_layout import StepLayout, pad
from radixserve_kernels import gpu_ops

_EXTRA_BYTES = 1 << 16  # of the fixed buffer, for what a decode step sends besides its index
_FIRST_BYTES = 1 << 18  # of the growing one
_ROW_BYTES = 256  # most that the index of a row of one token takes, rounding apart
_NUM_ARRAYS = 16  # each is rounded up to 64 bytes


@dataclass(frozen=True, slots=True)
class DeviceBatch(ForwardBatch):
    """A ForwardBatch whose page ids lie on the device already; good until the next one."""

    _kv_indices: Tensor  # [total pages] int32

    @property
    def kv_indices(self) -> Tensor:
        return self._kv_indices


class BatchUploader:
    """Makes DeviceBatches. `num_fixed` rows of one token have a buffer that never moves: what a
    graph of a decode step was recorded on is where its input arrives."""

    def __init__(
        self, queue: DeviceQueue, table: PageTable, page_size: int, num_fixed: int
    ) -> None:
        self._table, self._page_size = table, page_size
        self._growing = H2DBuffer(queue, _FIRST_BYTES)
        fixed_bytes = num_fixed * _ROW_BYTES + _NUM_ARRAYS * 64 + _EXTRA_BYTES
        self._fixed = H2DBuffer(queue, fixed_bytes, can_grow=False)

    def send(
        self,
        layout: StepLayout,
        extra: dict[str, NDArray[Any]],
        previous: Tensor,
        *,
        is_fixed: bool = False,
    ) -> tuple[DeviceBatch, dict[str, Tensor]]:
        """Queue everything a step needs to know; returns its batch, and `extra` on the device.

        previous [n] int64, on the device: the tokens that the step before drew, by output.
        """
        update = self._table.update(layout)
        more = dict(extra)
        if len(update.flat_slots):
            more["flat_slots"], more["pages"] = update.flat_slots, _int32(update.pages)
        if layout.future_tokens.size:
            more["future_positions"], more["future_outputs"] = layout.future_tokens
        index = _index(layout)
        index["table_rows"], index["last_flat_slots"] = (
            _int32(update.table_rows),
            update.last_flat_slots,
        )
        index["last_pages"] = _int32(update.last_pages)
        device_tensors = self._upload(index, more, is_fixed)
        if len(update.flat_slots):
            self._table.write(device_tensors["flat_slots"], device_tensors["pages"])
        self._table.write(device_tensors["last_flat_slots"], device_tensors["last_pages"])
        input_ids = device_tensors["input_ids"]
        if layout.future_tokens.size:
            drawn = previous.index_select(0, device_tensors["future_outputs"])
            input_ids.index_copy_(0, device_tensors["future_positions"], drawn)
        return self._batch(layout, device_tensors), device_tensors

    def padding(self, num_rows: int) -> DeviceBatch:
        """A batch of padding alone in the fixed buffer, to record a graph of `num_rows` rows on."""
        device = self._table.pages.device
        layout = pad(StepLayout.empty(), num_rows)
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return self.send(layout, {}, nothing, is_fixed=True)[0]

    def _upload(
        self, index: dict[str, NDArray[Any]], more: dict[str, NDArray[Any]], is_fixed: bool
    ) -> dict[str, Tensor]:
        """One copy, or two where a decode step has more to say than the fixed buffer holds."""
        everything = index | more
        if not is_fixed:
            return self._growing.send(everything)
        if self._fixed.fits(everything):
            return self._fixed.send(everything)
        return self._fixed.send(index) | self._growing.send(more)

    def _batch(self, layout: StepLayout, device_tensors: dict[str, Tensor]) -> DeviceBatch:
        kv_indices = torch.empty(
            layout.num_all_pages, dtype=torch.int32, device=self._table.pages.device
        )
        gpu_ops.flat_indices(
            self._table.pages,
            device_tensors["table_rows"],
            device_tensors["num_pages"],
            device_tensors["kv_indptr"],
            kv_indices,
        )
        return DeviceBatch(
            input_ids=device_tensors["input_ids"],
            positions=device_tensors["positions"],
            slot_mapping=device_tensors["slots"],
            logits_indices=device_tensors["logits_indices"],
            host=layout.host,
            page_size=self._page_size,
            _kv_indices=kv_indices,
        )


def _index(layout: StepLayout) -> dict[str, NDArray[Any]]:
    """What a graph reads comes first: the places of these depend on the number of rows alone."""
    return {
        "input_ids": layout.input_ids,
        "positions": layout.positions,
        "slots": layout.slots,
        "logits_indices": layout.logits_indices,
        "kv_indptr": _int32(layout.host.kv_indptr),
        "num_pages": _int32(layout.num_pages),
    }


def _int32(array: NDArray[np.int64]) -> NDArray[np.int32]:
    return array.astype(np.int32)
