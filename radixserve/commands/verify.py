"""`radixserve verify`: checks that answers have the same bits cold, warm, alone and batched.

It compares a hash of the logits behind each token, for the variants in `_all_variants`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixserve.commands.flags import (
    EXPORTS,
    add_command,
    add_engine_flags,
    add_flags,
    add_model_flags,
    given_engine,
    given_model,
)
from radixserve.commands.jsonl import BatchLine, read_batch
from radixserve.errors import InvalidRequest
from radixserve.recipes.demo import CONVERSATIONS, SYSTEM_PROMPT

if TYPE_CHECKING:
    from radixserve.api.runtime import Runtime
    from radixserve.completion import Completion
    from radixserve.request import SamplingParams

_EPILOG = """\
Every request runs alone with no cache first. Then all of them run in other ways: one after another
with what others left in the cache, at once, once more, shuffled, with rows that do not attend
together, in small chunks and pages, and in a pool so small that requests are preempted. A hash of
the logits' bits behind each token is compared. The exit code is 0 where no answer differs, else 1.

JSON lines are those of `radixserve generate`; a line with a temperature and no seed gets its number
as the seed. Without a file: questions after one system prompt, and samples of one of them.

examples:
  radixserve verify
  radixserve verify ./my-checkpoint --dtype bfloat16 --jsonl requests.jsonl
"""
_MAX_TOKENS = 24
_NUM_SAMPLES = 6
Request = tuple[Any, "SamplingParams"]  # a prompt and its params
Order = Callable[[int], Sequence[Sequence[int]]]  # of n requests: the numbers for each generate


@dataclass(frozen=True, slots=True)
class RunVariant:
    """A way of running the requests: engine settings, and which requests run together."""

    name: str
    order: Order
    settings: dict[str, Any]
    keeps_runtime: bool = False  # use the previous variant's runtime, with its cache


@dataclass(frozen=True, slots=True)
class VariantResult:
    """The comparison of a variant's answers with the baseline."""

    variant: str
    differing: list[int]  # numbers, from 0, of the requests whose logits differ in a bit
    with_other_tokens: list[int]  # numbers of the requests whose tokens differ, too
    cached_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Baseline:
    """The requests, and their answers computed one at a time and without a cache."""

    requests: list[Request]
    completions: list[Completion]
    longest: int  # tokens of the longest request, prompt and answer
    page_size: int
    inexact: str  # see `ResolvedConfig.inexact`


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = add_command(
        commands,
        "verify",
        "compare the bits of answers: cold, warm, alone, batched, in chunks, preempted",
        "Run requests in many ways and compare the bits of the logits behind each token.",
        _EPILOG,
    )
    add_model_flags(parser)
    flags = {
        "--jsonl FILE": "the requests, as JSON lines; without it a few of its own",
        "--json": "print one JSON document instead",
    }
    add_flags(parser, flags)
    add_engine_flags(parser, without=EXPORTS)
    return parser


def run(args: argparse.Namespace) -> int:
    settings, model = given_engine(args), given_model(args)
    lines = [] if args.jsonl is None else _read_lines(args.jsonl)
    baseline = run_alone(model, settings, lines)
    num_tokens = sum(len(completion.token_ids) for completion in baseline.completions)
    counts = {"requests": len(baseline.requests), "tokens": num_tokens}
    if not args.json:
        print(f"{counts['requests']} requests, {num_tokens} tokens, alone and without a cache")
        if baseline.inexact:
            print(f"not exact: {baseline.inexact}")
    results = []
    for result in run_variants(model, settings, baseline):
        results.append(result)
        if not args.json:
            print(_as_line(result), flush=True)
    num_differing = sum(len(result.differing) for result in results)
    if args.json:
        variants = [asdict(result) for result in results]
        counts["differences"] = num_differing
        report = {**counts, "inexact_because": baseline.inexact, "variants": variants}
        print(json.dumps(report, indent=2))
    else:
        print(f"{num_differing} differences in {len(results) * len(baseline.requests)} answers")
    return 1 if num_differing else 0


def _as_line(result: VariantResult) -> str:
    line = f"  {result.variant:28} {len(result.differing):3} differ"
    line += f", {result.cached_tokens:6} tokens cached"
    if result.with_other_tokens:
        line += f", {len(result.with_other_tokens)} have other tokens"
    return line + (f", {result.preemptions} preemptions" if result.preemptions else "")


def run_alone(model: str, settings: dict[str, Any], lines: Sequence[BatchLine]) -> Baseline:
    """Compute the baseline: each request alone and without a cache. `lines`: the requests; []: a
    few of our own. Raises what Runtime and generate raise."""
    from radixserve.api.runtime import Runtime

    with Runtime(model, **{**settings, "cache": "off", "cascade_attention": False}) as runtime:
        requests = _requests_of(runtime, lines) if lines else _own_requests(runtime)
        completions = [runtime.generate(prompt, params) for prompt, params in requests]
        page_size, inexact = runtime.config.page_size, runtime.resolved_config.inexact
    lengths = [
        completion.usage.prompt_tokens + completion.usage.completion_tokens
        for completion in completions
    ]
    return Baseline(requests, completions, max(lengths), page_size, inexact)


