"""A schedule's way to the other ranks: what arrives is what they need of what was sent."""

from __future__ import annotations

import pickle
import random

import numpy as np

from radixserve.request import SamplingParams
from radixserve.runner.tensor_parallel.schedule_wire import ScheduleUnpacker, pack_schedule
from radixserve.schedule import SampleSpec, ScheduledRequest, ScheduledRows, SchedulerOutput


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def row(slot: int, pages: list[int], first_new: int = 0, **fields: object) -> ScheduledRequest:
    spec = SampleSpec(SamplingParams(), 1, 2, np.arange(5_000, dtype=np.int32), (3,))
    made = ScheduledRequest(
        request_id=f"r{slot}",
        token_ids=ids(len(pages)),
        start=10 * len(pages),
        page_ids=ids(*pages),
        sample=spec,
        first_new_page=first_new,
        slot=slot,
    )
    return made._replace(**fields)


def schedule(*rows: ScheduledRequest, step: int = 0) -> SchedulerOutput:
    return SchedulerOutput(step, ScheduledRows.of(rows), ids(7, 8, 2).reshape(1, 3), 4, 5)


def check(sent: SchedulerOutput, arrived: SchedulerOutput) -> None:
    for name in ("step", "num_prefill_tokens", "num_decode_tokens"):
        assert getattr(sent, name) == getattr(arrived, name)
    assert np.array_equal(sent.cow_copies, arrived.cow_copies)
    assert len(sent.rows) == len(arrived.rows)
    for mine, other in zip(sent.rows, arrived.rows, strict=True):
        for name in ("request_id", "start", "future_index", "first_new_page", "slot"):
            assert getattr(mine, name) == getattr(other, name)
        assert np.array_equal(mine.token_ids, other.token_ids)
        assert np.array_equal(mine.page_ids, other.page_ids)
        assert mine.page_ids.dtype == other.page_ids.dtype == np.int32
        assert (mine.sample is None) == (other.sample is None)
        assert (mine.logprob_targets is None) == (other.logprob_targets is None)
        if mine.logprob_targets is not None and other.logprob_targets is not None:
            assert np.array_equal(mine.logprob_targets, other.logprob_targets)


def test_everything_arrives() -> None:
    reader = ScheduleUnpacker()
    rows = (
        row(0, [1, 2, 3]),
        row(1, [4], sample=None),
        row(2, [5, 6], token_ids=ids(9, 8, 7), logprob_targets=ids(1, 2)),
        row(3, [9], future_index=2),
    )
    sent = SchedulerOutput(3, ScheduledRows.of(rows), ids().reshape(0, 3), 4, 5)
    check(sent, reader.unpack(pack_schedule(sent)))
    empty = schedule()
    check(empty, reader.unpack(pack_schedule(empty)))


def test_known_pages_and_histories_stay_behind() -> None:
    reader = ScheduleUnpacker()
    pages = list(range(4_000))
    first = pack_schedule(schedule(row(0, pages)))
    again = pack_schedule(schedule(row(0, [*pages, 4_001], 4_000)))
    assert len(first) > 16_000 > 1_500 > len(again)
    check(schedule(row(0, pages)), reader.unpack(first))
    check(schedule(row(0, [*pages, 4_001], 4_000)), reader.unpack(again))


def test_random_schedules() -> None:
    """Slots get more, fewer and other pages, and other requests."""
    rng = random.Random(0)
    readers = [ScheduleUnpacker(), ScheduleUnpacker()]
    pages: dict[int, list[int]] = {}
    for step in range(300):
        rows = []
        for slot in rng.sample(range(8), rng.randint(0, 6)):
            old = pages.get(slot, [])
            kept = rng.randint(0, len(old)) if rng.random() < 0.3 else len(old)
            pages[slot] = old[:kept] + [rng.randrange(1000) for _ in range(rng.randint(0, 3))]
            kept = kept if rng.random() < 0.9 else rng.randint(0, kept)
            rows.append(row(slot, pages[slot], kept))
        sent = schedule(*rows, step=step)
        message = pack_schedule(sent)
        for reader in readers:
            check(sent, reader.unpack(message))


def test_a_message_holds_plain_things_only() -> None:
    message = pack_schedule(schedule(row(0, [1])))
    assert b"radixserve" not in message
    assert len(pickle.loads(message)) == 9
