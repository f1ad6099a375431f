"""K and V in another dtype than the queries: attention to what is stored, and how that rounds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from radixserve.attention import cpu as cpu_backend
from radixserve.attention.base import AttentionBackend, AttentionFeatures
from radixserve.attention.cpu import CpuBackend
from radixserve.attention.cuda.backend import PagedBackend
from radixserve.attention.cuda.flashinfer import FlashInferBackend
from radixserve.attention.cuda.triton import TritonBackend
from radixserve.attention.reference import ReferenceBackend
from radixserve.runner.input_batch import build_forward_batch
from radixserve_kernels.cpu_ops import unsupported_reason
from radixserve_kernels.stored_kv import (
    from_stored,
    multiply_hadamard,
    stored_head_dim,
    stored_width,
    to_stored,
)
from tests.attention.cases import CPU, LENGTHS, SHARED, Case, SharedCase, run
from tests.attention.fake_flashinfer import Fake
from tests.attention.test_features import LONG, SCORES, SPANS, make_features
from tests.cpu_kernels import cpu_level

__all__ = ["cpu_level"]
PAIRS = [  # dtypes of queries and of stored K and V
    (torch.float32, torch.int8),
    (torch.bfloat16, torch.int8),
    (torch.float32, torch.bfloat16),
]
FP8 = torch.float8_e4m3fn
DEVICE_PAIRS = [*PAIRS, (torch.bfloat16, FP8), (torch.float32, FP8)]
TOLERANCE = {torch.float32: (3e-6, 2e-5), torch.bfloat16: (2e-2, 2e-2)}
ROUNDED_QUERIES = (5e-4, 1e-4)  # of float32 to 13 to 16 bits, where keys are multiplied as integers
FEATURES: list[dict[str, Any]] = [
    {},
    SPANS["window"],
    SPANS["wide chunks"],
    SCORES["soft cap"],
    SCORES["everything"],
]


def check(
    make: type[CpuBackend | ReferenceBackend | PagedBackend],
    case: Case,
    stored: torch.dtype,
    features: AttentionFeatures,
    **settings: Any,
) -> None:
    """`case`: of numbers as they are before they are stored."""
    dtype = case.q.dtype
    if make is CpuBackend and (reason := unsupported_reason(dtype)):
        pytest.skip(reason)
    kv = to_stored(case.kv, stored, scales_last=make.scales_last)
    backend: AttentionBackend = make(kv, case.q.shape[1], dtype=dtype, **settings)
    out = run(backend, case, features=features)
    assert out.dtype == dtype
    before = case.kv, case.k, case.v
    case.kv, case.k, case.v = (from_stored(to_stored(x, stored), torch.float32) for x in before)
    expected, _ = case.expected(1, features=features)
    case.kv, case.k, case.v = before
    atol, rtol = TOLERANCE[dtype]
    if (dtype, stored, make) == (torch.float32, torch.int8, CpuBackend):
        atol, rtol = ROUNDED_QUERIES
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)


def check_features(dtype: torch.dtype, stored: torch.dtype) -> None:
    """Few rows and many, whole vectors and odd heads, one head to a key and eight."""
    for dim, group in ((64, 1), (64, 3), (24, 8)):
        case = Case(LONG, 4, 2 * group, 2, dim, dtype=dtype)
        for fields in FEATURES:
            check(CpuBackend, case, stored, make_features(case, fields))


@pytest.mark.parametrize(("dtype", "stored"), PAIRS)
def test_features(dtype: torch.dtype, stored: torch.dtype) -> None:
    check_features(dtype, stored)


@pytest.mark.long
@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize(("dtype", "stored"), PAIRS)
def test_features_at_each_level(dtype: torch.dtype, stored: torch.dtype) -> None:
    check_features(dtype, stored)


@pytest.mark.parametrize(("dtype", "stored"), DEVICE_PAIRS)
def test_reference(dtype: torch.dtype, stored: torch.dtype) -> None:
    for fields in FEATURES:
        case = Case(LENGTHS["everything"], 2, 6, 2, 24, dtype=dtype)
        check(ReferenceBackend, case, stored, make_features(case, fields))


@pytest.mark.parametrize(("dtype", "stored"), DEVICE_PAIRS)
def test_triton(dtype: torch.dtype, stored: torch.dtype) -> None:
    """Windows, chunks, caps and sinks; K and V come by `store`."""
    for fields in FEATURES:
        case = Case(LENGTHS["everything"], 2, 6, 2, 24, dtype=dtype)
        check(TritonBackend, case, stored, make_features(case, fields), shares=False)


@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize(("dtype", "stored"), DEVICE_PAIRS)
def test_shared_pages_on_a_device(dtype: torch.dtype, stored: torch.dtype) -> None:
    lengths, groups = SHARED["three levels"]
    case = SharedCase(lengths, 2, groups, heads=8, kv_heads=2, dim=32, dtype=dtype)
    check(TritonBackend, case, stored, AttentionFeatures(), shares=True)


@pytest.mark.usefixtures("interpreted", "always_share")
@pytest.mark.parametrize("stored", [torch.int8, FP8])
def test_triton_kernels(stored: torch.dtype) -> None:
    lengths, groups = SHARED["different depths"]
    case = SharedCase(lengths, 2, groups, heads=4, kv_heads=2, dim=16, dtype=torch.bfloat16)
    check(TritonBackend, case, stored, AttentionFeatures())
    case = Case(LENGTHS["chunks and decodes"], 2, 4, 2, 24, dtype=torch.bfloat16)
    fields = SCORES["everything"]
    check(TritonBackend, case, stored, make_features(case, fields), shares=False)


@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize("name", ["everything", "three levels"])
def test_flashinfer(name: str, fake: Fake) -> None:
    lengths, groups = SHARED[name] if name in SHARED else (LENGTHS[name], [])
    case = SharedCase(lengths, 2, groups, heads=8, kv_heads=2, dim=64, dtype=torch.bfloat16)
    check(FlashInferBackend, case, FP8, AttentionFeatures(), library=fake.library)
    plans = [call for call in fake.arguments if "kv_data_type" in call]
    assert {(plan["q_data_type"], plan["kv_data_type"]) for plan in plans} == {
        (torch.bfloat16, FP8)
    }


def test_a_graph_on_a_device() -> None:
    """Of a pool in 8 bits, rows in 16."""
    case = Case([(9, 1), (12, 1), (8, 1)], 2, 4, 2, 16)
    for stored in (torch.int8, FP8):
        pool = to_stored(case.kv, stored, scales_last=True)
        backend = TritonBackend(pool, 4, dtype=torch.float32)
        eager = run(backend, case)
        graph = backend.make_graph_backend(4, 30, 0)
        graph.plan(case.batch)
        q = torch.full((4, 4, 16), torch.nan)
        q[: len(case.q)] = case.q
        torch.testing.assert_close(graph.attend(q, 1)[: len(case.q)], eager)


@pytest.mark.pairs
@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize(("dtype", "stored"), PAIRS)
@pytest.mark.parametrize("dim", [64, 544])
def test_a_chunk_has_the_bits_of_its_parts(
    dim: int, dtype: torch.dtype, stored: torch.dtype
) -> None:
    """Heads whose integers are multiplied, and heads too large for that."""
    if reason := unsupported_reason(dtype):
        pytest.skip(reason)
    case = Case([(350, 60)], 3, 4, 2, dim, dtype=dtype)
    backend = CpuBackend(to_stored(case.kv, stored), 4, dtype=dtype)
    whole = run(backend, case)
    for first, count in ((0, 1), (34, 2), (59, 1)):
        part = Case([(350 + first, count)], 3, 4, 2, dim, dtype=dtype)
        part.rows[0].page_ids[:] = case.rows[0].page_ids[: len(part.rows[0].page_ids)]
        part.batch = build_forward_batch(part.rows, 3, CPU)
        part.q, part.k, part.v = (x[first : first + count] for x in (case.q, case.k, case.v))
        assert torch.equal(run(backend, part), whole[first : first + count])


@pytest.mark.parametrize(("dtype", "stored"), PAIRS)
@pytest.mark.parametrize("name", ["two groups and strangers", "three levels"])
def test_shared_pages(
    name: str, dtype: torch.dtype, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "MERGE_TOKENS", 0)
    lengths, groups = SHARED[name]
    case = SharedCase(lengths, 2, groups, heads=8, kv_heads=2, dim=32, dtype=dtype)
    for fields in FEATURES:
        check(CpuBackend, case, stored, make_features(case, fields), shares=True)


def test_values_of_scales_far_apart() -> None:
    """A key's scale multiplies its score, a value's its weight."""
    case = Case([(700, 1), (30, 40)], 3, 6, 2, 64)
    case.kv *= torch.logspace(-3, 0, case.kv.shape[2])[torch.randperm(case.kv.shape[2])][
        :, None, None, None
    ]
    for make in (CpuBackend, ReferenceBackend):
        check(make, case, torch.int8, AttentionFeatures())


def error_of(x: Tensor) -> Tensor:
    """Of each head multiplied with the matrix, of the distance of two integers."""
    rounded = multiply_hadamard(from_stored(to_stored(x, torch.int8), torch.float32))
    wide = multiply_hadamard(x)
    return (rounded - wide).abs().amax(-1) / (wide.abs().amax(-1) / 127)


@pytest.mark.parametrize("dim", [24, 64])
def test_scales_behind_all_heads(dim: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, dim)
    rows, by_head = to_stored(x, torch.int8, scales_last=True), to_stored(x, torch.int8)
    assert rows.shape == by_head.shape
    assert torch.equal(rows.flatten(1)[:, : 3 * dim], by_head[..., :dim].flatten(1))
    read = from_stored(rows, torch.float32, scales_last=True)
    assert torch.equal(read, from_stored(by_head, torch.float32))
    assert to_stored(x[:0], torch.int8, scales_last=True).shape == (0, 3, dim + 2)


def test_fp8() -> None:
    """Nearest numbers, ties to even, the largest where a number is larger."""
    x = torch.tensor([0.3, 100.0, 449.0, -1e9, 2**-9, 2**-10, 17.0, 19.0, math.inf, math.nan])
    read = from_stored(to_stored(x, FP8), torch.float32)
    expected = [0.3125, 96.0, 448.0, -448.0, 2**-9, 0.0, 16.0, 20.0, math.nan, math.nan]
    torch.testing.assert_close(read, torch.tensor(expected), atol=0, rtol=0, equal_nan=True)


def test_what_is_stored() -> None:
    torch.manual_seed(0)
    x = torch.randn(500, 3, 64) * torch.logspace(-20, 20, 500)[:, None, None]
    assert stored_width(64, torch.int8) == 66
    assert stored_head_dim(66, torch.int8) == 64
    assert float(error_of(x).max()) < 0.51
    alone = torch.stack([to_stored(token, torch.int8) for token in x])
    assert torch.equal(alone, to_stored(x, torch.int8))
    assert torch.equal(to_stored(x, torch.bfloat16), x.bfloat16())


@pytest.mark.parametrize("dim", [24, 64, 80, 128])
def test_matrix(dim: int) -> None:
    """Orthogonal, its own inverse, and the same sums as a product with it."""
    torch.manual_seed(0)
    x = torch.randn(7, 2, dim)
    turned = multiply_hadamard(x)
    matrix = multiply_hadamard(torch.eye(dim))
    torch.testing.assert_close(turned, x @ matrix)
    torch.testing.assert_close(multiply_hadamard(turned), x)
    torch.testing.assert_close(matrix @ matrix, torch.eye(dim))


def test_outlier_is_spread_over_its_head() -> None:
    """One number of 100 beside 63 of about 1: a scale of its size alone would lose the others."""
    torch.manual_seed(0)
    x = torch.randn(200, 1, 64)
    x[..., 5] = 100
    alone = (x / (100 / 127)).round() * (100 / 127)
    error = (from_stored(to_stored(x, torch.int8), torch.float32) - x).square().mean().sqrt()
    assert error < 0.3 * (alone - x).square().mean().sqrt()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(broken: float) -> None:
    x = torch.randn(3, 2, 24)
    x[1, 0, 7] = broken
    seen = from_stored(to_stored(x, torch.int8), torch.float32).isnan()
    assert seen[1, 0].all()
    assert seen.sum() == 24
    zeros = torch.zeros(1, 2, 24)
    assert torch.equal(from_stored(to_stored(zeros, torch.int8), torch.float32), zeros)
