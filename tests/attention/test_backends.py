"""What every attention backend owes, against attention written out row by row."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from radixserve.attention.base import kv_view
from radixserve.attention.cuda.cascade import find_shared
from radixserve.errors import ModelNotSupported
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest
from tests.attention.cases import CPU, LENGTHS, RUNS, SHARED, Case, SharedCase, run
from tests.attention.conftest import Make

BOTH = [torch.float32, torch.bfloat16]


def check(make: Make, case: Case, layer: int = 1, scale: float | None = None) -> torch.Tensor:
    """The attention is right, and of the pool only the new tokens' slots were written."""
    kv = case.kv.clone()
    out = run(make(kv, case.q.shape[1]), case, layer, scale)
    expected, expected_kv = case.expected(layer, scale)
    assert out.dtype == case.q.dtype
    tolerance = 2e-6 if out.dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=10 * tolerance)
    assert torch.equal(kv.nan_to_num(7), expected_kv.nan_to_num(7))
    return out


@pytest.mark.pairs
@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("name", LENGTHS)
def test_matches_row_by_row(name: str, page_size: int, make_host: Make) -> None:
    check(make_host, Case(LENGTHS[name], page_size, heads=8, kv_heads=2, dim=32, seed=page_size))


@pytest.mark.pairs
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", LENGTHS)
def test_paged_matches_row_by_row(name: str, page_size: int, make_paged: Make) -> None:
    check(make_paged, Case(LENGTHS[name], page_size, heads=8, kv_heads=2, dim=32, seed=page_size))


@pytest.mark.pairs
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (8, 1), (6, 2), (40, 1), (30, 2)])
@pytest.mark.parametrize("dim", [8, 16, 20, 40, 64, 80, 96, 128])
def test_head_shapes(heads: int, kv_heads: int, dim: int, make_host: Make) -> None:
    check(make_host, Case(LENGTHS["everything"], 4, heads, kv_heads, dim))


@pytest.mark.pairs
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (8, 1), (6, 2), (30, 2)])
@pytest.mark.parametrize("dim", [20, 64, 128])
def test_paged_head_shapes(heads: int, kv_heads: int, dim: int, make_paged: Make) -> None:
    check(make_paged, Case(LENGTHS["chunks and decodes"], 4, heads, kv_heads, dim))


def test_scale_is_that_of_the_call(make: Make) -> None:
    check(make, Case(LENGTHS["everything"], 2, 4, 2, 16), scale=0.7)


@pytest.mark.parametrize("name", ["everything", "long chunk", "long chunks"])
def test_bfloat16_accumulates_in_float32(name: str, make: Make) -> None:
    check(make, Case(LENGTHS[name], 2, 4, 2, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("seed", range(25))
def test_random_batches(seed: int, make: Make) -> None:
    check(make, random_case(seed), layer=0)


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 500, 20))
def test_many_random_batches(first: int, make: Make) -> None:
    for seed in range(first, first + 20):
        check(make, random_case(seed), layer=0)


def random_case(seed: int) -> Case:
    generator = np.random.default_rng(seed)
    lengths = [
        (int(generator.choice([0, generator.integers(0, 90)])), int(generator.choice([1, 1, n])))
        for n in generator.integers(1, 80, size=generator.integers(1, 12))
    ]
    return Case(lengths, int(generator.choice([1, 2, 3, 16, 64])), 4, 2, 16, seed)


@pytest.mark.pairs
@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", SHARED)
def test_shared_pages(name: str, dtype: torch.dtype, make: Make) -> None:
    lengths, groups = SHARED[name]
    case = SharedCase(lengths, 2, groups, heads=8, kv_heads=2, dim=32, dtype=dtype)
    nodes = find_shared(case.batch.host, 2, lambda *_: True)
    assert {int(row) for node in nodes for row in node.rows} == {
        r for rows, _ in groups for r in rows
    }
    together = check(make, case)
    alone = run(make(case.kv.clone(), 8, shares=False), case)
    tolerance = 2e-6 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(together, alone, atol=tolerance, rtol=10 * tolerance)


