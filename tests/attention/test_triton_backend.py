"""The triton backend over its real kernels, run by Triton's interpreter, and how it splits keys."""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from radixserve.attention.base import AttentionFeatures, kv_view
from radixserve.attention.cuda import triton as triton_backend
from radixserve.attention.cuda.plan import plan_rows
from radixserve.attention.cuda.triton import TritonBackend, count_tiles
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest
from radixserve_kernels import gpu_ops
from radixserve_kernels.stored_kv import stored_width
from tests.attention.cases import CPU, LENGTHS, SHARED, Case, SharedCase, run
from tests.attention.test_backends import check
from tests.attention.test_paged_graph import store
from tests.attention.test_paged_plan import same_prefix

if find_spec("triton") is not None:
    from radixserve_kernels.gpu.warm_up import attention_launches

NEEDS_TRITON = pytest.mark.skipif(
    find_spec("triton") is None, reason="there is no Triton for this system"
)
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
    graph = TritonBackend(pool, 4).make_graph_backend(4, 30, 1)
    for case in cases:
        pool[:] = case.kv
        store(case, pool, 1)
        graph.plan(case.batch)
        q = torch.full((4, 4, 16), torch.nan)
        q[: len(case.q)] = case.q
        out = graph.attend(q, 1)[: len(case.q)]
        torch.testing.assert_close(out.double(), case.expected(1)[0], atol=3e-6, rtol=2e-5)


@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize(
    ("group", "stored"),
    [*((n, torch.bfloat16) for n in (1, 4, 7, 32)), (4, torch.int8), (4, torch.float8_e4m3fn)],
)
@NEEDS_TRITON
def test_nothing_is_left_to_be_compiled(
    group: int, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever rows come, eagerly or in a graph, the warm-up has launched its like."""
    seen: set[tuple[Any, ...]] = set()
    monkeypatch.setattr(gpu_ops, "cpu_launcher", lambda launch: seen.add(launch.variant))
    kv = torch.zeros(1, 2, 40_000, 1, 2, stored_width(32, stored)).to(stored)
    backend = TritonBackend(kv, 2 * group, dtype=torch.bfloat16)
    rng = np.random.default_rng(0)
    for step in range(60):
        shared = int(rng.choice([0, 40, 3_000])) if step else 9_000
        most = int(rng.choice([1, 3, 20, 200]))
        new = [int(rng.integers(1, most + 1)) for _ in range(int(rng.integers(1, 9)))]
        rows = [
            ScheduledRequest("", np.zeros(n, np.int32), shared, np.arange(shared + n), None)
            for n in new
        ]
        batch = build_forward_batch(rows, 1, CPU)
        backend.plan(batch)
        backend.attend(torch.zeros(sum(new), 2 * group, 32, dtype=torch.bfloat16), 0)
    for num_levels, num_rows in itertools.product((0, 1), (1, 2, 8, 64, 256)):
        graph = backend.make_graph_backend(num_rows, 40_000, num_levels)
        graph.plan(build_forward_batch(same_prefix(num_rows, 100), 1, CPU))
        graph.attend(torch.zeros(num_rows, 2 * group, 32, dtype=torch.bfloat16), 0)
    seen = {one for one in seen if one[0] != "flat_indices_kernel"}  # of any step
    assert len({name for name, *_ in seen}) == 4
    slots, names = kv_view(kv, 0), frozenset[str]()
    launches = list(
        attention_launches(*slots, 2 * group, backend.kernel_page_size, names, torch.bfloat16)
    )
    assert seen <= {launch.variant for launch in launches}
    assert len(seen) > 12


@NEEDS_TRITON
def test_nothing_of_layers_with_features_is_left_to_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[tuple[Any, ...]] = set()
    monkeypatch.setattr(gpu_ops, "cpu_launcher", lambda launch: seen.add(launch.variant))
    kv = torch.zeros(1, 2, 9_000, 1, 2, 32, dtype=torch.bfloat16)
    backend = TritonBackend(kv, 8, shares=False)
    sinks = torch.zeros(8)
    layers = [
        AttentionFeatures(sliding_window=100, sinks=sinks),
        AttentionFeatures(attention_chunk_size=7),
        AttentionFeatures(sliding_window=1, logits_soft_cap=3.0),
        AttentionFeatures(logits_soft_cap=1.0, sinks=sinks),
        AttentionFeatures(),
    ]
    for lengths in ([(8_000, 1)], [(9, 1)] * 20, [(5, 3)], [(50, 300), (0, 20)], [(800, 30)]):
        rows = [
            ScheduledRequest("", np.zeros(new, np.int32), done, np.arange(done + new), None)
            for done, new in lengths
        ]
        batch = build_forward_batch(rows, 1, CPU)
        backend.plan(batch)
        for features in layers:
            q = torch.zeros(batch.num_tokens, 8, 32, dtype=torch.bfloat16)
            backend.attend(q, 0, features=features)
    names = frozenset[str]().union(*(one.names for one in layers))
    launches = attention_launches(*kv_view(kv, 0), 8, backend.kernel_page_size, names)
    seen = {one for one in seen if one[0] != "flat_indices_kernel"}  # of any step
    assert seen <= {launch.variant for launch in launches}
    assert len(seen) > 8


def test_half_precision_over_the_references() -> None:
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
    graph = backend.make_graph_backend(64, 64 * 5_000, 1)
    (fixed, _) = graph.shared[0]
    assert isinstance(fixed, triton_backend.TritonLaunch)
    assert 33 == fixed.num_splits >= level.num_splits


def test_tiles_are_counted_by_request() -> None:
    case = Case([(0, 20), (0, 1), (5, 17)], 1, **SHAPE)
    parts = plan_rows(case.batch.host, 1, [], 1).unique
    assert [count_tiles(part, 4) for part in parts] == [1, 2 + 2]
