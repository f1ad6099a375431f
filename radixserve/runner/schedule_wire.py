"""How a `SchedulerOutput` travels to ranks 1, 2 ...: their work, and only the pages that are new.

They draw no tokens: what decides a draw, which may be as long as its sequence, stays here.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from radixserve.arrays import IntArray
from radixserve.request import SamplingParams
from radixserve.schedule import SampleSpec, ScheduledRequest, SchedulerOutput

T = TypeVar("T")
_DRAWS = SampleSpec(SamplingParams(), 0, 0, np.empty(0, np.int32), ())  # behind this row, elsewhere


class SchedulePacker:
    """Packs schedules, one after the other, for one or several `ScheduleUnpacker`s."""

    def __init__(self) -> None:
        self._num_pages: dict[str, int] = {}  # of the requests in the schedule before

    def pack(self, schedule: SchedulerOutput) -> bytes:
        rows = schedule.rows
        known = [
            min(row.first_new_page, self._num_pages.get(row.request_id, 0)) for row in rows
        ]  # pages that the readers have
        self._num_pages = _remembered(rows, [len(row.page_ids) for row in rows])
        numbers = [
            (
                *(len(row.token_ids), row.start, first, len(row.page_ids) - first),
                *(row.sample is not None, row.future_index, row.first_new_page),
            )
            for row, first in zip(rows, known, strict=True)
        ]
        targets = {
            at: row.logprob_targets
            for at, row in enumerate(rows)
            if row.logprob_targets is not None
        }
        pages = [row.page_ids[first:] for row, first in zip(rows, known, strict=True)]
        return pickle.dumps(
            (
                *(schedule.step, schedule.cow_copies),
                *(schedule.num_prefill_tokens, schedule.num_decode_tokens),
                *([row.request_id for row in rows], np.array(numbers, np.int64).reshape(-1, 7)),
                *(_joined([row.token_ids for row in rows]), _joined(pages), targets),
            ),
            protocol=pickle.HIGHEST_PROTOCOL,
        )


class ScheduleUnpacker:
    """Unpacks what a `SchedulePacker` packed, every message, in order."""

    def __init__(self) -> None:
        self._pages: dict[str, IntArray] = {}

    def unpack(self, message: bytes) -> SchedulerOutput:
        step, copies, num_prefill, num_decode, ids, numbers, tokens, pages, targets = pickle.loads(
            message
        )
        rows, token_at, page_at = [], 0, 0
        for at, (request_id, fields) in enumerate(zip(ids, numbers.tolist(), strict=True)):
            num_tokens, start, known, num_pages, draws, future_index, first_new = fields
            page_ids = pages[page_at : page_at + num_pages]
            if known:
                page_ids = np.concatenate((self._pages[request_id][:known], page_ids))
            rows.append(
                ScheduledRequest(
                    request_id=request_id,
                    token_ids=tokens[token_at : token_at + num_tokens],
                    start=start,
                    page_ids=page_ids,
                    sample=_DRAWS if draws else None,
                    logprob_targets=targets.get(at),
                    future_index=future_index,
                    first_new_page=first_new,
                )
            )
            token_at, page_at = token_at + num_tokens, page_at + num_pages
        self._pages = _remembered(rows, [row.page_ids for row in rows])
        return SchedulerOutput(step, tuple(rows), copies, num_prefill, num_decode)


def _remembered(rows: Sequence[ScheduledRequest], values: Sequence[T]) -> dict[str, T]:
    """By request, but for those that have several rows: which one is meant would not be known."""
    pairs = [(row.request_id, value) for row, value in zip(rows, values, strict=True)]
    found = dict(pairs)
    if len(found) < len(pairs):
        ids = [request_id for request_id, _ in pairs]
        found = {request_id: value for request_id, value in pairs if ids.count(request_id) == 1}
    return found


def _joined(arrays: Sequence[IntArray]) -> IntArray:
    return np.concatenate(arrays, dtype=np.int32) if arrays else np.empty(0, np.int32)
