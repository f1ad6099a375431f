"""The CPU kernels' own borders: blocks of keys and rows, ways to multiply, threads, big numbers."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from radixserve.attention import cpu as cpu_backend
from radixserve.attention.base import PLAIN, AttentionFeatures
from radixserve.attention.cpu import CpuBackend, plan_step
from radixserve.errors import ModelNotSupported
from radixserve.runner.input_batch import build_forward_batch
from radixserve_kernels import cpu_ops
from radixserve_kernels.cpu_attention import PagedAttention
from radixserve_kernels.cpu_library import cpu_library
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.attention.cases import CPU, LENGTHS, SHARED, Case, SharedCase, run
from tests.attention.conftest import Make
from tests.attention.test_backends import BOTH, check

KEYS = [1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 384, 385]
# a block has 192
QUERIES = [1, 2, 11, 12, 13, 63, 64, 65, 95, 96, 97, 191, 192, 193, 255, 256, 257]
# a task has up to 1,024 rows: 256 queries of 4 heads


@pytest.mark.pairs
@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("group", [1, 4])
def test_block_borders(group: int, dtype: torch.dtype, make_cpu: Make) -> None:
    lengths = [(keys - 1, 1) for keys in KEYS]
    lengths += [(0, queries) for queries in QUERIES]
    lengths += [(keys - 1, queries) for keys in (191, 192, 193) for queries in (2, 64, 129)]
    check(make_cpu, Case(lengths, 16, 2 * group, 2, 24, dtype=dtype))


@pytest.mark.pairs
@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    ("group", "dim"),
    [(1, 16), (1, 160), (2, 64), (3, 128), (4, 32), (4, 48), (5, 96), (7, 64), (8, 32), (25, 32)],
)
def test_few_rows(group: int, dim: int, dtype: torch.dtype, make_cpu: Make) -> None:
    """Few rows of a job read keys and values as they lie: each number of rows, heads of one line or
    more, each number of keys left over; and rows of several queries."""
    lengths = [(keys - 1, 1) for keys in (1, 2, 3, 4, 5, 127, 128, 130, 259)]
    lengths += [(keys, queries) for keys, queries in ((0, 2), (126, 3), (127, 2), (128, 4))]
    check(make_cpu, Case(lengths, 3, 2 * group, 2, dim, dtype=dtype))


class PlacedCase(Case):
    """Rows whose pages lie in the pool as `places` says: [rows, pages] of equal size."""

    def __init__(self, lengths, page_size, places, *shape, **more):
        super().__init__(lengths, page_size, *shape, **more)
        for row, pages in zip(self.rows, places, strict=True):
            row.page_ids[:] = pages[: len(row.page_ids)]
        self.batch = build_forward_batch(self.rows, page_size, CPU)


NUM_PLACED, MOST_PLACED = 4, 300  # rows, pages of each
IN_ORDER = np.arange(NUM_PLACED * MOST_PLACED).reshape(NUM_PLACED, MOST_PLACED)
PLACES = {
    "one after the other": IN_ORDER,
    "in turns": IN_ORDER.reshape(MOST_PLACED, NUM_PLACED).T,
    "backwards": IN_ORDER[:, ::-1],
    "in turns of five": IN_ORDER.reshape(-1, NUM_PLACED, 5).transpose(1, 0, 2).reshape(4, -1),
    "one far away": np.where(IN_ORDER % MOST_PLACED == 40, IN_ORDER[::-1], IN_ORDER),
}


@pytest.mark.pairs
@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("page_size", [1, 2])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (3, 128), (8, 32), (16, 96)])
def test_pages_at_equal_distances(
    group: int, dim: int, page_size: int, place: str, make_cpu: Make
) -> None:
    """Sixteen keys at equal distances are read where they lie, others are copied first."""
    for keys in (15, 47, 143, 259):
        lengths = [(keys, 1), (keys - 1, 1), (keys - 14, 1 + 15 // group), (keys // 2, 1)]
        places = PLACES[place]
        case = PlacedCase(
            lengths, page_size, places, 2 * group, 2, dim, dtype=torch.bfloat16, num_pages=1200
        )
        check(make_cpu, case)


@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("dim", [8, 16, 20, 32, 40, 64, 80, 96, 128])
def test_bfloat16_at_each_level(dim: int, make_cpu: Make) -> None:
    check(make_cpu, Case(LENGTHS["everything"], 3, 6, 2, dim, dtype=torch.bfloat16))


@pytest.mark.usefixtures("cpu_level", "always_share")
@pytest.mark.parametrize("name", SHARED)
def test_shared_pages_at_each_level(name: str, make_cpu: Make) -> None:
    lengths, groups = SHARED[name]
    check(
        make_cpu, SharedCase(lengths, 2, groups, heads=8, kv_heads=2, dim=32, dtype=torch.bfloat16)
    )


@pytest.mark.usefixtures("cpu_level")
def test_odd_rows_at_each_level(make_cpu: Make) -> None:
    """Tiles hold 16 and 32 rows; a query here is three rows."""
    lengths = [(130, queries) for queries in (1, 5, 6, 10, 11, 21, 22, 32, 33, 64, 65)]
    check(make_cpu, Case(lengths, 1, 3, 1, 40, dtype=torch.bfloat16))


@pytest.mark.usefixtures("num_threads", "always_share")
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", ["long chunks", "everything", "three levels"])
def test_threads(name: str, dtype: torch.dtype, make_cpu: Make) -> None:
    shape = {"heads": 16, "kv_heads": 4, "dim": 64, "dtype": dtype}
    if name in SHARED:
        case: Case = SharedCase(SHARED[name][0], 2, SHARED[name][1], **shape)
    else:
        case = Case(LENGTHS[name], 2, **shape)
    out = check(make_cpu, case)
    torch.set_num_threads(1)
    assert torch.equal(run(make_cpu(case.kv.clone(), 16), case), out)


@pytest.mark.pairs
@pytest.mark.usefixtures("always_share", "cpu_level")
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(
    "features",
    [
        PLAIN,
        AttentionFeatures(sliding_window=1500, sinks=torch.randn(6)),
        AttentionFeatures(logits_soft_cap=1.5),
    ],
)
def test_threads_share_a_long_row(
    features: AttentionFeatures, dtype: torch.dtype, make_cpu: Make
) -> None:
    lengths = [(2_600, 1), (2_700, 2), (0, 20), (1_030, 1), (2_500, 1)]
    shape = {"heads": 6, "kv_heads": 2, "dim": 64, "dtype": dtype}
    case = SharedCase(lengths, 2, [((0, 1), 1_200)], **shape)
    case.kv[:, 0, ::7] *= 3.0  # weights become too large at times
    before, outs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            outs.append(run(make_cpu(case.kv.clone(), 6), case, features=features))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    expected = case.expected(1, features=features)[0]
    close = 3e-6 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(outs[0].double(), expected, atol=close, rtol=close)


@pytest.mark.pairs
@pytest.mark.usefixtures("always_share", "cpu_level")
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", ["everything", "three levels"])
def test_a_row_does_not_depend_on_others(name: str, dtype: torch.dtype, make_cpu: Make) -> None:
    """To the bit: a request's answer is the same in any company, with shared pages read once or by
    each row."""
    lengths, groups = SHARED.get(name, (LENGTHS.get(name), []))
    case = SharedCase(lengths, 2, groups, heads=6, kv_heads=2, dim=32, dtype=dtype)
    check_alone(case, make_cpu)


def check_alone(case: Case, make_cpu: Make, features: AttentionFeatures = PLAIN) -> None:
    """Each row's output has the bits that it has by itself, whether rows read pages together."""
    heads, q, k, v = case.q.shape[1], case.q, case.k, case.v
    apart, together = (
        run(make_cpu(case.kv.clone(), heads, shares=shares), case, features=features)
        for shares in (False, True)
    )
    assert apart.isfinite().all()
    assert torch.equal(apart, together)
    bounds = itertools.pairwise(case.batch.host.qo_indptr.tolist())
    for row, (first, end) in zip(case.rows, bounds, strict=True):
        case.batch = build_forward_batch((row,), case.page_size, CPU)
        case.q, case.k, case.v = q[first:end], k[first:end], v[first:end]
        alone = run(make_cpu(case.kv.clone(), heads), case, features=features)
        assert torch.equal(alone, together[first:end])


