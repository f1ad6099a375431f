"""A schedule's way to the other ranks: what arrives is what they need of what was sent."""

from __future__ import annotations

import pickle
import random

import numpy as np

from radixserve.request import SamplingParams
from radixserve.runner.rank_wire import WireReader, WireWriter
from radixserve.schedule import SampleSpec, ScheduledRequest, SchedulerOutput


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def row(name: str, pages: list[int], first_new: int = 0, **fields: object) -> ScheduledRequest:
    spec = SampleSpec(SamplingParams(), 1, 2, np.arange(5_000, dtype=np.int32), (3,))
    made = ScheduledRequest(
        name, ids(len(pages)), 10 * len(pages), ids(*pages), spec, None, 0, -1, first_new
    )
    return made._replace(**fields)


def schedule(*rows: ScheduledRequest, step: int = 0) -> SchedulerOutput:
    return SchedulerOutput(step, rows, ids(7, 8, 2).reshape(1, 3), 4, 5)


def check(sent: SchedulerOutput, arrived: SchedulerOutput) -> None:
    for name in ("step", "num_prefill_tokens", "num_decode_tokens"):
        assert getattr(sent, name) == getattr(arrived, name)
    assert np.array_equal(sent.cow_copies, arrived.cow_copies)
    assert len(sent.rows) == len(arrived.rows)
    for mine, other in zip(sent.rows, arrived.rows, strict=True):
        assert (mine.request_id, mine.start) == (other.request_id, other.start)
        assert (mine.future_index, mine.first_new_page) == (
            other.future_index,
            other.first_new_page,
        )
        assert np.array_equal(mine.token_ids, other.token_ids)
        assert np.array_equal(mine.page_ids, other.page_ids)
        assert mine.page_ids.dtype == other.page_ids.dtype == np.int32
        assert (mine.sample is None) == (other.sample is None)
        assert (mine.logprob_targets is None) == (other.logprob_targets is None)
        if mine.logprob_targets is not None and other.logprob_targets is not None:
            assert np.array_equal(mine.logprob_targets, other.logprob_targets)


def test_everything_arrives() -> None:
    writer, reader = WireWriter(), WireReader()
    rows = (
        row("a", [1, 2, 3]),
        row("b", [4], sample=None),
        row("c", [5, 6], token_ids=ids(9, 8, 7), logprob_targets=ids(1, 2)),
        row("d", [9], future_index=2),
    )
    sent = SchedulerOutput(3, rows, ids().reshape(0, 3), 4, 5)
    check(sent, reader.unpack(writer.pack(sent)))
    empty = schedule()
    check(empty, reader.unpack(writer.pack(empty)))


def test_known_pages_and_histories_stay_behind() -> None:
    writer, reader = WireWriter(), WireReader()
    pages = list(range(4_000))
    first = writer.pack(schedule(row("a", pages)))
    again = writer.pack(schedule(row("a", [*pages, 4_001], 4_000)))
    assert len(first) > 16_000 > 1_500 > len(again)
    check(schedule(row("a", pages)), reader.unpack(first))
    check(schedule(row("a", [*pages, 4_001], 4_000)), reader.unpack(again))


def test_random_schedules() -> None:
    """Rows come and go, grow and shrink, and sometimes a request has two of them."""
    rng = random.Random(0)
    writer, readers = WireWriter(), [WireReader(), WireReader()]
    pages: dict[str, list[int]] = {}
    for step in range(300):
        rows = []
        for name in rng.sample("abcdefgh", rng.randint(0, 6)):
            old = pages.get(name, [])
            kept = rng.randint(0, len(old)) if rng.random() < 0.3 else len(old)
            pages[name] = old[:kept] + [rng.randrange(1000) for _ in range(rng.randint(0, 3))]
            kept = kept if rng.random() < 0.9 else rng.randint(0, kept)
            rows.append(row(name, pages[name], kept))
            if rng.random() < 0.1:  # another row of it, on pages of its own
                rows.append(row(name, [rng.randrange(1000)], 0))
                pages.pop(name)
        sent = schedule(*rows, step=step)
        message = writer.pack(sent)
        for reader in readers:
            check(sent, reader.unpack(message))


def test_a_message_holds_plain_things_only() -> None:
    message = WireWriter().pack(schedule(row("a", [1])))
    assert b"radixserve" not in message
    assert len(pickle.loads(message)) == 9
