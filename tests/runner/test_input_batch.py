"""A step's arrays, spelled out; their padding; the tokens that only the device has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixserve.attention.base import ForwardBatch
from radixserve.request import SamplingParams
from radixserve.runner.input_batch import (
    HostBatches,
    build_forward_batch,
    padding_batch,
    prepare_inputs,
)
from radixserve.schedule import SampleSpec, ScheduledRequest, ScheduledRows
from tests.runner.rows import random_rows

SPEC = SampleSpec(SamplingParams(), 0, 1, np.zeros(1, np.int32), ())


def row(
    tokens: list[int], start: int, pages: list[int], sample: SampleSpec | None = None
) -> ScheduledRequest:
    return ScheduledRequest(
        "r", np.array(tokens, np.int32), start, np.array(pages, np.int32), sample
    )


def test_rows_end_to_end() -> None:
    rows = (row([7, 8, 9], 2, [5, 1], SPEC), row([4], 4, [3, 0], None), row([6], 0, [2], SPEC))
    batch = build_forward_batch(rows, 4, torch.device("cpu"))
    assert batch.input_ids.tolist() == [7, 8, 9, 4, 6]
    assert batch.positions.tolist() == [2, 3, 4, 4, 0]
    assert batch.slot_mapping.tolist() == [22, 23, 4, 0, 8]
    assert batch.host.qo_indptr.tolist() == [0, 3, 4, 5]
    assert batch.host.kv_indptr.tolist() == [0, 2, 4, 5]
    assert batch.kv_indices.tolist() == [5, 1, 3, 0, 2]
    assert batch.host.seq_lens.tolist() == [5, 5, 1]
    assert batch.logits_indices.tolist() == [2, 4]
    assert batch.num_tokens == 5
    assert batch.kv_indices.dtype == torch.int32
    assert batch.slot_mapping.dtype == torch.int64


@pytest.mark.parametrize("pages", [[0], [0, 1, 2]])
def test_pages_must_fit(pages: list[int]) -> None:
    with pytest.raises(ValueError, match="pages of 4 tokens for 5 tokens"):
        build_forward_batch((row([1], 4, pages),), 4, torch.device("cpu"))


def test_nothing_of_a_row_is_kept_once_its_pages_are_read() -> None:
    one = row([1, 2], 0, [0])
    batch = build_forward_batch((one,), 2, torch.device("cpu"))
    assert not batch.host.is_flattened
    assert batch.host.kv_indices is batch.host.kv_indices
    assert batch.host.is_flattened
    batch.host.release()
    one.token_ids[:] = 9
    one.page_ids[:] = 9
    assert batch.input_ids.tolist() == [1, 2]
    assert batch.kv_indices.tolist() == [0]
    assert batch.host.kv_indices.tolist() == [0]


@pytest.mark.parametrize("page_size", [1, 4])
def test_single_tokens_are_laid_out_as_among_chunks(page_size: int) -> None:
    """A batch of rows of one token has a way of its own."""
    pages = [[3, 9], [5], [8]] if page_size == 4 else [[3, 9, 4, 0, 6, 8], [5], [7, 1, 2]]
    places = [(7, 5, SPEC), (4, 0, None), (6, 2, SPEC)]
    rows = [
        row([token], start, ids, sample)
        for (token, start, sample), ids in zip(places, pages, strict=True)
    ]
    chunk = row([1, 2], 0, [0] if page_size == 4 else [0, 10])
    for num_rows in (1, 2, 3):
        some = rows[:num_rows]
        alone = build_forward_batch(some, page_size, torch.device("cpu"))
        among = build_forward_batch([*some, chunk], page_size, torch.device("cpu"))
        for name in ("input_ids", "positions", "slot_mapping"):
            assert getattr(alone, name).tolist() == getattr(among, name).tolist()[:-2], name
            assert getattr(alone, name).dtype == getattr(among, name).dtype == torch.int64
        assert alone.logits_indices.tolist() == among.logits_indices.tolist()
        for name in ("start", "seq_lens", "qo_indptr", "kv_indptr"):
            assert getattr(alone.host, name).tolist() == getattr(among.host, name).tolist()[:-1]
            assert getattr(alone.host, name).dtype == getattr(among.host, name).dtype == np.int64
        assert alone.kv_indices.tolist() == [page for ids in pages[:num_rows] for page in ids]


def test_one_of_many_without_its_pages_is_named() -> None:
    rows = [row([1], 3, [0]), row([1], 4, [1])._replace(request_id="short")]
    with pytest.raises(ValueError, match="'short' has 1 pages of 4 tokens for 5 tokens"):
        build_forward_batch(rows, 4, torch.device("cpu"))


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_random_rows_one_by_one(page_size: int) -> None:
    generator = np.random.default_rng(page_size)
    for step in range(60):
        rows = random_rows(generator, page_size, 1 + step % 7, are_decodes=step % 4 == 0)
        batch = prepare_inputs(ScheduledRows.of(rows), page_size)
        asked = [0 if row.logprob_targets is None else len(row.logprob_targets) for row in rows]
        counts = [a + (row.sample is not None) for a, row in zip(asked, rows, strict=True)]
        firsts, found = batch.logit_ranges()
        assert found.tolist() == counts
        tokens, positions, slots, logits = [], [], [], []
        for row, first, count in zip(rows, firsts.tolist(), counts, strict=True):
            tokens += row.token_ids.tolist()
            places = range(row.start, row.end)
            positions += places
            slots += [
                int(row.page_ids[at // page_size]) * page_size + at % page_size for at in places
            ]
            logits += range(len(tokens) - count, len(tokens))
            assert (
                batch.logits_indices[first : first + count].tolist() == logits[-count:] or not count
            )
        assert batch.input_ids.tolist() == tokens
        assert batch.positions.tolist() == positions
        assert batch.slot_mapping.tolist() == slots
        assert batch.logits_indices.tolist() == logits
        host = batch.host
        assert host.start.tolist() == [row.start for row in rows]
        assert host.seq_lens.tolist() == [row.end for row in rows]
        assert np.diff(host.qo_indptr).tolist() == [len(row.token_ids) for row in rows]
        assert np.diff(host.kv_indptr).tolist() == [len(row.page_ids) for row in rows]
        assert host.kv_indices.tolist() == [page for row in rows for page in row.page_ids.tolist()]
        for array in (host.start, host.seq_lens, host.qo_indptr, host.kv_indptr, host.kv_indices):
            assert array.flags.c_contiguous


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_decode_steps_are_written_to_kept_memory(page_size: int) -> None:
    """As those arrays are that the rows get among a chunk, which are made anew."""
    generator, batches = np.random.default_rng(page_size), HostBatches(page_size)
    kept: dict[tuple[int, int], ForwardBatch] = {}
    pages = np.zeros(-(-2 // page_size), np.int32)
    chunk = ScheduledRequest("chunk", np.zeros(2, np.int32), 0, pages, None)
    for step in range(60):
        rows = random_rows(generator, page_size, 1 + step % 4, are_decodes=True)
        for at in range(step % 3 and len(rows)):
            num_drafts = int(generator.integers(0, 4))
            end = rows[at].start + 1 + num_drafts
            rows[at] = rows[at]._replace(
                token_ids=generator.integers(0, 50, 1 + num_drafts).astype(np.int32),
                page_ids=generator.integers(0, 99, -(-end // page_size)).astype(np.int32),
                num_drafts=num_drafts,
            )
        inputs, batch = batches.prepare(ScheduledRows.of(rows))
        among = prepare_inputs(ScheduledRows.of([*rows, chunk]), page_size)
        assert kept.setdefault((inputs.num_rows, inputs.num_tokens), batch) is batch
        for name in ("input_ids", "positions", "slot_mapping", "logits_indices"):
            expected = getattr(among, name).tolist()[: inputs.num_tokens]
            assert getattr(inputs, name).tolist() == expected, name
            assert getattr(batch, name).tolist() == expected, name
        assert batch.host is inputs.host
        for name in ("start", "seq_lens", "qo_indptr", "kv_indptr", "row_slots", "first_new_page"):
            assert getattr(inputs.host, name).tolist() == getattr(among.host, name).tolist()[:-1]
        assert inputs.host.kv_indices.tolist() == [
            page for row in rows for page in row.page_ids.tolist()
        ]
    assert len(kept) < 30


def test_padding() -> None:
    generator = np.random.default_rng(0)
    rows = random_rows(generator, 4, 3, are_decodes=True)
    plain, padded = (
        prepare_inputs(ScheduledRows.of(rows), 4),
        prepare_inputs(ScheduledRows.of(rows), 4).padded(8),
    )
    assert (len(padded.rows), padded.num_rows, padded.num_tokens) == (3, 8, 8)
    assert padded.input_ids.tolist() == [*plain.input_ids, 0, 0, 0, 0, 0]
    assert padded.positions.tolist() == [*plain.positions, 0, 0, 0, 0, 0]
    assert padded.slot_mapping.tolist() == [*plain.slot_mapping, -1, -1, -1, -1, -1]
    assert padded.logits_indices.tolist() == list(range(8))
    assert padded.logit_ranges()[0].tolist() == [0, 1, 2]
    host = padded.host
    assert host.seq_lens.tolist() == [*plain.host.seq_lens, 1, 1, 1, 1, 1]
    assert host.qo_indptr.tolist() == list(range(9))
    assert np.diff(host.kv_indptr).tolist() == [*np.diff(plain.host.kv_indptr), 1, 1, 1, 1, 1]
    assert host.kv_indices.tolist() == [*plain.host.kv_indices, 0, 0, 0, 0, 0]
    assert padded.num_pages == len(host.kv_indices)
    assert padding_batch(2, 4).slot_mapping.tolist() == [-1, -1]
    with pytest.raises(AssertionError):
        prepare_inputs(ScheduledRows.of(rows), 4).padded(2)


def test_tokens_that_the_device_has() -> None:
    generator = np.random.default_rng(0)
    rows = random_rows(generator, 1, 4, are_decodes=True)
    rows[1] = rows[1]._replace(future_index=5, token_ids=np.array([-1], np.int32))
    assert [one.tolist() for one in prepare_inputs(ScheduledRows.of(rows), 1).future_tokens()] == [
        [1],
        [5],
    ]
    rows[3] = rows[3]._replace(future_index=0, token_ids=np.array([7, -1], np.int32), start=9)
    rows[3] = rows[3]._replace(page_ids=np.arange(11, dtype=np.int32))
    assert [one.tolist() for one in prepare_inputs(ScheduledRows.of(rows), 1).future_tokens()] == [
        [1, 4],
        [5, 0],
    ]


def test_released_page_ids_are_not_read() -> None:
    host = prepare_inputs(ScheduledRows.of(random_rows(np.random.default_rng(0), 1, 3)), 1).host
    host.release()
    with pytest.raises(ValueError, match="at least one array"):
        _ = host.kv_indices
