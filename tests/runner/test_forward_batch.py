"""The batch's index arrays, spelled out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixserve.request import SamplingParams
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import SampleSpec, ScheduledRequest

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


def test_nothing_of_a_row_is_kept() -> None:
    one = row([1, 2], 0, [0])
    batch = build_forward_batch((one,), 2, torch.device("cpu"))
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
    some[0].page_ids[:] = 1
    assert alone.kv_indices.tolist() == [page for ids in pages for page in ids]


def test_one_of_many_without_its_pages_is_named() -> None:
    rows = [row([1], 3, [0]), row([1], 4, [1])._replace(request_id="short")]
    with pytest.raises(ValueError, match="'short' has 1 pages of 4 tokens for 5 tokens"):
        build_forward_batch(rows, 4, torch.device("cpu"))
