"""Greedy and random samples of the kernels and their references: the sampler's, token for token."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from radixserve.request import SamplingParams
from radixserve.runner.sample_plan import uniform_numbers
from radixserve.schedule import SampleSpec
from radixserve_kernels import gpu_ops

both = pytest.mark.usefixtures("path")  # references, interpreted kernels, compiled ones
INF, NAN = torch.inf, torch.nan
NO_TOKENS = np.empty(0, np.int32)


def sample(
    logits: Tensor, params: Sequence[SamplingParams], uniform: Sequence[float] | Tensor
) -> tuple[list[int], list[bool]]:
    """As the runner does, from a row of strided logits each."""
    wide = torch.full((len(logits), logits.shape[1] + 3), NAN)
    wide[:, :-3] = logits
    finite = torch.zeros(len(params), dtype=torch.bool)
    tokens = gpu_ops.sample(
        wide[:, :-3],
        torch.tensor([p.temperature for p in params]),
        torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params]),
        torch.as_tensor(uniform, dtype=torch.float64),
        finite,
    )
    assert tokens.dtype == torch.int64
    return tokens.tolist(), finite.tolist()


def sampled(logits: Tensor, params: Sequence[SamplingParams], seed: int) -> tuple[list, list]:
    """By the kernels, and by whole sorted rows."""
    specs = [SampleSpec(each, seed + row, 0, NO_TOKENS, ()) for row, each in enumerate(params)]
    uniform = uniform_numbers(specs)
    tokens, finite = sample(logits, params, torch.tensor(uniform))
    assert all(finite)
    rows = zip(logits.cpu(), params, uniform, strict=True)
    return tokens, [sample_by_sorting(row, each, number) for row, each, number in rows]


def sample_by_sorting(logits: Tensor, params: SamplingParams, uniform: float) -> int:
    """One row [V]: temperature, min_p, top_k, top_p, then the first token up to which more than
    `uniform` of the probability lies."""
    scaled = (logits - logits.max()) / torch.tensor(params.temperature)
    scaled = scaled.masked_fill(scaled < torch.tensor(params.min_p).log(), -torch.inf)
    if 0 < params.top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.sort().values[-params.top_k], -torch.inf)
    probs = scaled.softmax(-1)
    if params.top_p < 1:
        ordered = probs.sort(descending=True).values
        num_kept = int((ordered.double().cumsum(-1) < params.top_p).sum()) + 1
        floor = ordered[min(num_kept, len(ordered)) - 1]
        probs = scaled.masked_fill(probs < floor, -torch.inf).softmax(-1)
    mass = probs.double().cumsum(-1)
    point = min(uniform * float(mass[-1]), math.nextafter(float(mass[-1]), 0.0))
    return int(torch.searchsorted(mass, torch.tensor(point, dtype=torch.float64), right=True))


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.95),
    SamplingParams(temperature=1.3, top_p=0.5),
    SamplingParams(top_k=1),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=2.0, top_k=3, top_p=0.3, min_p=0.01),
    SamplingParams(temperature=1e-5),
    SamplingParams(temperature=100.0, top_k=4_000, top_p=0.99),
]


@both
def test_draws_are_the_sampler_s() -> None:
    """In two blocks of the vocabulary, the second one not whole."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(len(PARAMS), 4_500)
    found, expected = sampled(logits, PARAMS, 5)
    assert found == expected


@pytest.mark.parametrize("vocab_size", [1, 60])
@both
def test_ties_and_small_vocabularies(vocab_size: int) -> None:
    """Few values: what ties with the last token kept is kept."""
    torch.manual_seed(vocab_size)
    logits = torch.randint(-2, 3, (len(PARAMS), vocab_size)).float()
    found, expected = sampled(logits, PARAMS, 3)
    assert found == expected


@both
def test_more_ties_than_are_gathered() -> None:
    logits = torch.zeros(2, 5_000)
    logits[:, 17] = -1.0
    params = [SamplingParams(top_k=3), SamplingParams(top_p=0.2)]
    found, expected = sampled(logits, params, 2)
    assert found == expected
    assert 17 not in found


@pytest.mark.parametrize("top_k", [0, 2])
@both
def test_ends_of_the_distribution(top_k: int) -> None:
    """Tokens without probability are never sampled, however close to 0 or 1 the number comes."""
    logits = torch.tensor([[-INF, 0.0, -INF, 0.0, -INF, -200.0]]).expand(4, -1)
    params = [SamplingParams(top_k=top_k)] * 4
    found, _ = sample(logits, params, [2**-53, 0.4999999, 0.5000001, 1 - 2**-53])
    assert found == [1, 1, 3, 3]
    found, _ = sample(torch.zeros(3, 4_099), params[:3], [2**-53, 1 - 2**-53, 1.0])
    assert found == [0, 4_098, 4_098]


@both
def test_floors_are_kept() -> None:
    """Logits that lie on a threshold, and one that is min_p's floor."""
    logits = torch.tensor([[0.0, -0.5, -2.0, -4.5, -8.0, -12.5, -18.0, -24.5, -30.0]])
    params = [SamplingParams(top_k=k) for k in (1, 2, 3, 8)]
    found, _ = sample(logits.expand(4, -1), params, [1 - 2**-53] * 4)
    assert found == [0, 1, 2, 7]
    floor = torch.tensor(0.3).log()
    logits = torch.stack((torch.zeros(()), floor, floor - 1e-6))[None]
    assert sample(logits, [SamplingParams(min_p=0.3)], [1 - 2**-53])[0] == [1]
    logits = torch.tensor([[0.0, -1.0, -1.0]])  # 0.576 of the probability lies on the first one
    assert sample(logits, [SamplingParams(top_p=0.57)], [1 - 2**-53])[0] == [0]
    assert sample(logits, [SamplingParams(top_p=0.6)], [1 - 2**-53])[0] == [2]


