"""Windows, chunks, soft caps and sinks, against attention written out row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from radixserve.attention.base import PLAIN, AttentionFeatures
from radixserve.attention.choice import BACKENDS, choose_backend
from radixserve.attention.cuda.triton import TritonBackend
from radixserve.errors import ModelNotSupported
from tests.attention.cases import (
    CPU,
    LENGTHS,
    SHARED,
    Case,
    SharedCase,
    first_seen,
    run,
    store_and_attend,
)
from tests.attention.conftest import Make, MakePaged
from tests.attention.test_paged_graph import store

TOLERANCE = {torch.float32: (3e-6, 2e-5), torch.bfloat16: (2e-2, 2e-2)}
LONG = [(700, 1), (690, 3), (500, 200), (0, 450), (3, 1), (383, 2), (191, 1)]
SPANS: dict[str, dict[str, Any]] = {
    "one": {"sliding_window": 1},
    "window": {"sliding_window": 13},
    "window of a block": {"sliding_window": 192},
    "wide window": {"sliding_window": 300},
    "wider than all": {"sliding_window": 5000},
    "chunks": {"attention_chunk_size": 20},
    "wide chunks": {"attention_chunk_size": 130},
    "both": {"sliding_window": 30, "attention_chunk_size": 64},
}
SCORES: dict[str, dict[str, Any]] = {
    "soft cap": {"logits_soft_cap": 0.7},
    "wide soft cap": {"logits_soft_cap": 50.0},
    "sinks": {"sinks": True},
    "everything": {"logits_soft_cap": 3.0, "sinks": True, "sliding_window": 21},
}


def make_features(case: Case, fields: dict[str, Any]) -> AttentionFeatures:
    """`sinks=True` stands for one score a head, some far above and far below the others."""
    if fields.get("sinks"):
        sinks = torch.linspace(-3, 3, case.q.shape[1])
        sinks[-1] = 40.0
        fields = {**fields, "sinks": sinks}
    return AttentionFeatures(**fields)


def check(make: Make, case: Case, features: AttentionFeatures, **settings: Any) -> torch.Tensor:
    backend = make(case.kv.clone(), case.q.shape[1], **settings)
    out = run(backend, case, features=features)
    expected, kv = case.expected(1, features=features)
    atol, rtol = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)
    assert torch.equal(backend.kv, kv)
    return out


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", [*SPANS, *SCORES])
def test_ragged_batches(name: str, dtype: torch.dtype, make_featured: Make) -> None:
    fields = SPANS.get(name) or SCORES[name]
    for lengths, page_size in ((LENGTHS["everything"], 2), (LENGTHS["long chunks"], 16), (LONG, 3)):
        case = Case(lengths, page_size, 6, 2, 24, dtype=dtype)
        check(make_featured, case, make_features(case, fields))


@pytest.mark.pairs
@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [64, 24])
def test_at_each_level(dim: int, dtype: torch.dtype, make_cpu: Make) -> None:
    """Few rows and many, one head to a key and eight, at every instruction level."""
    for group in (1, 8):
        case = Case(LONG, 4, 2 * group, 2, dim, dtype=dtype)
        for fields in (SPANS["window"], SPANS["wide chunks"], SCORES["everything"]):
            check(make_cpu, case, make_features(case, fields))


@pytest.mark.pairs
@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", SHARED)
def test_shared_pages(name: str, dtype: torch.dtype, make_host: Make) -> None:
    """Rows of different depths see different parts of what they share, or nothing of it."""
    lengths, groups = SHARED[name]
    case = SharedCase(lengths, 2, groups, heads=8, kv_heads=2, dim=32, dtype=dtype)
    for fields in (*SPANS.values(), SCORES["sinks"], SCORES["everything"]):
        check(make_host, case, make_features(case, fields))


@pytest.mark.usefixtures("always_share")
def test_a_long_shared_part(make_cpu: Make) -> None:
    """Blocks of the shared part that no row sees are skipped; some rows see none of it."""
    lengths = [(800, 1), (805, 4), (1400, 1), (820, 70), (801, 1)]
    case = SharedCase(lengths, 16, [((0, 1, 2, 3, 4), 50)], heads=4, kv_heads=2, dim=32)
    for window in (1, 5, 100, 300, 650, 1000):
        check(make_cpu, case, AttentionFeatures(sliding_window=window))


def test_layers_of_one_plan_may_differ(make_featured: Make) -> None:
    case = Case(LENGTHS["everything"], 2, 4, 2, 16)
    backend = make_featured(case.kv.clone(), 4)
    backend.plan(case.batch)
    for fields in ({}, SPANS["window"], SCORES["soft cap"], SPANS["chunks"], {}):
        features = AttentionFeatures(**fields)
        out = store_and_attend(backend, case.q, case.k, case.v, 0, features=features)
        expected, _ = case.expected(0, features=features)
        torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=2e-5)


def test_what_asks_for_nothing_changes_no_bit(make_featured: Make) -> None:
    case = Case(LENGTHS["everything"], 2, 4, 2, 16)
    plain = run(make_featured(case.kv.clone(), 4), case)
    wide = AttentionFeatures(sliding_window=10_000, attention_chunk_size=10_000)
    assert torch.equal(run(make_featured(case.kv.clone(), 4), case, features=wide), plain)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_does_not_depend_on_others(dtype: torch.dtype, make_cpu: Make) -> None:
    """To the bit, in any company and however its tokens are cut into chunks."""
    features = AttentionFeatures(sliding_window=50, logits_soft_cap=2.0)
    case = Case([(460, 1), (100, 301), (0, 30)], 2, 6, 2, 32, dtype=dtype)
    together = run(make_cpu(case.kv.clone(), 6), case, features=features)
    from radixserve.runner.input_batch import build_forward_batch

    q, k, v, first = case.q, case.k, case.v, 0
    for row in case.rows:
        end = first + len(row.token_ids)
        case.batch = build_forward_batch((row,), 2, CPU)
        case.q, case.k, case.v = q[first:end], k[first:end], v[first:end]
        alone = run(make_cpu(case.kv.clone(), 6), case, features=features)
        assert torch.equal(alone, together[first:end])
        first = end


def test_scores_of_any_size(make_cpu: Make) -> None:
    """A sink may be all of the sum, or nothing of it; a cap keeps what would overflow."""
    case = Case(LENGTHS["chunks"], 2, 4, 2, 16)
    for size in (1e-4, 30.0, 1e4):
        case.q = torch.randn_like(case.q) * size
        for sink in (-1e4, 0.0, 1e4):
            features = AttentionFeatures(sinks=torch.full((4,), sink), logits_soft_cap=20.0)
            out = run(make_cpu(case.kv.clone(), 4), case, features=features)
            assert bool(out.isfinite().all())
            expected, _ = case.expected(1, features=features)
            torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)


@pytest.mark.usefixtures("always_share")
def test_caps_and_sinks_of_shared_pages_on_triton() -> None:
    lengths, groups = SHARED["different depths"]
    case = SharedCase(lengths, 2, groups, heads=8, kv_heads=2, dim=32)
    for name in ("soft cap", "sinks"):
        check(TritonBackend, case, make_features(case, SCORES[name]))


def test_a_graph_with_features() -> None:
    lengths = [(39, 1), (12, 1), (30, 1)]
    case, features = Case(lengths, 2, 4, 2, 16), {"sliding_window": 9, "sinks": True}
    pool = torch.zeros_like(case.kv)
    pool[:] = case.kv
    graph = TritonBackend(pool, 4, shares=False).make_graph_backend(3, 60)
    store(case, pool, 1)
    graph.plan(case.batch)
    needed = make_features(case, features)
    out = graph.attend(case.q, 1, features=needed)
    expected = case.expected(1, features=needed)[0]
    torch.testing.assert_close(out.double(), expected, atol=3e-6, rtol=2e-5)


def test_others_refuse_by_name(make_flashinfer: MakePaged) -> None:
    case = Case(LENGTHS["decodes"], 2, 4, 2, 16)
    backend = make_flashinfer(case.kv, 4)
    with pytest.raises(ModelNotSupported, match="has no attention_chunk_size"):
        run(backend, case, features=AttentionFeatures(attention_chunk_size=3))


def test_the_choice_knows_features() -> None:
    needed = frozenset(("sinks", "sliding_window"))
    assert needed <= BACKENDS["cpu"].features
    assert needed <= BACKENDS["torch"].features
    assert needed <= BACKENDS["triton"].features
    assert choose_backend("torch", torch.float32, CPU, 16, needed) == "torch"
    assert BACKENDS["flashinfer"].features == {"sliding_window", "logits_soft_cap"}
    with pytest.raises(ModelNotSupported, match='"flashinfer" cannot be used: it has no sinks;'):
        choose_backend("flashinfer", torch.float32, CPU, 16, needed)


def test_first_seen() -> None:
    assert first_seen(PLAIN, 7) == 0
    both = AttentionFeatures(sliding_window=3, attention_chunk_size=4)
    assert [first_seen(both, at) for at in range(10)] == [0, 0, 0, 1, 4, 4, 4, 5, 8, 8]
    assert both.names == {"sliding_window", "attention_chunk_size"}
    assert np.all([PLAIN.span == (0, 0), both.span == (3, 4)])
