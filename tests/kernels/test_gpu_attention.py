"""Paged attention kernels and their references against attention by its definition in float64."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from radixserve_kernels import gpu_ops
from radixserve_kernels.attention_features import PLAIN, AttentionFeatures
from radixserve_kernels.gpu import records
from radixserve_kernels.stored_kv import from_stored, to_stored
from tests.kernels.conftest import on_each_path
from tests.kernels.paged_case import TOLERANCE, PagedCase, assert_near, attention, make_case

both = pytest.mark.usefixtures("path")  # references, interpreted kernels, compiled ones
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FP8 = torch.float8_e4m3fn
STORED = [(F32, torch.int8), (BF16, torch.int8), (F16, torch.int8), (BF16, FP8), (F32, BF16)]

# dtype, query heads, key heads, head dim, page size, keys of each row, num_splits, fixed_splits
DECODES = [
    (F32, 4, 2, 16, 1, [1, 0, 33], 1, None),
    (F32, 2, 2, 8, 4, [70], 1, None),
    (BF16, 6, 2, 24, 3, [5, 128, 150], 2, None),
    (BF16, 1, 1, 64, 2, [7, 0, 64], 1, None),
    (F16, 3, 1, 32, 16, [300, 0, 128], 4, None),
    (F16, 20, 1, 16, 1, [130], 3, 2),
    (F16, 1, 1, 8, 64, [2_200], 18, None),
]

# as above, and the new tokens of each row, and what of them is said to be the most in a row
EXTENDS = [
    (F32, 2, 1, 16, 1, [9, 0, 30], [3, 0, 30], 30, 1),
    (F32, 1, 1, 24, 4, [17], [1], 1, 1),
    (BF16, 6, 2, 24, 3, [70, 5, 1, 20], [2, 5, 1, 0], 5, 1),
    (BF16, 4, 4, 16, 16, [0, 100], [0, 70], 70, 1),
    (BF16, 3, 1, 16, 2, [150, 40], [44, 40], 44, 1),
    (F16, 4, 2, 64, 2, [140, 200], [3, 1], 3, 2),
    (F16, 2, 1, 16, 2, [140], [20], 20, 2),  # the first query sees no key of the second part
]


FEATURES = [
    {"sliding_window": 1},
    {"sliding_window": 37},
    {"attention_chunk_size": 33},
    {"logits_soft_cap": 1.5},
    {"sliding_window": 150, "attention_chunk_size": 64, "logits_soft_cap": 0.5},
]


def decode(
    case: PagedCase,
    q: Tensor,
    num_splits: int,
    fixed_splits: int | None,
    features: AttentionFeatures = PLAIN,
    *,
    is_exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Through poisoned outputs and a poisoned workspace."""
    num_rows, num_heads, head_dim = q.shape
    size = gpu_ops.workspace_size(num_rows, num_heads, head_dim, num_splits)
    out, lse = torch.full_like(q, torch.nan), torch.full((num_rows, num_heads), torch.nan)
    found = gpu_ops.decode(
        q,
        *case.keys,
        num_splits=num_splits,
        workspace=torch.full((size,), torch.nan),
        out=out,
        lse=lse,
        fixed_splits=fixed_splits,
        features=features,
        is_exact=is_exact,
    )
    assert found is out
    return out, lse


def extend(
    case: PagedCase,
    q: Tensor,
    qo_indptr: list[int],
    max_q: int | None,
    num_splits: int,
    causal: bool,
    features: AttentionFeatures = PLAIN,
    *,
    is_exact: bool = False,
) -> tuple[Tensor, Tensor]:
    out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
    keys = case.keys
    places = torch.tensor(qo_indptr, dtype=torch.int32)
    gpu_ops.extend(
        *(q, *keys[:2], places, *keys[2:], None, causal, max_q, num_splits, None, out, lse),
        features,
        is_exact=is_exact,
    )
    return out, lse