FEATURES = {
    "plain": PLAIN,
    "window": AttentionFeatures(sliding_window=150, sinks=torch.linspace(-1, 1, 12)),
    "chunk": AttentionFeatures(attention_chunk_size=300),
    "soft cap": AttentionFeatures(logits_soft_cap=1.5),
}


@pytest.mark.pairs
@pytest.mark.usefixtures("always_share", "cpu_level", "num_threads")
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", FEATURES)
def test_shared_pages_end_anywhere(name: str, dtype: torch.dtype, make_cpu: Make) -> None:
    """Within a unit, a block and a partition of keys; scores rise far above those before, so that
    the state is scaled down in the middle of blocks."""
    rng = np.random.default_rng(len(name))
    for page_size, group, dim in ((1, 1, 64), (3, 3, 64), (16, 6, 32), (5, 2, 24)):
        shared = sorted(int(n) for n in rng.integers(40, 1_300, 3))
        groups = [(range(9), shared[0]), (range(2, 7), shared[1]), (range(4, 6), shared[2])]
        groups = [(rows, tokens // page_size) for rows, tokens in groups]
        lengths = [
            (shared[2] + int(rng.integers(0, 60)), int(new))
            for new in rng.choice([1, 1, 1, 2, 40], 9)
        ]
        case = SharedCase(
            lengths, page_size, groups, heads=2 * group, kv_heads=2, dim=dim, dtype=dtype
        )
        case.kv[:, 0] *= torch.rand(case.kv.shape[2])[:, None, None, None].to(dtype) * 8
        features = FEATURES[name]
        if features.sinks is not None:
            features = replace(features, sinks=features.sinks[: 2 * group].contiguous())
        check_alone(case, make_cpu, features)


@pytest.mark.pairs
@pytest.mark.parametrize("features", [PLAIN, AttentionFeatures(sliding_window=150)])
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (3, 64), (4, 96), (6, 32), (8, 128)])
@pytest.mark.usefixtures("cpu_level")
def test_a_chunk_has_the_bits_of_its_parts(
    group: int, dim: int, dtype: torch.dtype, features: AttentionFeatures, make_cpu: Make
) -> None:
    """Keys are packed for many rows and read as they lie for few."""
    shape = {"heads": 2 * group, "kv_heads": 2, "dim": dim, "dtype": dtype}
    case = Case([(350, 60)], 3, **shape)
    backend = make_cpu(case.kv.clone(), 2 * group)
    whole = run(backend, case, features=features)
    assert whole.isfinite().all()
    for first, count in ((0, 1), (33, 1), (34, 2), (36, 3), (57, 2), (59, 1)):
        part = Case([(350 + first, count)], 3, **shape)
        part.rows[0].page_ids[:] = case.rows[0].page_ids[: len(part.rows[0].page_ids)]
        part.batch = build_forward_batch(part.rows, 3, CPU)
        part.q, part.k, part.v = (x[first : first + count] for x in (case.q, case.k, case.v))
        assert torch.equal(run(backend, part, features=features), whole[first : first + count])


