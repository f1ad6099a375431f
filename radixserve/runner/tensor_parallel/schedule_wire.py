"""The form in which ranks 1, 2 ... receive a `SchedulerOutput`: their work and the new pages.

These ranks sample no tokens: the data of a sample, which may be as long as its sequence, stays in
rank 0. On a device cuda_runner.py broadcasts the sampled tokens; on the CPU the next step's rows
contain them.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np

from radixserve.arrays import IntArray
from radixserve.request import SamplingParams
from radixserve.schedule import LogprobTargets, SampleSpec, ScheduledRows, SchedulerOutput

_SAMPLED_ON_RANK0 = SampleSpec(SamplingParams(), 0, 0, np.empty(0, np.int32), ())
_COLUMNS = (  # of ScheduledRows, sent as they are
    *("request_ids", "input_ids", "num_tokens", "starts"),
    *("first_new_pages", "slots", "future_indices", "drafts"),
)


def pack_schedule(schedule: SchedulerOutput) -> bytes:
    """For one or several `ScheduleUnpacker`s."""
    rows = schedule.rows
    new_pages = [
        page_ids[first:]
        for page_ids, first in zip(rows.page_ids, rows.first_new_pages, strict=True)
    ]
    columns = {name: getattr(rows, name) for name in _COLUMNS}
    message = (
        *(schedule.step, schedule.cow_copies),
        *(schedule.num_prefill_tokens, schedule.num_decode_tokens),
        columns,
        [spec is not None for spec in rows.samples],
        [len(pages) for pages in new_pages],
        _joined(new_pages),
        {row: tuple(targets) for row, targets in rows.targets.items()},
    )
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


class ScheduleUnpacker:
    """Unpacks what `pack_schedule` packed, every message, in order.

    Keeps the page table of each slot's last row, as the sequence in rank 0's cache does.
    """

    def __init__(self) -> None:
        self._page_tables: dict[int, IntArray] = {}  # by slot

    def unpack(self, message: bytes) -> SchedulerOutput:
        step, copies, num_prefill, num_decode, columns, *others = pickle.loads(message)
        is_sampled, num_new_pages, pages, targets = others
        slots, page_ids, begin = columns["slots"], [], 0
        for slot, first, num_new in zip(
            slots, columns["first_new_pages"], num_new_pages, strict=True
        ):
            table = pages[begin : begin + num_new]
            if first:
                table = np.concatenate((self._page_tables[slot][:first], table))
            self._page_tables[slot] = table
            page_ids.append(table)
            begin += num_new
        rows = ScheduledRows()
        for name, column in columns.items():
            setattr(rows, name, column)
        rows.page_ids = page_ids
        rows.samples = [_SAMPLED_ON_RANK0 if samples else None for samples in is_sampled]
        rows.targets = {row: LogprobTargets(*fields) for row, fields in targets.items()}
        return SchedulerOutput(step, rows, copies, num_prefill, num_decode)


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate(arrays, dtype=np.int32) if arrays else np.empty(0, np.int32)
