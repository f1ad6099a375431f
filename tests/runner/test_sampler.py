"""The sampler against plain references, one feature at a time, and all of them in one batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from radixserve.request import SamplingParams
from radixserve.runner import sampler
from radixserve.runner.penalties import apply_penalties
from radixserve.runner.sample_plan import are_greedy_only, row_parameters, uniform_numbers
from radixserve.runner.sampler import sample, score
from radixserve.schedule import SampleSpec
from radixserve_kernels import cpu_ops, sampling
from radixserve_kernels.sampling import best_tokens, invert_distribution

VOCAB = 50


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def _samples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain rows by the compiled code and without it."""
    is_compiled = request.param == "compiled"
    if is_compiled and (reason := cpu_ops.unsupported_reason(torch.float32)):
        pytest.skip(reason)
    monkeypatch.setattr(sampler, "is_loaded", lambda: is_compiled)


def spec(
    *,
    seed: int = 1,
    prompt: tuple[int, ...] = (3, 4, 4),
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    **params: float,
) -> SampleSpec:
    ids = np.array(prompt + output, np.int32)
    return SampleSpec(SamplingParams(**params), seed, len(prompt), ids, banned)


class AnyMatcher:
    """Of no grammar."""

    def fork(self) -> AnyMatcher:
        return self


def logits_of(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def test_what_makes_a_row_more_than_greedy() -> None:
    """One such row among greedy ones, wherever it lies."""
    greedy = spec(temperature=0.0)
    assert are_greedy_only([greedy, greedy, spec(temperature=0.0, output=(5,))])
    others = [
        spec(temperature=1.0),
        spec(temperature=0.0, logprobs=0),
        spec(temperature=0.0, repetition_penalty=1.1),
        spec(temperature=0.0, banned=(7,)),
        greedy._replace(num_candidates=1),
        greedy._replace(matcher=AnyMatcher()),
    ]
    for other in others:
        for at in range(3):
            specs = [greedy, greedy]
            specs.insert(at, other)
            assert not are_greedy_only(specs), other


def test_greedy_is_argmax_and_reports_what_was_asked() -> None:
    logits = logits_of(4)
    before = logits.clone()
    outs = sample(logits, [spec(temperature=0.0, logprobs=n) for n in (None, 0, 1, 5)])
    assert [out.token_id for out in outs] == logits.argmax(-1).tolist()
    logprobs = logits.log_softmax(-1)
    assert outs[0].logprob is None
    assert outs[0].top_logprobs == ()
    for row in (1, 2, 3):
        assert outs[row].logprob == pytest.approx(logprobs[row].max().item())
    best = logprobs[3].sort(descending=True)
    assert [i for i, _ in outs[3].top_logprobs] == best.indices[:5].tolist()
    assert [p for _, p in outs[3].top_logprobs] == pytest.approx(best.values[:5].tolist())
    assert [len(out.top_logprobs) for out in outs] == [0, 0, 1, 5]
    assert torch.equal(logits, before)


def test_plain_rows_take_one_pass_with_the_same_result() -> None:
    logits = logits_of(6, vocab=300)
    logits[1, 7] = logits[1, 200] = 40.0  # a tie: the first one wins
    logits[2, 9] = math.nan
    logits[3, 9] = math.inf
    logits[4] = -math.inf
    specs = [spec(temperature=0.0) for _ in range(6)]
    plain = sample(logits, specs)
    mixed = sample(torch.cat((logits, logits_of(1, vocab=300))), [*specs, spec(temperature=1.0)])
    assert plain == mixed[:6]
    assert [out.error is None for out in plain] == [True, True, False, False, False, True]
    assert plain[1].token_id == 7


def test_no_rows() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []


def test_logprobs_of_named_tokens_beside_other_rows() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5))
    asked = [{"logprob_token_ids": (9, 2)}, {"logprobs": 2}, {}, {"logprob_token_ids": (4,)}]
    outs = sample(logits, [spec(temperature=0.0, **params) for params in asked])
    logprobs = logits.log_softmax(-1)
    assert [token for token, _ in outs[0].top_logprobs] == [9, 2]
    assert [value for _, value in outs[0].top_logprobs] == pytest.approx(
        logprobs[0, [9, 2]].tolist()
    )
    assert [value for _, value in outs[1].top_logprobs] == pytest.approx(
        logprobs[1].topk(2).values.tolist()
    )
    assert outs[2].top_logprobs == ()
    assert [value for _, value in outs[3].top_logprobs] == pytest.approx([logprobs[3, 4].item()])
    assert outs[3].logprob == pytest.approx(logprobs[3].max().item())


