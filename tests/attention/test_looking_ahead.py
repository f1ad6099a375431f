"""Rows of pictures that see each other: those after them, too."""

from __future__ import annotations

import pytest
import torch

from radixserve.attention.base import AttentionFeatures
from radixserve.runner.input_batch import build_forward_batch
from tests.attention.cases import CPU, LENGTHS, Case, SharedCase, run
from tests.attention.conftest import Make

BOTH = [torch.float32, torch.bfloat16]
AHEAD = AttentionFeatures(bidirectional=True)
FEATURES = {
    "all": AHEAD,
    "window": AttentionFeatures(sliding_window=20, bidirectional=True),
    "soft cap": AttentionFeatures(logits_soft_cap=1.5, bidirectional=True),
    "another layer": AttentionFeatures(sliding_window=20),
}
PICTURES = (0, 20), (20, 33), (60, 77), (120, 190), (300, 305), (310, 590)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("lengths", ["everything", "long chunks", "prefills"])
def test_matches_row_by_row(
    lengths: str, name: str, page_size: int, dtype: torch.dtype, make_host: Make
) -> None:
    case, features = Case(LENGTHS[lengths], page_size, 6, 2, 32, dtype=dtype), FEATURES[name]
    case.look_ahead(*PICTURES)
    out = run(make_host(case.kv.clone(), 6), case, features=features)
    close = 2e-6 if dtype == torch.float32 else 3e-2
    expected = case.expected(1, features=features)[0]
    torch.testing.assert_close(out.double(), expected, atol=close, rtol=10 * close)


@pytest.mark.pairs
@pytest.mark.parametrize("features", [AHEAD, FEATURES["window"]])
@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (3, 64), (6, 32)])
@pytest.mark.usefixtures("cpu_level")
def test_a_hit_inside_a_picture_has_the_bits_of_the_whole(
    group: int, dim: int, dtype: torch.dtype, features: AttentionFeatures, make_cpu: Make
) -> None:
    """Packed keys and those read as they lie; few rows of many keys, which threads share."""
    shape = {"heads": 2 * group, "kv_heads": 2, "dim": dim, "dtype": dtype}
    start, end = 1_300, 1_360
    case = Case([(start, end - start)], 3, **shape)
    case.look_ahead((1_310, end))
    backend = make_cpu(case.kv.clone(), 2 * group)
    whole = run(backend, case, features=features)
    assert not torch.equal(whole, run(backend, case, features=FEATURES["another layer"]))
    for first in (1, 10, 11, 30, 57, 58, 59):
        part = Case([(start + first, end - start - first)], 3, **shape)
        part.rows[0].page_ids[:] = case.rows[0].page_ids
        part.batch = build_forward_batch(part.rows, 3, CPU)
        part.look_ahead((1_310, end))
        part.q, part.k, part.v = (x[first:] for x in (case.q, case.k, case.v))
        assert torch.equal(run(backend, part, features=features), whole[first:])


@pytest.mark.usefixtures("always_share", "cpu_level")
def test_beside_rows_that_share_pages(make_cpu: Make) -> None:
    lengths = [(64, 33), (64, 1), (70, 40), (64, 7)]
    outs = []
    for shares in (True, False):
        case = SharedCase(lengths, 2, [(range(4), 32)], heads=6, kv_heads=2, dim=32)
        case.look_ahead((66, 90))
        outs.append(run(make_cpu(case.kv.clone(), 6, shares=shares), case, features=AHEAD))
    assert torch.equal(*outs)
    expected = case.expected(1, features=AHEAD)[0]
    torch.testing.assert_close(outs[0].double(), expected, atol=2e-6, rtol=2e-5)