@both
@pytest.mark.parametrize("vocab_size", [1, 31, 33, 4_099])
def test_masks(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    words = -(-vocab_size // 32) + 1
    bits = rng.random((3, words * 32)) < np.array([[0.0], [0.5], [1.0]])
    bitmask = torch.tensor(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    rows = torch.tensor([4, 0, 3])
    wide = torch.tensor(rng.standard_normal((5, vocab_size + 3)).astype(np.float32))
    wanted = wide.clone()
    for row, allowed in zip(rows.tolist(), torch.tensor(bits), strict=True):
        wanted[row, :vocab_size][~allowed[:vocab_size]] = -INF
    gpu_ops.forbid_(wide[:, :vocab_size], bitmask, rows)
    assert torch.equal(wide, wanted)


@both
def test_rows_that_cannot_be_drawn_from() -> None:
    """They are flagged, get token 0 and leave the others alone; greedy rows get the argmax."""
    torch.manual_seed(0)
    logits = torch.randn(7, 4_200)
    logits[0, 4_111] = NAN
    logits[1] = -INF
    logits[2, 5] = INF
    logits[3, [40, 4_150]] = 9.0
    logits[4, [4_150, 4_190]] = 9.0
    logits[5, :4_100] = -INF
    logits[6] = torch.where(torch.arange(4_200) == 4_199, 3.0, -INF)
    greedy = SamplingParams(temperature=0.0, top_k=4, min_p=0.5)
    for params in ([greedy] * 7, [SamplingParams(top_k=1), *[greedy] * 5, SamplingParams()]):
        tokens, finite = sample(logits, params, torch.full((7,), 0.3))
        assert finite == [False] * 3 + [True] * 4
        assert tokens[:5] == [0, 0, 0, 40, 4_150]
        assert tokens[5] == logits[5].argmax()
        assert tokens[6] == 4_199
    best, flags = gpu_ops.argmax(logits)
    assert best.tolist() == tokens
    assert flags.tolist() == finite
    assert best.dtype == torch.int64


@both
def test_no_rows() -> None:
    empty = torch.empty(0, 10)
    assert sample(empty, [], []) == ([], [])
    assert [len(one) for one in gpu_ops.argmax(empty)] == [0, 0]
    assert gpu_ops.token_logprob(empty, torch.empty(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("vocab_size", [1, 50, 4_097])
@both
def test_token_logprob(vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = 10 * torch.randn(4, vocab_size)
    logits[1] += 1e4
    logits[2, : vocab_size // 2] = -INF
    token_ids = torch.randint(vocab_size, (4,))
    token_ids[3] = vocab_size - 1
    token_ids[2] = 0
    expected = logits.double().log_softmax(-1).gather(1, token_ids[:, None])[:, 0]
    found = gpu_ops.token_logprob(logits, token_ids)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-3)
    torch.testing.assert_close(found[[0, 2, 3]].double(), expected[[0, 2, 3]], rtol=2e-6, atol=2e-5)


def test_draws_follow_the_distribution() -> None:
    """The reference, over a grid of numbers: each token gets its share of them."""
    torch.manual_seed(0)
    logits = torch.randn(1, 40)
    grid = (torch.arange(20_000) + 0.5) / 20_000
    column = torch.ones(20_000)
    many = logits.expand(20_000, -1)
    tokens = gpu_ops.sample(many, column, torch.full((20_000,), 9), column, 0 * column, grid)
    kept = logits[0].topk(9).indices
    expected = torch.zeros(40).index_copy(0, kept, logits[0, kept].softmax(0))
    counts = tokens.bincount(minlength=40) / 20_000
    torch.testing.assert_close(counts, expected, rtol=0, atol=2e-4)


@pytest.mark.long
@pytest.mark.parametrize("vocab_size", [128_256, 151_936])
@both
def test_vocabularies_of_real_models(vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(len(PARAMS), vocab_size)
    found, expected = sampled(logits, PARAMS, 7)
    assert found == expected
    assert gpu_ops.argmax(logits)[0].tolist() == logits.argmax(-1).tolist()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
@both
def test_any_params(seed: int) -> None:
    """Logits of many kinds; rounding may move a sample to a token next to a border."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    vocab_size = rng.choice((5, 300, 4_096, 9_001))
    params = [
        SamplingParams(
            temperature=rng.choice((0.3, 1.0, 5.0)),
            top_k=rng.choice((0, 0, 1, 7, 50, 5_000)),
            top_p=rng.choice((1.0, 1.0, 0.01, 0.4, 0.9, 0.999)),
            min_p=rng.choice((0.0, 0.0, 0.001, 0.3, 1.0)),
        )
        for _ in range(6)
    ]
    logits = rng.choice((0.1, 2.0, 15.0)) * torch.randn(6, vocab_size)
    if rng.random() < 0.4:
        logits = logits.round()
    if rng.random() < 0.3:
        logits[:, torch.randperm(vocab_size)[: vocab_size // 2]] = -INF
    found, expected = sampled(logits, params, seed)
    assert found == expected