def test_logprobs_are_raw() -> None:
    logits = logits_of(1)
    asked = spec(temperature=0.5, top_k=3, repetition_penalty=1.7, logprobs=3, banned=(1,))
    out = sample(logits, [asked])[0]
    expected = logits.log_softmax(-1)[0]
    assert out.logprob == pytest.approx(expected[out.token_id].item(), abs=1e-6)
    assert out.top_logprobs[0][1] == pytest.approx(expected.max().item(), abs=1e-6)


def penalised(row: torch.Tensor, asked: SampleSpec) -> torch.Tensor:
    """vLLM's definition, token by token."""
    p, ids = asked.params, asked.token_ids.tolist()
    row = row.clone()
    for token in range(len(row)):
        if token in ids:
            value = row[token]
            row[token] = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        count = ids[asked.num_prompt :].count(token)
        row[token] -= p.frequency_penalty * count + p.presence_penalty * (count > 0)
    return row


def test_penalties() -> None:
    asked = [
        spec(output=(5, 5, 9), repetition_penalty=1.3),
        spec(output=(5, 5, 9)),
        spec(output=(5, 5, 9, 4), presence_penalty=0.7),
        spec(output=(49, 0, 0, 0), frequency_penalty=-0.4),
        spec(output=(), presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=0.8),
        spec(output=(3, 7, 7), presence_penalty=0.3, frequency_penalty=0.2, repetition_penalty=2.0),
    ]
    logits = logits_of(len(asked))
    changed = apply_penalties(logits, asked)
    for row, one in enumerate(asked):
        torch.testing.assert_close(changed[row], penalised(logits[row], one))
    assert torch.equal(changed[1], logits[1])


def test_banned_tokens_are_never_drawn() -> None:
    logits = logits_of(3)
    best = logits.topk(2).indices.tolist()
    asked = [
        spec(temperature=0.0, banned=(best[0][0],)),
        spec(temperature=0.0),
        spec(temperature=1e-3, banned=tuple(best[2])),
    ]
    outs = sample(logits, asked)
    assert outs[0].token_id == best[0][1]
    assert outs[1].token_id == best[1][0]
    assert outs[2].token_id == logits[2].topk(3).indices[2]


def kept_by_hand(row: torch.Tensor, p: SamplingParams) -> set[int]:
    """Tokens that min_p, then top_k, then top_p leave, by sorting."""
    probs = row.double().softmax(-1)
    kept = {i for i in range(len(row)) if probs[i] >= p.min_p * probs.max()}
    order = sorted(kept, key=lambda i: -float(row[i]))
    if 0 < p.top_k < len(row):
        order = order[: p.top_k]
    total, chosen = math.fsum(float(probs[i]) for i in order), set()
    mass = 0.0
    for i in order:
        chosen.add(i)
        mass += float(probs[i]) / total
        if mass >= p.top_p:
            break
    return chosen


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 1000},
    {"top_k": -1},
    {"top_p": 0.5},
    {"top_p": 1e-9},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.6},
    {"top_k": 12, "top_p": 0.6, "min_p": 0.2},
    {"top_p": 0.8, "min_p": 0.01},
]


