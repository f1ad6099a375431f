"""The engine on the device against the CPU's own path: the same prompts, the same greedy tokens.

A tiny random model; every setting cold, then warm, then without log-probabilities, which takes
another way. What the CPU says counts, in the same dtype where it has it: another token is accepted
only where the CPU's own log-probability of it is within rounding of its best one's. That ends the
comparison of the prompt, for everything after it differs. Log-probabilities have to agree, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from gpu.bench import Bench
from gpu.jobs import Skip

from radixserve import Runtime, SamplingParams
from radixserve.attention.cuda import cascade
from radixserve.attention.cuda.cascade import NodeFinder
from radixserve.output import Completion
from radixserve.runner.cuda_graph import DecodeGraph

MODEL = "bench-tiny"
NUM_TOP = 5
TIE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}  # of log-probabilities

Variant = dict[str, Any]  # settings of an engine
BASE: Variant = {"dtype": "bfloat16", "page_size": 1}
COMMON: list[Variant] = [
    BASE,
    {"page_size": 16},
    {"overlap": False},
    {"cascade_attention": False},
    {"dtype": "float16", "page_size": 16},
]
VARIANTS: dict[str, list[Variant]] = {
    "flashinfer": [
        *COMMON,
        {"page_size": 64},
        {"cuda_graphs": False},
        {"page_size": 16, "cuda_graphs": False, "overlap": False, "cascade_attention": False},
    ],
    "triton": [
        *COMMON,
        {"page_size": 64, "cuda_graphs": False},
        {"dtype": "float32"},
        {"dtype": "float32", "page_size": 16, "cuda_graphs": False, "overlap": False},
    ],
    "torch": [{"dtype": "float32"}, {"page_size": 16}, {"overlap": False, "page_size": 64}],
}
DRY_VARIANTS: dict[str, list[Variant]] = {
    "flashinfer": [BASE],
    "triton": [BASE, {"dtype": "float32", "page_size": 16, "cuda_graphs": False, "overlap": False}],
    "torch": [{"dtype": "float32"}],
}


@dataclass(frozen=True)
class Agreement:
    """Of the answers of one run with the expected ones."""

    num_tokens: int  # that were compared and are the same
    num_ties: int  # prompts that end with another token as good as the expected one
    wrong: str  # the first difference that is none of rounding


def run(bench: Bench, group: str) -> None:
    probed = torch.float32 if group == "torch" else torch.bfloat16  # which it takes anywhere
    if reason := bench.unsupported_reason(group, probed):
        raise Skip(f"no {group}: {reason}")
    prompts = make_prompts(bench)
    expected: dict[str, list[Completion]] = {}
    for variant in (DRY_VARIANTS if bench.is_dry else VARIANTS)[group]:
        settings = {**BASE, **variant, "attention_backend": group}
        dtype = settings["dtype"]
        source = "float32" if dtype == "float16" else dtype  # the CPU has no float16
        if source not in expected:
            expected[source] = _on_cpu(bench, source, prompts)
        _compare(bench, settings, prompts, expected[source])


def make_prompts(bench: Bench) -> list[list[int]]:
    """Prompts of many lengths, most of which begin like another one."""
    rng = random.Random(bench.settings.seed)
    vocab = bench.shape(MODEL).vocab
    heads = [
        [rng.randrange(vocab) for _ in range(length)]
        for length in bench.pick((70, 200), (70, 200), (20,))
    ]
    prompts = []
    for _ in range(bench.pick(14, 10, 5)):
        head = rng.choice(heads)[: rng.choice((5, 1_000, 1_000))] if rng.random() < 0.8 else []
        tail = [rng.randrange(vocab) for _ in range(rng.choice((1, 2, 9, 40)))]
        prompts.append(head + tail)
    return [*prompts, prompts[0]]


def _params(bench: Bench, logprobs: int | None) -> SamplingParams:
    new = bench.pick(32, 20, 6)
    return SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True, logprobs=logprobs)


def _on_cpu(bench: Bench, dtype: str, prompts: list[list[int]]) -> list[Completion]:
    settings = {"attention_backend": "torch", "num_pages": 4_096, "seed": bench.settings.seed}
    with Runtime(bench.model(MODEL), device="cpu", dtype=dtype, **settings) as rt:
        found: list[Completion] = rt.generate(prompts, _params(bench, NUM_TOP), progress=False)
    return found


def _compare(
    bench: Bench, settings: Variant, prompts: list[list[int]], expected: list[Completion]
) -> None:
    name = describe(settings)
    tie = TIE[settings["dtype"]]
    tokens = 4_096 if bench.is_dry else 16_384
    sizes = {
        "num_pages": tokens // settings["page_size"],
        "max_running_requests": bench.pick(16, 16, 8),
        "chunked_prefill_size": bench.pick(128, 128, 32),
    }
    with (
        watched(shares=settings.get("cascade_attention", True)) as seen,
        bench.open_runtime(MODEL, **settings, **sizes) as rt,
    ):
        runs = [
            rt.generate(prompts, _params(bench, logprobs), progress=False)
            for logprobs in (NUM_TOP, NUM_TOP, None)
        ]
        stats, choices = rt.cache_stats(), rt.resolved_config
    found = [agree(prompts, one, expected, tie) for one in runs]
    wrong = next((one.wrong for one in found if one.wrong), "")
    wrong = wrong or _unused(settings, choices, stats, seen, runs)
    cells = {
        "tokens": sum(one.num_tokens for one in found),
        "ties": sum(one.num_ties for one in found),
        "replays": seen["replays"],
        "shared steps": seen["shared"],
        "hidden ms": stats["overlapped_s"] * 1e3,
    }
    bench.row(name, cells, failed=wrong)


def describe(settings: Variant) -> str:
    words = {"cuda_graphs": "graphs", "overlap": "overlap", "cascade_attention": "cascade"}
    off = [f"no {word}" for key, word in words.items() if not settings.get(key, True)]
    parts = [settings["attention_backend"], settings["dtype"], f"pages of {settings['page_size']}"]
    return ", ".join([*parts, *off])


def _unused(
    settings: Variant, choices: Any, stats: dict[str, Any], seen: dict[str, int], runs: Any
) -> str:
    """Settings that took no effect, or features that were used in spite of them."""
    backend = settings["attention_backend"]
    has_graphs = settings.get("cuda_graphs", True) and backend != "torch"
    shares = settings.get("cascade_attention", True) and backend != "torch"
    cached = [one.usage.cached_tokens == one.usage.prompt_tokens - 1 for one in runs[1]]
    claims = {
        f"the backend is {choices.attention_backend}": choices.attention_backend == backend,
        f"{seen['replays']} graphs replayed": bool(seen["replays"]) == has_graphs,
        f"{seen['shared']} steps read shared pages together": bool(seen["shared"]) == shares,
        "overlap": (stats["overlapped_s"] > 0) == settings.get("overlap", True),
        "a warm prompt was computed again": all(cached),
    }
    return "; ".join(claim for claim, is_so in claims.items() if not is_so)


@contextmanager
def watched(*, shares: bool) -> Iterator[dict[str, int]]:
    """Counts replayed graphs and steps with shared pages, which are read together if `shares`
    however little that saves."""
    seen = {"replays": 0, "shared": 0}
    plan, find = DecodeGraph.plan, NodeFinder.find
    costs = cascade.SHARE_BYTES, cascade.MERGE_TOKENS

    def counted_plan(self: DecodeGraph, batch: Any) -> Any:
        seen["replays"] += 1
        return plan(self, batch)

    def counted_find(*args: Any, **kwargs: Any) -> Any:
        nodes = find(*args, **kwargs)
        seen["shared"] += bool(nodes)
        return nodes

    DecodeGraph.plan, NodeFinder.find = counted_plan, counted_find  # type: ignore[method-assign]
    if shares:
        cascade.SHARE_BYTES, cascade.MERGE_TOKENS = 1, 0
    try:
        yield seen
    finally:
        DecodeGraph.plan, NodeFinder.find = plan, find  # type: ignore[method-assign]
        cascade.SHARE_BYTES, cascade.MERGE_TOKENS = costs


def agree(
    prompts: Sequence[Sequence[int]],
    found: Sequence[Completion],
    expected: Sequence[Completion],
    tie: float,
) -> Agreement:
    """Prompt by prompt, up to the first difference."""
    num_tokens = num_ties = 0
    wrong = ""
    for at, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        equal = [a == b for a, b in zip(mine.token_ids, theirs.token_ids, strict=True)]
        same = [*equal, False].index(False)
        num_tokens += same
        where = f"prompt {at} of {len(prompts[at])} tokens, token {same}"
        if same < len(theirs.token_ids):
            gap = _gap(theirs, same, mine.token_ids[same])
            num_ties += gap <= tie
            if gap > tie:
                wrong = wrong or f"{where}: {gap:.3g} below the expected one"
        if mine.logprobs is not None and theirs.logprobs is not None:
            pairs = zip(mine.logprobs[:same], theirs.logprobs[:same], strict=True)
            worst = max((abs(a - b) for a, b in pairs), default=0.0)
            if not worst <= tie:
                wrong = wrong or f"{where}: a log-probability is off by {worst:.3g}"
    return Agreement(num_tokens, num_ties, wrong)


def _gap(expected: Completion, place: int, token: int) -> float:
    """How much less likely than the best token the other one is, as far as is told."""
    assert expected.logprobs is not None
    assert expected.top_logprobs is not None
    told = expected.top_logprobs[place].get(token)
    return float("inf") if told is None else expected.logprobs[place] - told
