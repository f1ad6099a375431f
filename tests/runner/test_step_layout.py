"""The arrays of a step for a device against those that the CPU gets, and their padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from radixserve.runner.step_layout import StepLayout, pad, prepare_inputs

from radixserve.runner.input_batch import build_forward_batch
from tests.runner.rows import random_rows


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_same_as_on_the_cpu(page_size: int) -> None:
    generator = np.random.default_rng(page_size)
    for step in range(60):
        rows = random_rows(generator, page_size, 1 + step % 7, are_decodes=step % 4 == 0)
        layout = prepare_inputs(rows, page_size)
        batch = build_forward_batch(rows, page_size, torch.device("cpu"))
        assert layout.input_ids.tolist() == batch.input_ids.tolist()
        assert layout.positions.tolist() == batch.positions.tolist()
        assert layout.slots.tolist() == batch.slot_mapping.tolist()
        assert layout.logits_indices.tolist() == batch.logits_indices.tolist()
        for name in ("start", "qo_indptr", "kv_indptr", "kv_indices", "seq_lens"):
            assert getattr(layout.host, name).tolist() == getattr(batch.host, name).tolist()
        assert layout.num_pages.tolist() == [len(row.page_ids) for row in rows]
        asked = [0 if row.logprob_targets is None else len(row.logprob_targets) for row in rows]
        drawn = [row.sample is not None for row in rows]
        assert layout.num_logits.tolist() == [a + b for a, b in zip(asked, drawn, strict=True)]
        for at, (first, count) in enumerate(
            zip(layout.first_logit, layout.num_logits, strict=True)
        ):
            places = layout.logits_indices[first : first + count]
            end = layout.host.qo_indptr[at + 1]
            assert places.tolist() == list(range(end - count, end))


def test_padding() -> None:
    generator = np.random.default_rng(0)
    rows = random_rows(generator, 4, 3, are_decodes=True)
    plain, layout = prepare_inputs(rows, 4), pad(prepare_inputs(rows, 4), 8)
    assert (layout.num_rows, layout.num_all_rows, layout.num_tokens) == (3, 8, 8)
    assert layout.input_ids.tolist() == [*plain.input_ids, 0, 0, 0, 0, 0]
    assert layout.positions.tolist() == [*plain.positions, 0, 0, 0, 0, 0]
    assert layout.slots.tolist() == [*plain.slots, -1, -1, -1, -1, -1]
    assert layout.logits_indices.tolist() == list(range(8))
    assert layout.first_logit.tolist() == list(range(8))
    host = layout.host
    assert host.seq_lens.tolist() == [*plain.host.seq_lens, 1, 1, 1, 1, 1]
    assert host.qo_indptr.tolist() == list(range(9))
    assert np.diff(host.kv_indptr).tolist() == [*plain.num_pages, 1, 1, 1, 1, 1]
    assert host.kv_indices.tolist() == [*plain.host.kv_indices, 0, 0, 0, 0, 0]
    assert layout.num_all_pages == len(host.kv_indices)
    assert pad(StepLayout.empty(), 2).slots.tolist() == [-1, -1]
    with pytest.raises(AssertionError):
        pad(prepare_inputs(rows, 4), 2)


def test_tokens_that_the_device_has() -> None:
    generator = np.random.default_rng(0)
    rows = random_rows(generator, 1, 4, are_decodes=True)
    rows[1] = rows[1]._replace(future_index=5, token_ids=np.array([-1], np.int32))
    rows[3] = rows[3]._replace(future_index=0, token_ids=np.array([7, -1], np.int32), start=9)
    rows[3] = rows[3]._replace(page_ids=np.arange(11, dtype=np.int32))
    layout = prepare_inputs(rows, 1)
    assert layout.future_tokens.tolist() == [[1, 4], [5, 0]]
    assert layout.input_ids.tolist() == [rows[0].token_ids[0], 0, rows[2].token_ids[0], 7, 0]


def test_page_ids_are_put_together_once_and_given_back() -> None:
    generator = np.random.default_rng(0)
    rows = random_rows(generator, 1, 3)
    host = prepare_inputs(rows, 1).host
    flat = host.kv_indices
    assert host.kv_indices is flat
    host.close()
    assert host.kv_indices is flat
    unread = prepare_inputs(rows, 1).host
    unread.close()
    with pytest.raises(AssertionError, match="given back"):
        _ = unread.kv_indices


@pytest.mark.parametrize("num_pages", [1, 3])
def test_pages_must_fit(num_pages: int) -> None:
    row = random_rows(np.random.default_rng(0), 4, 1)[0]
    row = row._replace(token_ids=np.ones(1, np.int32), start=4, logprob_targets=None)
    with pytest.raises(ValueError, match="pages of 4 tokens for 5 tokens"):
        prepare_inputs([row._replace(page_ids=np.arange(num_pages, dtype=np.int32))], 4)
