"""How a `SchedulerOutput` travels to ranks 1, 2 ...: their work, and only the pages that are new.

They sample no tokens: the data of a sample, which may be as long as its sequence, stays in rank 0.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import numpy as np

from radixserve.arrays import IntArray
from radixserve.request import SamplingParams
from radixserve.schedule import SampleSpec, ScheduledRequest, SchedulerOutput

_DRAWN_ELSEWHERE = SampleSpec(SamplingParams(), 0, 0, np.empty(0, np.int32), ())
_NUM_FIELDS = 7  # integers a row


def pack_schedule(schedule: SchedulerOutput) -> bytes:
    """For one or several `ScheduleUnpacker`s."""
    rows = schedule.rows
    numbers = [
        (
            *(len(row.token_ids), row.start, row.first_new_page),
            *(len(row.page_ids) - row.first_new_page, row.sample is not None),
            *(row.future_index, row.req_pool_idx),
        )
        for row in rows
    ]
    targets = {
        at: row.logprob_targets for at, row in enumerate(rows) if row.logprob_targets is not None
    }
    return pickle.dumps(
        (
            *(schedule.step, schedule.cow_copies),
            *(schedule.num_prefill_tokens, schedule.num_decode_tokens),
            [row.request_id for row in rows],
            np.array(numbers, np.int64).reshape(-1, _NUM_FIELDS),
            _joined([row.token_ids for row in rows]),
            _joined([row.page_ids[row.first_new_page :] for row in rows]),
            targets,
        ),
        protocol=pickle.HIGHEST_PROTOCOL,
    )


class ScheduleUnpacker:
    """Unpacks what `pack_schedule` packed, every message, in order."""

    def __init__(self) -> None:
        self._pages: dict[int, IntArray] = {}  # of each slot's last row

    def unpack(self, message: bytes) -> SchedulerOutput:
        step, copies, num_prefill, num_decode, ids, numbers, tokens, pages, targets = pickle.loads(
            message
        )
        rows, token_at, page_at = [], 0, 0
        for at, (request_id, fields) in enumerate(zip(ids, numbers.tolist(), strict=True)):
            num_tokens, start, first_new, num_new, samples, future_index, slot = fields
            page_ids = pages[page_at : page_at + num_new]
            if first_new:
                page_ids = np.concatenate((self._pages[slot][:first_new], page_ids))
            self._pages[slot] = page_ids
            rows.append(
                ScheduledRequest(
                    request_id=request_id,
                    token_ids=tokens[token_at : token_at + num_tokens],
                    start=start,
                    page_ids=page_ids,
                    sample=_DRAWN_ELSEWHERE if samples else None,
                    logprob_targets=targets.get(at),
                    future_index=future_index,
                    first_new_page=first_new,
                    req_pool_idx=slot,
                )
            )
            token_at, page_at = token_at + num_tokens, page_at + num_new
        return SchedulerOutput(step, tuple(rows), copies, num_prefill, num_decode)


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate(arrays, dtype=np.int32) if arrays else np.empty(0, np.int32)
