"""The torch backend against attention written out row by row, on random ragged batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from radixserve.attention import segments as cutting
from radixserve.attention import torch as torch_backend
from radixserve.attention.base import AttentionBackend
from radixserve.attention.segments import cut_segments, pack_segments
from radixserve.attention.shared_pages import find_shared
from radixserve.attention.torch import TorchBackend
from radixserve.errors import ModelNotSupported
from radixserve.runner.forward_batch import build_forward_batch
from radixserve.schedule import Row

CPU = torch.device("cpu")


class Case:
    """Rows with random prefixes in a filled pool, and the right answer."""

    def __init__(self, lengths, page_size, heads, kv_heads, dim, seed=0, dtype=torch.float32):
        self.generator = np.random.default_rng(seed)
        self.lengths, self.page_size = lengths, page_size
        pages = [-(-(start + new) // page_size) for start, new in lengths]
        ids = self.generator.permutation(sum(pages) + 3).astype(np.int32)
        bounds = np.cumsum([0, *pages])
        self.rows = tuple(
            Row("r", np.ones(new, np.int32), start, ids[bounds[i] : bounds[i + 1]], None)
            for i, (start, new) in enumerate(lengths)
        )
        torch.manual_seed(seed)
        self.kv = torch.randn(2, 2, len(ids), page_size, kv_heads, dim).to(dtype)
        total = sum(new for _, new in lengths)
        self.q = torch.randn(total, heads, dim).to(dtype)
        self.k, self.v = torch.randn(2, total, kv_heads, dim).to(dtype)
        self.batch = build_forward_batch(self.rows, page_size, CPU)

    def expected(self, layer, scale=None):
        """Row by row in float64, and the pool as it must be afterwards."""
        kv, outs, first = self.kv.clone(), [], 0
        scale = scale or 1 / math.sqrt(self.q.shape[-1])
        for row, (start, new) in zip(self.rows, self.lengths, strict=True):
            slots = np.concatenate(
                [np.arange(p * self.page_size, (p + 1) * self.page_size) for p in row.page_ids]
            )[: start + new]
            k_slots, v_slots = (kv[layer, i].flatten(0, 1) for i in (0, 1))
            k_slots[slots[start:]] = self.k[first : first + new]
            v_slots[slots[start:]] = self.v[first : first + new]
            group = self.q.shape[1] // self.k.shape[1]
            k, v = (
                x[slots].double().repeat_interleave(group, 1).transpose(0, 1)
                for x in (k_slots, v_slots)
            )
            q = self.q[first : first + new].double().transpose(0, 1)
            scores = q @ k.transpose(1, 2) * scale
            hidden = torch.arange(start + new) > torch.arange(start, start + new)[:, None]
            outs.append((scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1))
            first += new
        return torch.cat(outs), kv


class SharedCase(Case):
    """Rows whose leading pages are the same ones: `groups` says which rows share how many."""

    def __init__(self, lengths, page_size, groups, **shape):
        super().__init__(lengths, page_size, **shape)
        for rows, count in groups:
            for row in rows[1:]:
                self.rows[row].page_ids[:count] = self.rows[rows[0]].page_ids[:count]
        self.batch = build_forward_batch(self.rows, page_size, CPU)


SHARED = {
    "decodes": ([(64, 1), (70, 1), (99, 1)], [((0, 1, 2), 32)]),
    "decodes right behind": ([(64, 1), (64, 1), (64, 1)], [((0, 1, 2), 32)]),
    "chunks": ([(64, 5), (64, 9), (70, 3), (64, 40)], [((0, 1, 2, 3), 32)]),
    "a long chunk among them": ([(64, 150), (66, 1), (64, 2)], [((0, 1, 2), 32)]),
    "two groups and strangers": (
        [(64, 1), (0, 20), (80, 7), (30, 1), (64, 3), (90, 1), (0, 1)],
        [((0, 4), 32), ((2, 5), 40)],
    ),
    "different depths": ([(64, 1), (80, 1), (80, 1)], [((0, 1, 2), 20), ((1, 2), 40)]),
}


def read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes are never gathered, however many runs their pages form."""
    monkeypatch.setattr(torch_backend, "RUN_BYTES", 0)
    monkeypatch.setattr(torch_backend, "LONG_BYTES", 0)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHARED)
