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
from radixserve.runner.page_table import PageTable
from radixserve.runner.staging import Staging
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


class BatchSender:
    """Makes DeviceBatches. `num_fixed` rows of one token have a buffer that never moves: what a
    graph of a decode step was recorded on is where its input arrives."""

    def __init__(
        self, queue: DeviceQueue, table: PageTable, page_size: int, num_fixed: int
    ) -> None:
        self._table, self._page_size = table, page_size
        self._growing = Staging(queue, _FIRST_BYTES)
        fixed_bytes = num_fixed * _ROW_BYTES + _NUM_ARRAYS * 64 + _EXTRA_BYTES
        self._fixed = Staging(queue, fixed_bytes, can_grow=False)

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
        if len(update.cells):
            more["cells"], more["pages"] = update.cells, _int32(update.pages)
        if layout.late.size:
            more["late_places"], more["late_outputs"] = layout.late
        index = _index(layout)
        index["lines"], index["last_cells"] = _int32(update.lines), update.last_cells
        index["last_pages"] = _int32(update.last_pages)
        there = self._upload(index, more, is_fixed)
        if len(update.cells):
            self._table.write(there["cells"], there["pages"])
        self._table.write(there["last_cells"], there["last_pages"])
        input_ids = there["input_ids"]
        if layout.late.size:
            drawn = previous.index_select(0, there["late_outputs"])
            input_ids.index_copy_(0, there["late_places"], drawn)
        return self._batch(layout, there), there

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

    def _batch(self, layout: StepLayout, there: dict[str, Tensor]) -> DeviceBatch:
        kv_indices = torch.empty(
            layout.num_all_pages, dtype=torch.int32, device=self._table.pages.device
        )
        gpu_ops.flat_indices(
            self._table.pages, there["lines"], there["num_pages"], there["kv_indptr"], kv_indices
        )
        return DeviceBatch(
            input_ids=there["input_ids"],
            positions=there["positions"],
            slot_mapping=there["slots"],
            logits_indices=there["logits_indices"],
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