def run_variants(
    model: str, settings: dict[str, Any], baseline: Baseline
) -> Iterator[VariantResult]:
    """Run each variant and compare it with the baseline. `settings`: of all variants; a variant's
    own settings override them."""
    from radixserve.api.runtime import Runtime

    runtime: Runtime | None = None
    try:
        for variant in _all_variants(settings, baseline):
            if runtime is None or not variant.keeps_runtime:
                if runtime is not None:
                    runtime.close()
                runtime = Runtime(model, **{**settings, **variant.settings})
            yield _compare(variant, runtime, baseline)
    finally:
        if runtime is not None:
            runtime.close()


def _requests_of(runtime: Runtime, lines: Sequence[BatchLine]) -> list[Request]:
    requests = []
    for line in lines:
        if line.error is not None:
            raise InvalidRequest(f"line {line.number}: {line.error}")
        fields = {"seed": line.number, **line.fields, "digest": True}
        requests.append((line.prompt, runtime.sampling_params(**fields)))
    return requests


def _own_requests(runtime: Runtime) -> list[Request]:
    """Questions after a system prompt, two of them without it, and samples of the first. They are
    token ids for a model without a tokenizer."""
    from radixserve.request import SamplingParams

    questions: list[Any] = [question for question, _ in CONVERSATIONS]
    prompts = [f"{SYSTEM_PROMPT}\n\n{question}" for question in questions]
    if runtime.tokenizer is None:
        ids = random.Random(0)
        questions = [[ids.randrange(runtime.model.vocab_size) for _ in range(9)] for _ in range(4)]
        shared = [ids.randrange(runtime.model.vocab_size) for _ in range(150)]
        prompts = [shared + question for question in questions]
    greedy: dict[str, Any] = {
        "temperature": 0.0,
        "max_tokens": _MAX_TOKENS,
        "ignore_eos": True,
        "digest": True,
    }
    requests = [(prompt, SamplingParams(**greedy)) for prompt in [*prompts, *questions[:2]]]
    for seed in range(_NUM_SAMPLES):
        sampled = {**greedy, "temperature": 1.0, "seed": seed}
        requests.append((prompts[0], SamplingParams(**sampled)))
    return requests


def _read_lines(name: str) -> list[BatchLine]:
    lines = read_batch(Path(name).read_bytes(), {}, lambda text: text)
    if not lines:
        raise InvalidRequest(f"{name} has no requests")
    return lines


def _all_variants(settings: dict[str, Any], baseline: Baseline) -> list[RunVariant]:
    variants = [
        RunVariant("one by one, warm", _one_by_one, {}),
        RunVariant("at once, warm", _at_once, {}, keeps_runtime=True),
        RunVariant("at once, cold", _at_once, {}),
        RunVariant("shuffled, then one by one", lambda n: _shuffled(n) + _one_by_one(n), {}),
        RunVariant("pages read by each row", _at_once, {"cascade_attention": False}),
        RunVariant("chunks of 37", _at_once, {"chunked_prefill_size": 37}),
    ]
    if settings.get("cache", "radix") == "radix":
        variants.append(RunVariant("pages of 16", _at_once, {"page_size": 16}))
    if not {"num_pages", "kv_cache_memory"} & settings.keys():
        num_pages = -(-baseline.longest * 5 // 4 // baseline.page_size)
        variants.append(RunVariant("a small pool", _shuffled, {"num_pages": num_pages}))
    return variants


def _at_once(count: int) -> list[list[int]]:
    return [list(range(count))]


def _one_by_one(count: int) -> list[list[int]]:
    return [[number] for number in range(count)]


def _shuffled(count: int) -> list[list[int]]:
    order = list(range(count))
    random.Random(0).shuffle(order)
    return [order]


def _compare(variant: RunVariant, runtime: Runtime, baseline: Baseline) -> VariantResult:
    differing, with_other_tokens, cached_tokens = set(), set(), 0
    before = runtime.cache_stats()["preemptions"]
    for numbers in variant.order(len(baseline.requests)):
        prompts, params = zip(*(baseline.requests[number] for number in numbers), strict=True)
        for number, completion in zip(numbers, runtime.generate(prompts, params), strict=True):
            cached_tokens += completion.usage.cached_tokens
            if completion.digest is None:
                raise InvalidRequest("answers have no digest here: verify needs a single process")
            if completion.digest != baseline.completions[number].digest:
                differing.add(number)
            if completion.token_ids != baseline.completions[number].token_ids:
                with_other_tokens.add(number)
    preemptions = runtime.cache_stats()["preemptions"] - before
    return VariantResult(
        variant.name, sorted(differing), sorted(with_other_tokens), cached_tokens, preemptions
    )