def columns_of(params: list[SamplingParams]) -> dict[str, torch.Tensor]:
    """The columns that `sampling.filter_tokens` takes."""
    return {
        "top_k": torch.tensor([p.top_k for p in params], dtype=torch.int32),
        "top_p": torch.tensor([p.top_p for p in params], dtype=torch.float64),
        "min_p": torch.tensor([p.min_p for p in params]),
    }


def filter_tokens(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    best = logits.amax(-1, keepdim=True)
    kept = sampling.filter_tokens(logits - best, **columns_of(params))
    return logits.masked_fill(kept.isinf(), -torch.inf)


def sample_tokens(logits: torch.Tensor, specs: list[SampleSpec]) -> torch.Tensor:
    """Token ids [S] by the tensor operations alone."""
    arrays = row_parameters(specs, logits.shape[1]).arrays
    names = ("temperature", "top_k", "top_p", "min_p", "uniform")
    tokens, is_finite = sampling.sample(logits, *(torch.from_numpy(arrays[n]) for n in names))
    assert is_finite.all()
    return tokens


@pytest.mark.parametrize("vocab", [50, 2000])
def test_filters(vocab: int) -> None:
    params = [SamplingParams(**fields) for fields in FILTERS]
    logits = logits_of(len(params), vocab=vocab)
    kept = filter_tokens(logits, params)
    for row, p in enumerate(params):
        expected = kept_by_hand(logits[row], p)
        assert set(torch.isfinite(kept[row]).nonzero()[:, 0].tolist()) == expected, p
        index = sorted(expected)
        assert torch.equal(kept[row][index], logits[row][index])


def test_flat_distribution_needs_the_whole_vocabulary_for_top_p() -> None:
    logits = torch.linspace(0, 0.01, 3000)[None].repeat(2, 1)
    params = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.01)]
    kept = torch.isfinite(filter_tokens(logits, params)).sum(-1).tolist()
    assert kept == [len(kept_by_hand(logits[0], p)) for p in params]