def test_shared_pages(
    name: str, dtype: torch.dtype, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_backend, "SHARE_BYTES", 1)
    if in_place:
        read_in_place(monkeypatch)
    lengths, groups = SHARED[name]
    case = SharedCase(lengths, 2, groups, heads=8, kv_heads=2, dim=32, dtype=dtype)
    found = find_shared(case.batch.host, 2, 1)
    assert sorted(row for run in found for row in run.rows) == sorted(
        {row for rows, _ in groups for row in rows}
    )
    out, kv = run(case)
    expected, expected_kv = case.expected(1)
    tolerance = 2e-6 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=10 * tolerance)
    assert torch.equal(kv, expected_kv)
    monkeypatch.setattr(torch_backend, "SHARE_BYTES", 1 << 30)
    torch.testing.assert_close(run(case)[0], out, atol=tolerance, rtol=10 * tolerance)


def test_pages_with_new_tokens_are_never_shared() -> None:
    case = SharedCase([(63, 1), (63, 2)], 2, [((0, 1), 31)], heads=4, kv_heads=2, dim=8)
    (found,) = find_shared(case.batch.host, 2, 1)
    assert found.num_pages == 31  # the page that holds position 63 is each row's own


def test_sharing_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "SHARE_BYTES", 1)
    lengths, groups = SHARED["decodes"]
    case = SharedCase(lengths, 2, groups, heads=4, kv_heads=2, dim=8)
    backend = TorchBackend(case.kv.clone(), 4, shares=False)
    backend.plan(case.batch)
    out = backend.run(case.q, case.k, case.v, 1)
    torch.testing.assert_close(out.double(), case.expected(1)[0], atol=2e-6, rtol=1e-5)


def run(
    case: Case, layer: int = 1, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    kv = case.kv.clone()
    backend: AttentionBackend = TorchBackend(kv, case.q.shape[1])
    backend.plan(case.batch)
    return backend.run(case.q, case.k, case.v, layer, scale), kv


LENGTHS = {
    "one decode": [(9, 1)],
    "first token alone": [(0, 1)],
    "decodes": [(5, 1), (40, 1), (0, 1), (17, 1)],
    "equal decodes": [(7, 1)] * 4,
    "one prefill": [(0, 33)],
    "prefills": [(0, 33), (0, 2), (0, 31), (0, 64)],
    "chunks": [(3, 7), (30, 2), (16, 16), (1, 15)],
    "long chunk": [(5, 300)],
    "long chunks": [(5, 300), (300, 290), (1, 257)],
    "everything": [(0, 20), (5, 1), (9, 30), (100, 1), (0, 1), (0, 19), (3, 2), (64, 17), (31, 1)],
}


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("name", LENGTHS)
def test_matches_row_by_row(name: str, page_size: int) -> None:
    case = Case(LENGTHS[name], page_size, heads=8, kv_heads=2, dim=32, seed=page_size)
    out, kv = run(case)
    expected, expected_kv = case.expected(1)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    assert torch.equal(kv, expected_kv)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (8, 1), (6, 2)])
@pytest.mark.parametrize("dim", [8, 64, 128])
def test_head_shapes(heads: int, kv_heads: int, dim: int) -> None:
    case = Case(LENGTHS["everything"], 4, heads, kv_heads, dim)
    out, _ = run(case)
    torch.testing.assert_close(out.double(), case.expected(1)[0], atol=2e-6, rtol=1e-5)


