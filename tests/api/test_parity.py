"""Promise 2: the same answer with the cache cold, warm or off, however the work is cut up.

Greedy output of random-weight checkpoints equals transformers' `generate` token for token over 28
mixed requests that share prefixes at odd lengths, with chunk sizes 1, 7 and 64, page sizes 1, 2, 16
and 64, the radix and the hash cache, and pools so small that requests are evicted and preempted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from radixserve import Runtime, SamplingParams
from tests.checkpoints import all_logprobs_batch, greedy_batch, load_reference, make_checkpoint

NUM_REQUESTS = 28
MAX_PROMPT = 90
LOGPROB_TOLERANCE = 1e-4
TIE = 1e-5  # best and second best closer than this: float32 cannot tell, nor can transformers
VOCAB = 256


@dataclass(frozen=True)
class Case:
    """A family with the shape and the seed of its weights."""

    family: str
    seed: int
    overrides: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.family, str(self.seed), *(f"{k}={v}" for k, v in self.overrides)])


def shape(heads: int, kv_heads: int, head_dim: int, tied: bool) -> tuple[tuple[str, Any], ...]:
    return (
        ("num_attention_heads", heads),
        ("num_key_value_heads", kv_heads),
        ("head_dim", head_dim),
        ("tie_word_embeddings", tied),
    )


CASES = [
    Case("llama", 0, shape(4, 4, 32, False)),
    Case("llama", 1, shape(8, 1, 64, True)),
    Case("mistral", 2, shape(8, 2, 64, False)),
    Case("qwen2", 3, (("num_attention_heads", 2), ("tie_word_embeddings", True))),
    Case("qwen3", 4, shape(4, 1, 128, True)),
    Case("qwen3", 5, shape(8, 8, 32, False)),
    Case("gpt_neox", 6),
    Case("olmo2", 7),
    Case("phi3", 8),
    Case("granite", 9),
    Case("stablelm", 10),
    Case("glm4", 22),
]
OTHER_SHAPES = [  # and other families
    Case("mistral", 12, shape(4, 1, 32, True)),
    Case("qwen2", 13, (("num_attention_heads", 4), ("num_key_value_heads", 4))),
    Case("gpt_neox", 16, (("num_attention_heads", 2),)),
    Case("olmo2", 17, (("num_key_value_heads", 1),)),
    Case("phi3", 18, (("num_key_value_heads", 4), ("num_attention_heads", 4))),
    Case("granite", 19, (("num_attention_heads", 2), ("num_key_value_heads", 1))),
    Case("stablelm", 20, (("num_key_value_heads", 4),)),
    Case("gemma", 21),
    Case("smollm3", 23),
]
FULL = CASES[1]  # this one goes through every combination


@dataclass
class Reference:
    """A checkpoint, its requests, and what transformers says."""

    folder: Path
    prompts: list[list[int]]
    lengths: list[int]
    outputs: list[list[int]]
    logprobs: list[list[float]]


def mixed_prompts(seed: int, count: int = NUM_REQUESTS) -> list[list[int]]:
    """Heads of earlier prompts cut at any token, some the same, some nothing shared."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for _ in range(count):
        head: list[int] = []
        if prompts and rng.random() < 0.8:
            other = rng.choice(prompts)
            head = other[: rng.randint(0, len(other))]
        tail = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 2, 5, 17, 30]))]
        prompts.append((head + tail)[:MAX_PROMPT] or [rng.randrange(VOCAB)])
    return prompts


@pytest.fixture(scope="module")
def references() -> dict[Case, Reference]:
    return {}


def reference(
    case: Case,
    cache: dict[Case, Reference],
    factory: pytest.TempPathFactory,
    count: int = NUM_REQUESTS,
    longest: int = 60,  # tokens of an answer
) -> Reference:
    if case not in cache:
        folder = factory.mktemp(case.family)
        make_checkpoint(folder, case.family, case.seed, with_tokenizer=True, **dict(case.overrides))
        model = load_reference(folder)
        prompts = mixed_prompts(case.seed, count)
        rng = random.Random(case.seed)
        counts = [rng.choice([1, 3, 8, 20, longest]) for _ in prompts]
        answers = greedy_batch(model, prompts, max(counts))
        answers = [answer[:count] for answer, count in zip(answers, counts, strict=True)]
        texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        tables = all_logprobs_batch(model, texts)
        outputs, logprobs = [], []
        for prompt, answer, table in zip(prompts, answers, tables, strict=True):
            table = table[len(prompt) - 1 : -1]
            outputs.append(answer[: before_tie(table)])
            logprobs.append([float(table[j, token]) for j, token in enumerate(outputs[-1])])
        lengths = list(map(len, outputs))
        cache[case] = Reference(folder, prompts, lengths, outputs, logprobs)
    return cache[case]


def before_tie(table: Any) -> int:
    """How many tokens are decided by more than rounding; log-probabilities [n, V]."""
    best = table.topk(2, -1).values
    ties = ((best[:, 0] - best[:, 1]) < TIE).nonzero()
    count = int(ties[0]) if len(ties) else len(table)
    assert count, "the very first token is a tie: choose another seed"
    return count


