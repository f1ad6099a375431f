"""The reference backend's own ways: blocks of queries, and how they are grouped and padded."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from radixserve.attention import reference
from radixserve.attention.reference import (
    BLOCK_QUERIES,
    CALL_KEYS,
    SHORT_KEYS,
    ReferenceBackend,
    cut_blocks,
    group_blocks,
)
from tests.attention.cases import LENGTHS, RUNS, SHARED, Case, SharedCase
from tests.attention.test_backends import case_of_runs, check, random_case


@pytest.fixture(params=["one by one", "all together"])
def grouping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block in a call of its own, or as many in one as have the same number of queries."""
    together = request.param == "all together"
    monkeypatch.setattr(reference, "SHORT_KEYS", 1 << 40 if together else 0)
    monkeypatch.setattr(reference, "CALL_KEYS", 1 << 40 if together else 1)


@pytest.mark.pairs
@pytest.mark.usefixtures("grouping")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHARED)
def test_shared_pages(name: str, dtype: torch.dtype) -> None:
    lengths, groups = SHARED[name]
    case = SharedCase(lengths, 2, groups, heads=8, kv_heads=2, dim=32, dtype=dtype)
    check(ReferenceBackend, case)


@pytest.mark.usefixtures("grouping")
@pytest.mark.parametrize("seed", range(25))
def test_random_batches(seed: int) -> None:
    check(ReferenceBackend, random_case(seed), layer=0)


@pytest.mark.pairs
@pytest.mark.usefixtures("grouping")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RUNS)
def test_a_decode_in_runs_of_pages(name: str, dtype: torch.dtype) -> None:
    check(ReferenceBackend, case_of_runs(name, 3, dtype, has_company=True))


def test_no_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose attention builds a plan for each shape."""
    enabled, real = [], reference.F.scaled_dot_product_attention

    def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return real(*args, **kwargs)

    before = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(reference.F, "scaled_dot_product_attention", attend)
    check(ReferenceBackend, Case(LENGTHS["decodes"], 2, 4, 2, 16))
    assert enabled
    assert not any(enabled)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_blocks_of_a_few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "BLOCK_QUERIES", 5)
    check(ReferenceBackend, Case(LENGTHS["everything"], 2, 4, 2, 16))


@pytest.mark.parametrize("seed", range(8))
def test_every_token_is_in_one_block(seed: int) -> None:
    case = random_case(seed) if seed else Case(LENGTHS["long chunks"], 2, 4, 2, 16)
    host = case.batch.host
    blocks = cut_blocks(host)
    tokens = [
        np.arange(first, first + count)
        for first, count in zip(blocks.first_token, blocks.num_queries, strict=True)
    ]
    assert sorted(np.concatenate(tokens).tolist()) == list(range(int(host.qo_indptr[-1])))
    assert int(blocks.num_queries.max()) <= BLOCK_QUERIES
    ends = blocks.first_token + blocks.num_queries - host.qo_indptr[blocks.row]
    assert (blocks.num_keys == host.start[blocks.row] + ends).all()


def test_padding_is_bounded() -> None:
    generator = np.random.default_rng(1)
    lengths = [(int(n), 1) for n in generator.integers(0, 4000, 200)]
    blocks = cut_blocks(Case(lengths, 16, 2, 1, 8).batch.host)
    groups = group_blocks(blocks)
    assert [groups[0].start, groups[-1].stop] == [0, 200]
    assert all(a.stop == b.start for a, b in pairwise(groups))
    assert len(groups) < 25
    for group in groups:
        num_keys = blocks.num_keys[group]
        assert num_keys.max() <= max(2 * num_keys.min(), SHORT_KEYS)
        assert len(num_keys) * num_keys.max() <= CALL_KEYS