def test_scale_is_that_of_the_call() -> None:
    case = Case(LENGTHS["everything"], 2, 4, 2, 16)
    out, _ = run(case, scale=0.7)
    torch.testing.assert_close(out.double(), case.expected(1, 0.7)[0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["everything", "long chunk", "long chunks"])
def test_bfloat16_accumulates_in_float32(name: str) -> None:
    case = Case(LENGTHS[name], 2, 4, 2, 32, dtype=torch.bfloat16)
    out, _ = run(case)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), case.expected(1)[0], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_random_batches(seed: int, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_place:
        read_in_place(monkeypatch)
    generator = np.random.default_rng(seed)
    lengths = [
        (int(generator.choice([0, generator.integers(0, 90)])), int(generator.choice([1, 1, n])))
        for n in generator.integers(1, 80, size=generator.integers(1, 12))
    ]
    case = Case(lengths, int(generator.choice([1, 2, 3, 16, 64])), 4, 2, 16, seed)
    out, kv = run(case, layer=0)
    expected, expected_kv = case.expected(0)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    assert torch.equal(kv, expected_kv)


def test_many_small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "GATHER_BYTES", 1)
    monkeypatch.setattr(cutting, "MASK_ELEMENTS", 1)
    case = Case(LENGTHS["everything"], 2, 4, 2, 16)
    torch.testing.assert_close(run(case)[0].double(), case.expected(1)[0], atol=2e-6, rtol=1e-5)


def test_contiguous_pages_are_read_in_place() -> None:
    case = Case([(40, 1)], 4, 4, 2, 16)
    row = Row("r", np.ones(1, np.int32), 40, np.arange(2, 13, dtype=np.int32), None)
    case.rows, case.batch = (row,), build_forward_batch((row,), 4, CPU)
    torch.testing.assert_close(run(case)[0].double(), case.expected(1)[0], atol=2e-6, rtol=1e-5)


RUNS = {  # pages of a sequence
    "one": list(range(5, 27)),
    "two": [*range(30, 43), *range(3, 12)],
    "many": [0, 9, 8, 7, *range(20, 30), 2, 3, 4, 40, 42, 44, 50, 51],
}


@pytest.mark.parametrize("has_company", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("name", RUNS)
def test_a_decode_in_runs_of_pages(
    name: str,
    page_size: int,
    dtype: torch.dtype,
    has_company: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = RUNS[name]
    lengths = [(len(pages) * page_size - 1, 1), *([(29, 1), (0, 4)] if has_company else [])]
    case = Case(lengths, page_size, 4, 2, 16, dtype=dtype)
    case.kv = torch.randn(2, 2, 160, page_size, 2, 16).to(dtype)
    first = Row("r", np.ones(1, np.int32), lengths[0][0], np.array(pages, np.int32), None)
    others = [row._replace(page_ids=row.page_ids + 60) for row in case.rows[1:]]
    case.rows = (first, *others)
    case.batch = build_forward_batch(case.rows, page_size, CPU)
    gathered, _ = run(case)
    read_in_place(monkeypatch)
    out, kv = run(case)
    expected, expected_kv = case.expected(1)
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(gathered.double(), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(kv, expected_kv)


def test_long_decodes_are_read_in_place() -> None:
    case = Case([(600, 1), (3, 1), (700, 1)], 1, 4, 2, 64)
    for at, first in ((0, 0), (2, 650)):
        case.rows[at].page_ids[:] = np.arange(first, first + len(case.rows[at].page_ids))
    case.rows[1].page_ids[:] = [1351, 1353, 1352, 1354]
    case.kv = torch.randn(2, 2, 1400, 1, 2, 64)
    case.batch = build_forward_batch(case.rows, 1, CPU)
    backend = TorchBackend(case.kv, 4)
    backend.plan(case.batch)
    assert backend._plan is not None
    assert [type(part).__name__ for part in backend._plan.parts] == ["Single", "Single", "Group"]
    torch.testing.assert_close(run(case)[0].double(), case.expected(1)[0], atol=2e-6, rtol=1e-5)


def test_pages_of_others_are_not_read() -> None:
    case = Case([(20, 5), (7, 1), (0, 9), (50, 1), (41, 3)], 2, 4, 2, 16)
    expected, _ = run(case)
    own = torch.zeros(case.kv.shape[2], dtype=torch.bool)
    own[np.concatenate([row.page_ids for row in case.rows])] = True
    case.kv[:, :, ~own] = torch.nan
    assert torch.equal(run(case)[0], expected)


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


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ModelNotSupported, match="float16"):
        TorchBackend(torch.zeros(1, 2, 1, 1, 2, 8, dtype=torch.float16), 2)
    with pytest.raises(ModelNotSupported, match="evenly"):
        TorchBackend(torch.zeros(1, 2, 1, 1, 2, 8), 3)