@pytest.mark.pairs
@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(6))
def test_random_trees(seed: int, page_size: int, make: Make) -> None:
    """Rows that fork off each other at random depths, several levels deep."""
    generator = np.random.default_rng(seed)
    lengths, groups = [(150, 1)], []
    for row in range(1, int(generator.integers(3, 9))):
        parent = int(generator.integers(0, row))
        shared = int(generator.integers(0, lengths[parent][0] // page_size + 1))
        start = shared * page_size + int(generator.integers(0, 40))
        lengths.append((start, int(generator.choice([1, 1, 7, 70]))))
        groups.append(((parent, row), shared))
    check(make, SharedCase(lengths, page_size, groups, heads=6, kv_heads=2, dim=24, seed=seed))


@pytest.mark.pairs
@pytest.mark.parametrize("has_company", [False, True])
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("name", RUNS)
def test_a_decode_in_runs_of_pages(
    name: str, page_size: int, dtype: torch.dtype, has_company: bool, make: Make
) -> None:
    check(make, case_of_runs(name, page_size, dtype, has_company=has_company))


def case_of_runs(name: str, page_size: int, dtype: torch.dtype, *, has_company: bool) -> Case:
    """A decode over the pages RUNS[name], with or without rows beside it."""
    pages = RUNS[name]
    lengths = [(len(pages) * page_size - 1, 1), *([(29, 1), (0, 4)] if has_company else [])]
    case = Case(lengths, page_size, 4, 2, 16, dtype=dtype)
    case.kv = torch.randn(2, 2, 160, page_size, 2, 16).to(dtype)
    first = ScheduledRequest(
        "r", np.ones(1, np.int32), lengths[0][0], np.array(pages, np.int32), None
    )
    others = [row._replace(page_ids=row.page_ids + 60) for row in case.rows[1:]]
    case.rows = (first, *others)
    case.batch = build_forward_batch(case.rows, page_size, CPU)
    return case


def test_contiguous_pages(make: Make) -> None:
    case = Case([(40, 1)], 4, 4, 2, 16)
    row = ScheduledRequest("r", np.ones(1, np.int32), 40, np.arange(2, 13, dtype=np.int32), None)
    case.rows, case.batch = (row,), build_forward_batch((row,), 4, CPU)
    check(make, case)


@pytest.mark.pairs
@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", [*LENGTHS, *SHARED])
def test_pages_of_others_are_not_read(name: str, dtype: torch.dtype, make: Make) -> None:
    if name in SHARED:
        lengths, groups = SHARED[name]
        case = SharedCase(lengths, 2, groups, heads=4, kv_heads=2, dim=16, dtype=dtype)
    else:
        case = Case(LENGTHS[name], 2, 4, 2, 16, dtype=dtype)
    case.kv = torch.cat((case.kv, torch.zeros_like(case.kv[:, :, :4])), 2)
    own = torch.zeros(case.kv.shape[2], dtype=torch.bool)
    own[np.concatenate([row.page_ids for row in case.rows])] = True
    assert not own.all()
    clean = check(make, case)
    case.kv[:, :, ~own] = torch.nan
    case.kv[0] = torch.nan  # and the other layer
    assert torch.equal(run(make(case.kv, 4), case), clean)


@pytest.mark.parametrize("size", [1e-4, 30.0, 1e3])
@pytest.mark.parametrize("sign", [-1, 0, 1])
def test_scores_of_any_size(sign: int, size: float, make: Make) -> None:
    """Scores that are all far below zero, far above it, or on both sides: nothing overflows."""
    case = Case(LENGTHS["everything"], 2, 4, 2, 16, seed=3)
    common = torch.zeros(16)
    common[0] = 1.0
    case.q = (case.q * 0.3 + common * sign) * size
    case.k, case.kv = case.k * 0.3 + common, case.kv * 0.3 + common
    out = run(make(case.kv.clone(), 4), case)
    assert bool(out.isfinite().all())
    expected, _ = case.expected(1)
    tolerance = 1e-5 * max(1.0, size)  # of scores of that size, in float32
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0)


def test_the_highest_score_may_come_at_any_place(make: Make) -> None:
    """Far above all others, and exact: the answer is that key's value, whatever came before."""
    case = Case([(299, 1)] * 5, 1, 1, 1, 8)
    case.q = torch.zeros_like(case.q)
    case.q[:, :, 0] = 2.0**10
    case.kv[:, 0] = 0.0
    case.kv[:, 0, :, :, :, 0] = -(2.0**10)
    case.k[:] = case.kv[0, 0, 0, 0]
    winners = [0, 127, 128, 256, 298]
    values = []
    for row, place in zip(case.rows, winners, strict=True):
        case.kv[1, 0, row.page_ids[place], 0, 0, 0] = 2.0**10
        values.append(case.kv[1, 1, row.page_ids[place], 0])
    out = run(make(case.kv.clone(), 1), case)
    torch.testing.assert_close(out, torch.stack(values), atol=1e-6, rtol=1e-6)


def test_layers_and_steps_follow_each_other(make: Make) -> None:
    """One backend, several plans, layers in any order: nothing of one is left in another."""
    cases = [Case(LENGTHS[name], 2, 4, 2, 16, seed) for seed, name in enumerate(LENGTHS)]
    most = max(case.kv.shape[2] for case in cases)
    pool = torch.zeros(2, 2, most, 2, 2, 16)
    backend = make(pool, 4)
    for case, layer in itertools.product([*cases, *cases[::-1]], (1, 0)):
        pool.fill_(torch.nan)
        pool[:, :, : case.kv.shape[2]] = case.kv
        out = run(backend, case, layer)
        torch.testing.assert_close(out.double(), case.expected(layer)[0], atol=2e-6, rtol=2e-5)


def test_a_query_with_gaps_between_its_heads(make: Make) -> None:
    """q, k and v may be parts of one wider tensor, as projections that are fused leave them."""
    case = Case(LENGTHS["everything"], 2, 4, 2, 16)
    fused = torch.cat((case.q, case.k, case.v), 1)
    case.q, case.k, case.v = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    assert not case.q.is_contiguous()
    check(make, case)


def test_refuses_what_it_cannot_do(make: Make) -> None:
    backend = make(torch.zeros(1, 2, 1, 1, 2, 8), 2)  # or skip
    with pytest.raises(ModelNotSupported, match="evenly"):
        make(torch.zeros(1, 2, 1, 1, 2, 8), 3)
    if backend.name != "flashinfer":  # which refuses more, see test_flashinfer_calls.py
        with pytest.raises(ModelNotSupported, match="float64"):
            type(backend)(torch.zeros(1, 2, 1, 1, 2, 8, dtype=torch.float64), 2)


@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize("name", ["everything", "decodes", "three levels"])
def test_attend_reads_what_others_stored(name: str, make: Make) -> None:
    """`run` is storing and attending: a model may do the first itself."""
    if name in SHARED:
        lengths, groups = SHARED[name]
        case: Case = SharedCase(lengths, 2, groups, heads=4, kv_heads=2, dim=16)
    else:
        case = Case(LENGTHS[name], 2, 4, 2, 16)
    whole = make(case.kv.clone(), 4)
    expected = run(whole, case)
    backend = make(case.kv, 4)
    k_slots, v_slots = kv_view(backend.kv, 1)
    k_slots[case.batch.slot_mapping], v_slots[case.batch.slot_mapping] = case.k, case.v
    backend.plan(case.batch)
    assert torch.equal(backend.attend(case.q, 1), expected)
    assert torch.equal(backend.kv, whole.kv)
    torch.testing.assert_close(
        backend.attend(case.q, 1, 0.5).double(), case.expected(1, 0.5)[0], atol=2e-6, rtol=2e-5
    )