def random_logits(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """From flat to peaked ones; every fourth row has many ties, every fifth few allowed tokens."""
    random = torch.Generator().manual_seed(seed)
    spread = torch.rand(rows, 1, generator=random) * 6
    logits = torch.randn(rows, vocab, generator=random) * spread
    logits[::4] = logits[::4].round()
    logits[::5, torch.randperm(vocab, generator=random)[40:]] = -torch.inf
    return logits.to(dtype).float()


def random_params(random: np.random.Generator) -> dict[str, Any]:
    return {
        "temperature": float(random.choice([1e-5, 0.2, 0.8, 1.0, 2.0, 100.0])),
        "top_k": int(random.choice([-1, 0, 0, 1, 2, 40, 127, 128, 129, 10**6])),
        "top_p": float(random.choice([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999999999, 1.0, 1.0])),
        "min_p": float(random.choice([0.0, 0.0, 0.05, 0.3, 1.0])),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [513, 5_000, 20_000])
def test_filters_of_few_tokens_keep_the_same_ones_bit_by_bit(
    dtype: torch.dtype, vocab: int
) -> None:
    """Those found among the best tokens are those that filtering the whole vocabulary keeps."""
    random = np.random.default_rng(vocab)
    num_whole = 0
    for seed in range(2):
        logits = random_logits(60, vocab, dtype, seed)
        params = [SamplingParams(**random_params(random)) for _ in logits]
        columns = columns_of(params)
        temperature = torch.tensor([p.temperature for p in params])
        best = logits.amax(-1)
        scaled = (logits - best[:, None]) / temperature[:, None]
        expected = sampling.filter_tokens(scaled, **columns)
        assert torch.equal(
            sampling.scale_and_filter(logits, best, temperature, **columns), expected
        )
        top_k, top_p, min_p = columns.values()
        rows = (top_k < sampling.NUM_BEST) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
        some = (column[rows] for column in (logits, best, temperature, top_k, top_p, min_p))
        kept, is_whole = sampling.filter_best_tokens(*some)
        assert torch.equal(kept[is_whole], expected[rows][is_whole])
        num_whole += int(is_whole.sum())
        assert not is_whole.all()
    assert num_whole > 30


def test_tokens_do_not_depend_on_how_they_are_filtered(monkeypatch: pytest.MonkeyPatch) -> None:
    """With penalties, bans and log-probabilities too; alone and together."""
    random = np.random.default_rng(1)
    logits = random_logits(60, 5_000, torch.float32, 1)
    asked = [
        spec(
            seed=int(random.integers(2**62)),
            output=tuple(logits[row].topk(3).indices.tolist()),
            banned=tuple(logits[row].topk(2).indices.tolist()) if row % 3 == 0 else (),
            repetition_penalty=float(random.choice([1.0, 1.3])),
            frequency_penalty=float(random.choice([0.0, 0.5])),
            **({"logprobs": 3} if row % 2 else {}),
            **random_params(random),
        )
        for row in range(len(logits))
    ]
    together = sample(logits, asked)
    alone = [sample(logits[row : row + 1], asked[row : row + 1])[0] for row in range(len(asked))]
    monkeypatch.setattr(sampling, "NUM_BEST", 1 << 30)  # in no vocabulary: all tokens are filtered
    assert together == alone == sample(logits, asked)
    assert all(output.error is None for output in together)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 8},
        {"temperature": 1.0, "min_p": 0.2},
    ],
)
def test_frequencies_match_probabilities(fields: dict[str, float]) -> None:
    samples, vocab = 20000, 12
    row = logits_of(1, seed=3, vocab=vocab)[0]
    params = SamplingParams(**fields)
    asked = [SampleSpec(params, s, 1, np.zeros(1, np.int32), ()) for s in range(samples)]
    tokens = sample_tokens(row.expand(samples, vocab), asked)
    scaled = row / params.temperature
    kept = kept_by_hand(scaled, params)
    probs = scaled.double().softmax(-1)
    probs = torch.tensor([float(probs[i]) if i in kept else 0.0 for i in range(vocab)])
    probs /= probs.sum()
    counts = tokens.bincount(minlength=vocab)
    assert not counts[probs == 0].any()
    real = probs > 0
    chi2 = ((counts - samples * probs)[real] ** 2 / (samples * probs[real])).sum().item()
    freedom = int(real.sum()) - 1
    assert chi2 < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab", [1, 5, 256, 1000, 5000])