def check_answers(rt: Runtime, expected: Reference, order: list[int]) -> None:
    """All requests at once, in `order`; tokens equal, logprobs close, counts add up."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=expected.lengths[i], ignore_eos=True, logprobs=0)
        for i in order
    ]
    outs = rt.generate([expected.prompts[i] for i in order], params)
    for i, out in zip(order, outs, strict=True):
        assert out.token_ids == expected.outputs[i], f"request {i}"
        assert out.logprobs == pytest.approx(expected.logprobs[i], abs=LOGPROB_TOLERANCE)
        usage = out.usage
        assert usage.cached_tokens + usage.computed_tokens == len(expected.prompts[i])
    rt.check()


def run(
    expected: Reference,
    *,
    is_tight: bool = False,
    kind: type[Runtime] = Runtime,
    **settings: Any,
) -> dict[str, Any]:
    """Cold, then warm in another order; a tight pool must evict and preempt. Returns the stats."""
    size = settings.get("page_size", 1)
    tokens = max(3 * size, 160) if is_tight else 8192
    if is_tight:
        settings = {"admission": "greedy", **settings}  # which preempts more
    with kind(
        str(expected.folder), num_pages=tokens // size, max_running_requests=8, **settings
    ) as rt:
        order = list(range(len(expected.prompts)))
        check_answers(rt, expected, order)
        random.Random(1).shuffle(order)
        check_answers(rt, expected, order)
        stats = rt.cache_stats()
        if is_tight:
            # Not with three pages (one runs at a time), nor when prompts trickle in uncached.
            is_crowded = size < 64 and (
                stats["reused_tokens"] or settings["chunked_prefill_size"] > 1
            )
            assert stats["preemptions"] > 0 or not is_crowded
            assert stats["evicted_tokens"] > 0 or settings.get("cache") == "off"
        rt.flush_cache()
        rt.check()
        assert rt.cache_stats()["pages_free"] == rt.cache_stats()["pages_total"]
        return stats


SETTINGS: list[dict[str, Any]] = [
    {"page_size": 2, "chunked_prefill_size": 7},
    {"page_size": 16, "chunked_prefill_size": 7, "is_tight": True},
    {"page_size": 16, "chunked_prefill_size": 1},
    {"page_size": 1, "chunked_prefill_size": 64},
    {"page_size": 64, "chunked_prefill_size": 64, "is_tight": True},
    {"page_size": 16, "chunked_prefill_size": 64, "cache": "off"},
]


def cases_of_families() -> list[Any]:
    """(case, settings). Each of CASES runs with two of SETTINGS, one of them tight, and each of
    OTHER_SHAPES with one of the first two. The others are long runs."""
    pairs = ((0, 1), (2, 4), (3, 1), (5, 4))
    found = []
    for number, case in enumerate([*CASES, *OTHER_SHAPES]):
        for index, settings in enumerate(SETTINGS):
            chosen = pairs[number % len(pairs)] if case in CASES else (number % 2,)
            is_short = index in chosen
            found.append(pytest.param(case, settings, marks=() if is_short else pytest.mark.long))
    return found


@pytest.mark.parametrize(("case", "settings"), cases_of_families(), ids=str)
def test_every_family(
    case: Case,
    settings: dict[str, Any],
    references: dict[Case, Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    run(reference(case, references, tmp_path_factory), **settings)


@pytest.mark.pairs
@pytest.mark.parametrize("is_tight", [False, True])
@pytest.mark.parametrize("cache", ["radix", "off"])
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("chunked_prefill_size", [1, 7, 64])
def test_every_combination(
    chunked_prefill_size: int,
    page_size: int,
    cache: str,
    is_tight: bool,
    references: dict[Case, Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    expected = reference(FULL, references, tmp_path_factory)
    run(
        expected,
        is_tight=is_tight,
        chunked_prefill_size=chunked_prefill_size,
        page_size=page_size,
        cache=cache,
    )


@pytest.mark.parametrize(
    ("page_size", "chunked_prefill_size", "is_tight"),
    [(1, 7, False), (2, 64, True), (16, 7, True), (16, 64, False), (64, 64, True)],
)
def test_the_hash_cache(
    page_size: int,
    chunked_prefill_size: int,
    is_tight: bool,
    references: dict[Case, Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    expected = reference(FULL, references, tmp_path_factory)
    settings: dict[str, Any] = {
        "page_size": page_size,
        "chunked_prefill_size": chunked_prefill_size,
    }
    run(expected, is_tight=is_tight, cache="hash", **settings)


@pytest.mark.parametrize("cache", ["radix", "hash"])
@pytest.mark.parametrize("policy", ["fcfs", "dfs-weight"])
def test_other_policies(
    policy: str,
    cache: str,
    references: dict[Case, Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    expected = reference(FULL, references, tmp_path_factory)
    settings: dict[str, Any] = {"page_size": 2, "cache": cache, "schedule_policy": policy}
    run(expected, is_tight=True, chunked_prefill_size=16, **settings)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20, 26))
@pytest.mark.parametrize("family", sorted({case.family for case in CASES}))
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("chunked_prefill_size", [1, 7, 64])
def test_every_family_in_every_combination(
    family: str,
    seed: int,
    page_size: int,
    chunked_prefill_size: int,
    references: dict[Case, Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    expected = reference(Case(family, seed), references, tmp_path_factory)
    for cache in ("radix", "hash", "off"):
        for is_tight in (False, True):
            settings: dict[str, Any] = {"page_size": page_size, "cache": cache}
            run(expected, is_tight=is_tight, chunked_prefill_size=chunked_prefill_size, **settings)
