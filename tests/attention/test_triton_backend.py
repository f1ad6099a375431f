"""The triton backend over its real kernels, run by Triton's interpreter, and how it splits keys."""

from __future__ import annotations

import pytest
import torch

from radixserve.attention.cuda import triton as triton_backend
from radixserve.attention.cuda.plan import plan_rows
from radixserve.attention.cuda.triton import TritonBackend, count_tiles
from radixserve.runner.input_batch import build_forward_batch
from tests.attention.cases import CPU, LENGTHS, SHARED, Case, SharedCase, run
from tests.attention.test_backends import check
from tests.attention.test_paged_graph import store
from tests.attention.test_paged_plan import same_prefix

SHAPE = {"heads": 4, "kv_heads": 2, "dim": 16}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_every_kind(dtype: torch.dtype) -> None:
    check(TritonBackend, Case(LENGTHS["chunks and decodes"], 2, **SHAPE, dtype=dtype))


@pytest.mark.usefixtures("interpreted", "always_share")
def test_shared_pages() -> None:
    lengths, groups = SHARED["different depths"]
    check(TritonBackend, SharedCase(lengths, 2, groups, **SHAPE))


@pytest.mark.usefixtures("interpreted", "always_share")
def test_a_graph() -> None:
    """Rows that are padded, groups without pages and without queries: the kernels take them."""
    lengths = [(9, 1), (12, 1), (8, 1)]
    cases: list[Case] = [SharedCase(lengths, 2, [((0, 1), 4)], **SHAPE), Case(lengths, 2, **SHAPE)]
    pool = torch.zeros_like(cases[0].kv)
    graph = TritonBackend(pool, 4).capture_backend(4, 30, 1)
    for case in cases:
        pool[:] = case.kv
        store(case, pool, 1)
        graph.plan(case.batch)
        q = torch.full((4, 4, 16), torch.nan)
        q[: len(case.q)] = case.q
        out = graph.attend(q, 1)[: len(case.q)]
        torch.testing.assert_close(out.double(), case.expected(1)[0], atol=3e-6, rtol=2e-5)


def test_half_precision_over_the_twins() -> None:
    case = Case(LENGTHS["everything"], 2, **SHAPE, dtype=torch.float16)
    out = run(TritonBackend(case.kv.clone(), 4), case)
    torch.testing.assert_close(out.double(), case.expected(1)[0], atol=4e-3, rtol=4e-2)


@pytest.mark.usefixtures("always_share")
def test_what_is_split() -> None:
    """Few rows and tiles over many keys; the splits of a graph are those of its largest rows."""
    backend = TritonBackend(torch.zeros(1, 2, 9_000, 1, 2, 16), 8)
    backend.plan(build_forward_batch(same_prefix(1, 4_000), 1, CPU))
    one_row = backend.unique[0].launch
    assert isinstance(one_row, triton_backend.TritonLaunch)
    assert one_row.num_splits >= one_row.fixed_splits == 4_001 // 128
    backend.plan(build_forward_batch(same_prefix(64, 4_000), 1, CPU))
    (level, _), (own, _) = backend.shared[0], backend.unique[0]
    assert isinstance(level, triton_backend.TritonLaunch)
    assert isinstance(own, triton_backend.TritonLaunch)
    assert level.num_splits > 8 > own.fixed_splits == 1
    graph = backend.capture_backend(64, 64 * 5_000, 1)
    (fixed, _) = graph.shared[0]
    assert isinstance(fixed, triton_backend.TritonLaunch)
    assert 33 == fixed.num_splits >= level.num_splits


def test_tiles_are_counted_by_request() -> None:
    case = Case([(0, 20), (0, 1), (5, 17)], 1, **SHAPE)
    parts = plan_rows(case.batch.host, 1, [], 1).unique
    assert [count_tiles(part, 4) for part in parts] == [1, 2 + 2]