@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize("dtype", BOTH)
def test_cells_without_a_token_are_not_read(dtype: torch.dtype, make_cpu: Make) -> None:
    """Not even those behind a row's last token in its last page, nor ids that are no page's."""
    case = Case(LENGTHS["everything"], 16, 4, 2, 16, dtype=dtype)
    clean = check(make_cpu, case)
    is_used = torch.zeros(case.kv.shape[2] * 16, dtype=torch.bool)
    for row in case.rows:
        slots = (row.page_ids[:, None] * 16 + np.arange(16)).ravel()[: row.end]
        is_used[slots] = True
    case.kv.view(2, 2, -1, 2, 16)[:, :, ~is_used] = torch.nan
    assert torch.equal(run(make_cpu(case.kv, 4), case), clean)


@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize("size", [1.0, 1e4, 1e8])
@pytest.mark.parametrize("sign", [-1, 1])
def test_huge_scores_in_shared_pages(sign: int, size: float, make_cpu: Make) -> None:
    """A level may be worth nothing beside another one, whichever comes first."""
    lengths, groups = SHARED["three levels"]
    case = SharedCase(lengths, 2, groups, heads=2, kv_heads=1, dim=8)
    scores = torch.tensor([-3.0, -1.0, 0.0, 2.0]) * size * sign
    for keys in (case.k, case.kv[:, 0]):
        keys[:] = 0.0
        keys[..., 0] = scores[torch.randint(4, keys.shape[:-1])]
    case.q = torch.zeros_like(case.q)
    case.q[..., 0] = 1.0
    out = run(make_cpu(case.kv.clone(), 2), case, scale=1.0)
    torch.testing.assert_close(out.double(), case.expected(1, 1.0)[0], atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("dtype", BOTH)
def test_a_long_row(dtype: torch.dtype, make_cpu: Make) -> None:
    """Many blocks: what was mixed before is scaled down again and again as scores rise."""
    case = Case([(2_900, 3), (2_000, 200)], 16, 4, 2, 16, dtype=dtype)
    case.kv[:, 0] *= torch.linspace(0.1, 4, case.kv.shape[2])[:, None, None, None].to(dtype)
    check(make_cpu, case)


SCORES = {  # of the keys of a row of n, by their places
    "rising slowly": lambda n: 0.02 * torch.arange(n),
    "rising": lambda n: 0.3 * torch.arange(n),
    "falling": lambda n: -0.3 * torch.arange(n),
    "one far above": lambda n: 70.0 * (torch.arange(n) == n // 2),
    "one without measure": lambda n: 1e4 * (torch.arange(n) == n // 2),
    "far above from a block on": lambda n: 100.0 * (torch.arange(n) >= 384),
    "far below in the first block": lambda n: -1e4 * (torch.arange(n) < 192),
    "far apart": lambda n: 2e4 * (torch.arange(n) % 2 - 0.5),
}


@pytest.mark.pairs
@pytest.mark.usefixtures("cpu_level")
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("name", SCORES)
def test_scores_far_from_those_before(name: str, dtype: torch.dtype, make_cpu: Make) -> None:
    """Weights are relative to the best score of a row's first block while that serves."""
    case = Case([(700, 1), (700, 3), (640, 70), (0, 450)], 16, 4, 2, 32, dtype=dtype)
    at = 0
    for row in case.rows:
        scores = SCORES[name](row.end).to(dtype)
        cells = torch.as_tensor(row.page_ids).long().repeat_interleave(16)[: row.start]
        case.kv[:, 0, cells, torch.arange(row.start) % 16] = 0.0
        case.kv[:, 0, cells, torch.arange(row.start) % 16, :, 0] = scores[: row.start, None]
        num_new = len(row.token_ids)
        case.k[at : at + num_new] = 0.0
        case.k[at : at + num_new, :, 0] = scores[row.start :, None]
        at += num_new
    case.q[..., 0] = 1.0
    out = run(make_cpu(case.kv.clone(), 4), case, scale=1.0)
    close = 3e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), case.expected(1, 1.0)[0], atol=close, rtol=close)


def test_memory_is_given_back() -> None:
    """Plans and attenders by the thousand, and a plan's jobs after the plan itself is gone."""
    if reason := unsupported_reason(torch.float32):
        pytest.skip(reason)
    case = SharedCase(SHARED["decodes"][0], 2, SHARED["decodes"][1], heads=4, kv_heads=2, dim=8)
    for _ in range(2_000):
        jobs = plan_step(case.batch.host, 2, (4, 2, 8), shares=True).jobs()
        PagedAttention(torch.float32)
    assert jobs.num_tokens == 3
    assert jobs.level_indptr.tolist() == [0, 1, 4]


def test_what_pays(make_cpu: Make) -> None:
    """All but one reading of the pages must cost more than one more level does for each row."""
    least, grid = cpu_backend.MERGE_TOKENS, cpu_library().radixserve_job_grid()
    whole = 2 * least // grid * grid  # that two rows do not read together
    many = -(-least // grid) * grid
    for num_rows, num_tokens, is_shared in (
        *((2, whole, False), (2, whole + grid - 1, False), (2, whole + grid, True)),
        *((50, many - 1, False), (50, many, True)),
    ):
        lengths = [(num_tokens, 1)] * num_rows
        case = SharedCase(lengths, 1, [(range(num_rows), num_tokens)], heads=1, kv_heads=1, dim=8)
        backend = make_cpu(case.kv, 1)
        backend.plan(case.batch)
        assert isinstance(backend, CpuBackend)
        assert len(backend.planned.jobs().num_keys) == num_rows + is_shared


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_refuses_other_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(ModelNotSupported, match=str(dtype)):
        CpuBackend(torch.zeros(1, 2, 1, 1, 2, 8, dtype=dtype), 2)


def test_refuses_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "unsupported_reason", lambda _: "there is no C++ compiler")
    with pytest.raises(ModelNotSupported, match=r"cannot be used: there is no C\+\+ compiler"):
        CpuBackend(torch.zeros(1, 2, 1, 1, 2, 8), 2)


def test_threads_may_change_between_steps(make_cpu: Make) -> None:
    case = Case(LENGTHS["long chunks"], 2, heads=8, kv_heads=2, dim=64)
    backend, before = make_cpu(case.kv, 8), torch.get_num_threads()
    expected = case.expected(1)[0]
    try:
        for count in (1, 2, 1, 2, 3, 1):
            torch.set_num_threads(count)
            torch.testing.assert_close(run(backend, case).double(), expected, atol=2e-6, rtol=2e-5)
    finally:
        torch.set_num_threads(before)
