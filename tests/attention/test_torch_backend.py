"""The torch backend's own ways: parts, groups and decodes that are read in place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixserve.attention import reference
from radixserve.attention import segments as cutting
from radixserve.attention.reference import ReferenceBackend
from radixserve.attention.segments import cut_segments, pack_segments
from radixserve.runner.input_batch import build_forward_batch
from tests.attention.cases import CPU, LENGTHS, RUNS, SHARED, Case, SharedCase, run
from tests.attention.test_backends import case_of_runs, check, random_case


@pytest.fixture
def read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes are never gathered, however many runs their pages form."""
    monkeypatch.setattr(reference, "RUN_BYTES", 0)
    monkeypatch.setattr(reference, "LONG_BYTES", 0)


@pytest.mark.usefixtures("read_in_place", "always_share")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHARED)
def test_shared_pages_and_decodes_in_place(name: str, dtype: torch.dtype) -> None:
    lengths, groups = SHARED[name]
    case = SharedCase(lengths, 2, groups, heads=8, kv_heads=2, dim=32, dtype=dtype)
    check(ReferenceBackend, case)


def test_sharing_that_saves_little_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, groups = SHARED["decodes"]
    case = SharedCase(lengths, 2, groups, heads=4, kv_heads=2, dim=8)
    saved = 2 * 64 * 2 * 2 * 8 * 4  # all but one row's reading of 64 tokens' K and V
    for least, num_nodes in ((saved, 1), (saved + 1, 0)):
        monkeypatch.setattr(reference, "SHARE_BYTES", least)
        backend = ReferenceBackend(case.kv, 4)
        backend.plan(case.batch)
        assert backend._plan is not None
        assert len(backend._plan.shared) == num_nodes


@pytest.mark.usefixtures("read_in_place")
@pytest.mark.parametrize("seed", range(25))
def test_random_batches_in_place(seed: int) -> None:
    check(ReferenceBackend, random_case(seed), layer=0)


def test_many_small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "GATHER_BYTES", 1)
    monkeypatch.setattr(cutting, "MASK_ELEMENTS", 1)
    check(ReferenceBackend, Case(LENGTHS["everything"], 2, 4, 2, 16))


@pytest.mark.usefixtures("read_in_place")
@pytest.mark.parametrize("has_company", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("name", RUNS)
def test_a_decode_in_runs_of_pages_in_place(
    name: str, page_size: int, dtype: torch.dtype, has_company: bool
) -> None:
    check(ReferenceBackend, case_of_runs(name, page_size, dtype, has_company=has_company))


def test_long_decodes_are_read_in_place() -> None:
    case = Case([(600, 1), (3, 1), (700, 1)], 1, 4, 2, 64)
    for at, first in ((0, 0), (2, 650)):
        case.rows[at].page_ids[:] = np.arange(first, first + len(case.rows[at].page_ids))
    case.rows[1].page_ids[:] = [1351, 1353, 1352, 1354]
    case.kv = torch.randn(2, 2, 1400, 1, 2, 64)
    case.batch = build_forward_batch(case.rows, 1, CPU)
    backend = ReferenceBackend(case.kv.clone(), 4)
    out = run(backend, case)
    assert backend._plan is not None
    assert [type(part).__name__ for part in backend._plan.parts] == ["Single", "Single", "Group"]
    torch.testing.assert_close(out.double(), case.expected(1)[0], atol=2e-6, rtol=1e-5)


def test_padding_is_bounded() -> None:
    generator = np.random.default_rng(1)
    lengths = [(int(n), 1) for n in generator.integers(0, 4000, 200)]
    host = Case(lengths, 16, 2, 1, 8).batch.host
    segments = cut_segments(host, 16, np.zeros(200, np.int64))
    groups = pack_segments(segments, np.arange(200), max_tokens=1 << 30, max_queries=63)
    assert sorted(np.concatenate(groups).tolist()) == list(range(200))
    assert len(groups) < 20
    for group in groups:
        real = int(segments.kv_len[group].sum())
        padded = len(group) * int(segments.kv_len[group].max())
        assert padded - real <= max(cutting.FREE_WASTE, cutting.WASTE_SHARE * real)