def queries(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """The q of a qkv: strided tokens."""
    return torch.randn(num_tokens, num_heads + 2, head_dim).to(dtype)[:, :num_heads]


@pytest.mark.parametrize("shape", DECODES, ids=str)
@both
def test_decode(shape: tuple) -> None:
    dtype, num_heads, num_kv_heads, head_dim, page_size, lens, num_splits, fixed_splits = shape
    torch.manual_seed(0)
    case = make_case(lens, num_kv_heads, head_dim, page_size, dtype)
    q = queries(len(lens), num_heads, head_dim, dtype)
    expected = attention(case, q, range(len(lens) + 1), head_dim**-0.5, causal=False)
    assert_near(*decode(case, q, num_splits, fixed_splits), expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", EXTENDS, ids=str)
@both
def test_extend(shape: tuple, causal: bool) -> None:
    dtype, num_heads, num_kv_heads, head_dim, page_size, lens, new, max_q, num_splits = shape
    torch.manual_seed(0)
    case = make_case(lens, num_kv_heads, head_dim, page_size, dtype)
    qo_indptr = [0, *itertools.accumulate(new)]
    q = queries(qo_indptr[-1], num_heads, head_dim, dtype)
    expected = attention(case, q, qo_indptr, head_dim**-0.5, causal=causal)
    assert_near(*extend(case, q, qo_indptr, max_q, num_splits, causal), expected)


def stored_in(case: PagedCase, stored: torch.dtype) -> tuple[PagedCase, PagedCase]:
    """The same in another dtype, and what that stores as float32."""
    slots = [to_stored(x, stored, scales_last=True) for x in (case.k_slots, case.v_slots)]
    read = [from_stored(x, F32, scales_last=True) for x in slots]
    return (
        replace(case, k_slots=slots[0], v_slots=slots[1]),
        replace(case, k_slots=read[0], v_slots=read[1]),
    )


@on_each_path(
    ("dtype", "stored", "fields"),
    [(*kind, fields) for kind in STORED for fields in ({}, FEATURES[1], FEATURES[4])],
    lambda dtype, stored, fields: (
        not fields
        or (dtype, stored, fields) in ((*STORED[0], FEATURES[4]), (*STORED[3], FEATURES[1]))
    ),
)
@both
def test_stored_in_another_dtype(
    dtype: torch.dtype, stored: torch.dtype, fields: dict[str, Any]
) -> None:
    """What is stored is attended to, by few queries and many, whole keys and splits of them, heads
    of a power of two and others."""
    torch.manual_seed(0)
    features = AttentionFeatures(**fields)
    lse_tolerance = (
        TOLERANCE[dtype] if stored == torch.int8 else 1e-5
    )  # transformed queries are rounded
    for head_dim, num_splits in ((16, 1), (24, 3)):
        plain = make_case([200, 0, 20, 129], 2, head_dim, 4, F32)
        case, read = stored_in(plain, stored)
        q = queries(4, 4, head_dim, dtype)
        expected = attention(read, q, range(5), head_dim**-0.5, causal=True, features=features)
        assert_near(*decode(case, q, num_splits, None, features), expected, lse_tolerance)
        new = [0, 30, 30, 45, 46]
        q = queries(46, 4, head_dim, dtype)
        expected = attention(read, q, new, head_dim**-0.5, causal=True, features=features)
        result = extend(case, q, new, 30, num_splits, True, features)
        assert_near(*result, expected, lse_tolerance)


@on_each_path(
    ("dtype", "stored", "fields"),
    [
        (dtype, stored, fields)
        for dtype, stored in ((F32, None), (BF16, None), (F32, torch.int8), (BF16, FP8))
        for fields in ({}, *FEATURES[1:])
    ],
    lambda dtype, stored, fields: (
        not fields or (dtype, stored) == (F32, None) or (stored, fields) == (FP8, FEATURES[4])
    ),
)
@both
def test_exact_bits(
    dtype: torch.dtype,
    stored: torch.dtype | None,
    fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A query has one result: in a prompt of any length, alone or not, as a decode, with splits of
    64 keys in one program or in three."""
    monkeypatch.setattr(records, "EXACT_SPLIT_KEYS", 64)
    torch.manual_seed(0)
    features, lens = AttentionFeatures(**fields), [132, 8]
    case = read = make_case(lens, 2, 16, 2, dtype)
    if stored is not None:
        case, read = stored_in(case, stored)
    q = queries(140, 4, 16, dtype)
    whole, whole_lse = extend(case, q, [0, 132, 140], 132, 1, True, features, is_exact=True)
    expected = attention(read, q, [0, 132, 140], 0.25, causal=True, features=features)
    assert_near(whole, whole_lse, expected)
    tokens = [*range(111, 132), 139]
    for num_splits in (1, 3):
        chunk, lse = extend(
            *(case, q[tokens], [0, 21, 22], 21, num_splits, True, features), is_exact=True
        )
        assert torch.equal(chunk, whole[tokens])
        assert torch.equal(lse, whole_lse[tokens])
    for length, counts in ((1, (3,)), (17, (1,)), (64, (3,)), (65, (1, 3)), (132, (1, 3))):
        pages = -(-length // 2)
        row = replace(
            case,
            kv_indptr=torch.tensor([0, pages, pages], dtype=torch.int32),
            last_page_len=torch.tensor([2 - length % 2, 0], dtype=torch.int32),
        )
        for num_splits in counts:
            out, lse = decode(row, q[[length - 1, 0]], num_splits, None, features, is_exact=True)
            assert torch.equal(out[0], whole[length - 1])
            assert torch.equal(lse[0], whole_lse[length - 1])


@on_each_path(
    ("dtype", "num_splits", "fields"),
    [(*kind, fields) for kind in ((F32, 1), (BF16, 3)) for fields in FEATURES],
    lambda dtype, num_splits, fields: (dtype, num_splits) == (F32, 1) or fields == FEATURES[4],
)
@both
def test_features(dtype: torch.dtype, num_splits: int, fields: dict[str, Any]) -> None:
    """Of rows whose keys are split, with sequences shorter and longer than what they see."""
    features = AttentionFeatures(**fields)
    torch.manual_seed(0)
    case = make_case([300, 0, 20, 129], 2, 16, 4, dtype)
    q = queries(4, 4, 16, dtype)
    expected = attention(case, q, range(5), 0.25, causal=True, features=features)
    assert_near(*decode(case, q, num_splits, None, features), expected)
    case = make_case([70, 0, 150, 12], 2, 16, 4, dtype)
    qo_indptr = [0, 70, 70, 90, 91]
    q = queries(91, 4, 16, dtype)
    expected = attention(case, q, qo_indptr, 0.25, causal=True, features=features)
    assert_near(*extend(case, q, qo_indptr, 70, num_splits, True, features), expected)


@both
def test_sinks() -> None:
    torch.manual_seed(0)
    out, lse = torch.randn(3, 4, 8), torch.randn(3, 4) * 5
    lse[1, 2], out[1, 2] = -torch.inf, 0.0  # it has seen no key
    sinks = torch.tensor([-40.0, 0.5, 3.0, 40.0])
    weights = lse.exp2().double()
    expected = out.double() * (weights / (weights + sinks.double().exp()))[..., None]
    assert gpu_ops.add_sinks(out, lse, sinks) is out
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)


@both
def test_shared_keys_may_be_fewer_than_queries() -> None:
    torch.manual_seed(0)
    case = make_case([2, 0], 1, 16, 2, F32)
    q = queries(6, 2, 16, F32)
    expected = attention(case, q, [0, 5, 6], 0.25, causal=False)
    assert_near(*extend(case, q, [0, 5, 6], None, 1, False), expected)
    assert expected[1][5].eq(-torch.inf).all()


@both
def test_many_rows_of_few_tokens() -> None:
    """More rows than are looked through at a time, some of them without tokens."""
    torch.manual_seed(0)
    new = [row % 3 if row % 20 < 2 or row > 137 else 0 for row in range(140)]
    lens = [2 * count for count in new]
    case = make_case(lens, 1, 8, 1, BF16)
    qo_indptr = [0, *itertools.accumulate(new)]
    q = queries(qo_indptr[-1], 1, 8, BF16)
    expected = attention(case, q, qo_indptr, 8**-0.5, causal=True)
    assert_near(*extend(case, q, qo_indptr, 40, 1, True), expected)


def test_blocks_of_larger_gpus(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The tiles of Hopper, with a row that ends inside of one."""
    if path == "triton":
        from radixserve_kernels.gpu import launch

        monkeypatch.setattr(launch, "capability_of", lambda _: (9, 0))
    torch.manual_seed(0)
    case = make_case([200, 150], 1, 16, 16, BF16)
    q = queries(100, 3, 16, BF16)
    expected = attention(case, q, [0, 90, 100], 0.25, causal=True)
    assert_near(*extend(case, q, [0, 90, 100], 90, 1, True), expected)


@pytest.mark.parametrize("size", [0, 1])
@both
def test_scale_and_defaults(size: int) -> None:
    torch.manual_seed(0)
    case = make_case([3] * size, 1, 16, 2, F32)
    q = queries(size, 2, 16, F32)
    out = gpu_ops.decode(q, *case.keys, 0.7)
    assert out.shape == q.shape
    assert out.is_contiguous()
    lse = torch.zeros(size, 2)
    expected = attention(case, q, range(size + 1), 0.7, causal=False)
    gpu_ops.decode(q, *case.keys, 0.7, lse=lse)
    assert_near(out, lse, expected)
    places = torch.arange(size + 1, dtype=torch.int32)
    same = gpu_ops.extend(q, *case.keys[:2], places, *case.keys[2:], 0.7)
    assert_near(same, lse, expected)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@both
def test_merge_states(dtype: torch.dtype) -> None:
    """Of two halves of the keys; a half that is empty may hold anything."""
    torch.manual_seed(0)
    lens = [8, 3, 0, 0]
    case = make_case(lens, 2, 24, 4, dtype)
    q = queries(4, 6, 24, dtype)
    out, lse = attention(case, q, range(5), 0.3, causal=False)
    firsts, seconds = [4, 0, 0, 0], [8, 3, 0, 0]
    parts = []
    for bounds in (zip([0] * 4, firsts, strict=True), zip(firsts, seconds, strict=True)):
        slots = [row[a:b] for row, (a, b) in zip(case.slots, bounds, strict=True)]
        part = PagedCase(*case.keys, slots)
        some, some_lse = attention(part, q, range(5), 0.3, causal=False)
        some = some.masked_fill((some_lse == -torch.inf)[..., None], torch.nan)
        room = torch.full((4, 8, 24), torch.nan, dtype=dtype)
        room[:, :6] = some.to(dtype)
        parts += [room[:, :6], some_lse.float()]
    found = gpu_ops.merge_states(*parts)
    assert_near(*found, (out, lse))
    into = parts[2], parts[3]
    assert gpu_ops.merge_states(*parts, *into)[0] is into[0]  # in place
    assert torch.equal(into[0], found[0])
    assert torch.equal(into[1], found[1])
    empty = gpu_ops.merge_states(*(part[:0] for part in parts))
    assert empty[0].shape == (0, 6, 24)


def test_pools_of_more_than_2_to_the_31_features(path: str) -> None:
    """The memory is not touched but for a few pages: the system gives what is zero when asked."""
    num_pages = 2**31 // 64 + 8
    try:
        zeros = np.zeros((1, 2, num_pages, 4, 1, 16), np.float16)
    except MemoryError:
        pytest.skip("the system gives no memory that it has not got")
    torch.manual_seed(0)
    kv = torch.from_numpy(zeros).to("cuda" if path == "cuda" else "cpu")  # where it stays
    pages = torch.tensor([num_pages - 1, 3], dtype=torch.int32)
    kv[0, :, pages] = torch.randn(2, 2, 4, 1, 16).half().to(kv.device)
    k_slots, v_slots = kv[0].flatten(1, 2).unbind(0)
    slots = [4 * page + i for page in pages.tolist() for i in range(4)][:7]
    rows = [torch.tensor(one, dtype=torch.int32) for one in ([0, 2], [3])]
    case = PagedCase(k_slots, v_slots, rows[0], pages, rows[1], 4, [slots])
    q = queries(2, 1, 16, F16)
    expected = attention(case, q, [0, 2], 0.25, causal=True)
    assert_near(*extend(case, q, [0, 2], 2, 1, True), expected)
    expected = attention(case, q[:1], [0, 1], 0.25, causal=False)
    assert_near(*decode(case, q[:1], 1, None), expected)
    gpu_ops.copy_page_prefixes(
        kv, torch.tensor([[num_pages - 1, num_pages - 4, 4]], dtype=torch.int32)
    )
    assert torch.equal(kv[0, :, num_pages - 4], kv[0, :, num_pages - 1])
    qkv, place = torch.randn(1, 48).half(), torch.tensor([0])
    table = torch.cat((torch.ones(1, 8), torch.zeros(1, 8)), 1)
    last = torch.tensor([len(k_slots) - 5])
    gpu_ops.rope_and_store(qkv, place, last, table, k_slots, v_slots, 1, 1)
    assert torch.equal(kv[0, :, num_pages - 2, 3, 0].flatten().cpu(), qkv[0, 16:])


@pytest.mark.parametrize(
    ("fixed_splits", "splits"),
    [(1, [[4_096, 54, 0], [130, 0, 0]]), (3, [[256, 256, 188], [128, 2, 0]])],
)
@pytest.mark.usefixtures("interpreted")
def test_rows_are_cut(fixed_splits: int, splits: list[list[int]]) -> None:
    """Into equal splits, none of them tiny, and more where these get long: seen in their lse."""
    case = make_case([sum(row) for row in splits], 1, 2, 64, BF16)
    q = queries(2, 1, 2, BF16)
    room = torch.full((gpu_ops.workspace_size(2, 1, 2, 3),), torch.nan)
    gpu_ops.decode(
        q, *case.keys, num_splits=3, workspace=room, fixed_splits=fixed_splits, scale=1e-9
    )
    counts = torch.exp2(room[-6:]).view(2, 3)  # all scores are zero
    torch.testing.assert_close(counts, torch.tensor(splits).float(), rtol=1e-3, atol=0)


def test_splits_are_chosen() -> None:
    """Few rows fill the GPU; many rows are cut where they are long; splits are never tiny."""
    assert gpu_ops.choose_splits(256, 8, 1_024, 132) == (1, 1)
    assert gpu_ops.choose_splits(256, 8, 20_000, 132) == (5, 1)
    assert gpu_ops.choose_splits(1, 8, 100_000, 132) == (33, 33)
    assert gpu_ops.choose_splits(1, 8, 1_024, 132) == (8, 8)
    assert gpu_ops.choose_splits(1, 1, 100_000, 132) == (64, 64)
    assert gpu_ops.choose_splits(1, 8, 1, 132) == (1, 1)
    assert gpu_ops.choose_splits(256, 8, 1_000_000, 132) == (8, 1)
    assert gpu_ops.workspace_size(3, 4, 8, 2) == 3 * 4 * 2 * 9
    assert gpu_ops.workspace_size(3, 4, 8, 1) == 0


@pytest.mark.long
@pytest.mark.parametrize("seed", range(60))
@both
def test_any_shape(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    dtype = rng.choice((F32, F16, BF16))
    group, num_kv_heads = rng.choice((1, 2, 3, 5, 8, 17)), rng.choice((1, 2, 3))
    head_dim, page_size = rng.choice((2, 8, 24, 64, 80, 128)), rng.choice((1, 2, 3, 16, 64))
    lens = [rng.choice((0, 1, 2, 31, 64, 65, 200, 400)) for _ in range(rng.randint(1, 4))]
    case = make_case(lens, num_kv_heads, head_dim, page_size, dtype)
    num_splits = rng.randint(1, 5)
    q = queries(len(lens), group * num_kv_heads, head_dim, dtype)
    expected = attention(case, q, range(len(lens) + 1), head_dim**-0.5, causal=False)
    assert_near(*decode(case, q, num_splits, rng.randint(1, num_splits)), expected)
    new = [rng.randint(0, min(length, 40)) for length in lens]
    qo_indptr = [0, *itertools.accumulate(new)]
    q = queries(qo_indptr[-1], group * num_kv_heads, head_dim, dtype)
    causal, max_q = rng.random() < 0.7, rng.choice((max(new), None, 100))
    expected = attention(case, q, qo_indptr, head_dim**-0.5, causal=causal)
    assert_near(*extend(case, q, qo_indptr, max_q, num_splits, causal), expected)