def test_inverse_of_the_distribution(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    probs = torch.rand(300, vocab, generator=generator) ** 8
    probs[:, ::3] = 0.0 if vocab > 1 else 1.0
    probs[7] = 0.0
    probs[7, vocab // 2] = 1.0
    uniform = torch.rand(300, dtype=torch.float64, generator=generator)
    uniform[:20], uniform[20:40] = 2.0**-53, 1 - 2.0**-53
    tokens = invert_distribution(probs, uniform)
    assert (probs.gather(1, tokens[:, None]) > 0).all()
    mass = probs.double().cumsum(-1)
    point = uniform * mass[:, -1]
    upper = mass.gather(1, tokens[:, None])[:, 0]
    lower = upper - probs.double().gather(1, tokens[:, None])[:, 0]
    slack = 1e-9 * mass[:, -1]
    assert (point <= upper + slack).all()
    assert (point >= lower - slack).all()


def test_uniform_numbers_are_uniform_and_pure() -> None:
    by_seed = uniform_numbers([spec(seed=s) for s in range(4000)])
    by_index = uniform_numbers([spec(seed=7, output=(1,) * n) for n in range(1000)])
    for numbers in (by_seed, by_index):
        assert numbers.min() > 0
        assert numbers.max() < 1
        assert len(np.unique(numbers)) == len(numbers)
        counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
        expected = len(numbers) / 10
        assert ((counts - expected) ** 2 / expected).sum() < 35
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.1
    assert uniform_numbers([spec(seed=5)])[0] == by_seed[5]
    assert uniform_numbers([spec(seed=2**63 - 1)])[0] != by_seed[0]


def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = logits_of(40)
    generator = np.random.default_rng(0)
    asked = [
        spec(
            seed=int(generator.integers(2**62)),
            output=tuple(generator.integers(0, VOCAB, generator.integers(0, 6)).tolist()),
            temperature=float(generator.choice([0.0, 0.7, 1.3])),
            top_k=int(generator.choice([0, 5])),
            top_p=float(generator.choice([1.0, 0.8])),
            min_p=float(generator.choice([0.0, 0.05])),
            repetition_penalty=float(generator.choice([1.0, 1.2])),
            presence_penalty=float(generator.choice([0.0, 0.5])),
            banned=tuple(generator.integers(0, VOCAB, generator.integers(0, 3)).tolist()),
        )
        for _ in range(40)
    ]
    together = [out.token_id for out in sample(logits, asked)]
    alone = [sample(logits[i : i + 1], asked[i : i + 1])[0].token_id for i in range(40)]
    order = generator.permutation(40)
    shuffled = sample(logits[order], [asked[i] for i in order])
    assert together == alone
    assert [out.token_id for out in shuffled] == [together[i] for i in order]


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    logits = logits_of(1) * 100
    out = sample(logits, [spec(temperature=temperature, top_p=0.99, min_p=0.0)])[0]
    assert 0 <= out.token_id < VOCAB
    if temperature < 1:
        assert out.token_id == int(logits.argmax())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_disturbs_no_other(value: float) -> None:
    logits = logits_of(4)
    asked = [spec(temperature=1.0, seed=row, repetition_penalty=1.3) for row in range(4)]
    expected = sample(logits, asked)
    logits[2] = value
    sampled = sample(logits, asked)
    assert sampled[2].error is not None
    assert [sampled[row] for row in (0, 1, 3)] == [expected[row] for row in (0, 1, 3)]


def test_a_row_whose_tokens_are_all_banned_has_an_error() -> None:
    logits = logits_of(2)
    everything = tuple(range(VOCAB))
    banned, free = sample(logits, [spec(banned=everything), spec()])
    assert banned.error is not None
    assert free.error is None


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty"])
def test_the_least_values_that_are_allowed(field: str) -> None:
    logits = logits_of(2) * 30
    least = {"temperature": 1e-5, "repetition_penalty": 0.01}[field]
    for out in sample(logits, [spec(**{"temperature": 0.7, field: least})] * 2):
        assert out.error is None
        assert 0 <= out.token_id < VOCAB


def beam(
    count: int,
    *,
    banned: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    **params: float,
) -> SampleSpec:
    plain = spec(temperature=0.0, output=output, banned=banned, **params)
    return plain._replace(num_candidates=count)


class TestCandidates:
    def test_equal_to_sorting_the_log_probabilities(self) -> None:
        logits = logits_of(4)
        before = logits.clone()
        specs = [
            beam(6),
            beam(3, banned=(5, 7)),
            beam(8, repetition_penalty=1.3, output=(9, 11, 9)),
            beam(VOCAB + 10, frequency_penalty=0.5, presence_penalty=0.25, output=(9, 11, 9)),
        ]
        own = logits.log_softmax(-1)
        changed = own.clone()
        changed[1, [5, 7]] = -math.inf
        changed[2, [3, 4, 9, 11]] *= 1.3  # log-probabilities are below zero
        changed[3, 9] -= 0.5 * 2 + 0.25
        changed[3, 11] -= 0.5 + 0.25
        outs = sample(logits, specs)
        for row, (out, asked) in enumerate(zip(outs, specs, strict=True)):
            best = changed[row].sort(descending=True)
            count = min(asked.num_candidates, VOCAB)
            found = out.candidates
            assert found is not None
            assert out.token_id == -1
            assert found.token_ids.tolist() == best.indices[:count].tolist()
            assert found.scores.tolist() == pytest.approx(best.values[:count].tolist())
            expected = own[row, best.indices[:count]].tolist()
            assert found.logprobs.tolist() == pytest.approx(expected)
        assert torch.equal(logits, before)

    def test_beside_rows_that_draw(self) -> None:
        logits = logits_of(5)
        others = [spec(temperature=0.0), spec(temperature=1.0, seed=5, logprobs=2)]
        specs = [beam(4), others[0], beam(6, logprobs=3), others[1], beam(2)]
        outs = sample(logits, specs)
        assert [outs[1]] == sample(logits[1:2], others[:1])
        alone = sample(logits[3:4], others[1:])[0]
        assert outs[3].token_id == alone.token_id
        assert outs[3].logprob == pytest.approx(alone.logprob)
        assert [len(out.candidates.token_ids) for out in outs if out.candidates] == [4, 6, 2]
        best = logits[2].log_softmax(-1).topk(3)
        assert [i for i, _ in outs[2].top_logprobs] == best.indices.tolist()
        assert [v for _, v in outs[2].top_logprobs] == pytest.approx(best.values.tolist())
        assert outs[0].top_logprobs == ()

    def test_broken_rows(self) -> None:
        logits = logits_of(4)
        logits[0, 3] = math.nan
        logits[1] = -math.inf
        logits[2, 8] = math.inf
        outs = sample(logits, [beam(4), beam(4), beam(4), beam(4)])
        assert [out.error is None for out in outs] == [False, False, False, True]
        (banned,) = sample(logits[3:], [beam(4, banned=tuple(range(VOCAB)))])
        assert banned.error is not None


@pytest.mark.parametrize("vocab", [1, 7, 300, 1000, 4096, 32_003])
@pytest.mark.parametrize("count", [1, 2, 9, 60])
def test_the_best_tokens_are_those_of_topk(vocab: int, count: int) -> None:
    count = min(count, vocab)
    values = torch.cat([torch.randperm(vocab, generator=torch.Generator().manual_seed(s))[None]
                        for s in range(3)]).float()  # fmt: skip
    values[1, : vocab // 2] = -math.inf
    values[2, vocab - 1] = math.nan
    expected = values.topk(count, -1)
    best, places = best_tokens(values, count)
    assert torch.equal(places[0], expected.indices[0])
    assert torch.equal(best[:2], expected.values[:2])
    assert best[2, 0].isnan()
    assert torch.equal(best[2, 1:], expected.values[2, 1:])


@pytest.mark.parametrize("num_top", [0, 1, 3, VOCAB + 5])
def test_scores_and_the_best_in_their_places(num_top: int) -> None:
    logits = logits_of(4)
    targets = np.array([3, 0, 49, 7], np.int32)
    out = score(logits, targets, num_top)
    logprobs = logits.log_softmax(-1)
    assert out.scores == pytest.approx([float(logprobs[at, t]) for at, t in enumerate(targets)])
    assert len(out.top_scores) == (4 if num_top else 0)
    for at, top in enumerate(out.top_scores):
        best = logprobs[at].topk(min(num_top, VOCAB))
        assert [i for i, _ in top] == best.indices.tolist()
        assert [v for _, v in top] == pytest.approx(best.values.tolist())
    assert out.ranks == ()
    ranked = score(logits, targets, num_top, wants_ranks=True)
    assert ranked._replace(ranks=()) == out
    order = logits.argsort(-1, descending=True).tolist()
    assert ranked.ranks == tuple(order[at].index(t) + 1 for at, t in enumerate(targets))
    logits[2, 5] = math.nan
    assert score(logits, targets, num_top, wants_ranks=True).error is not None
