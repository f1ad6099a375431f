"""Several completions of one prompt: a request fans out, and its completions become one list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from radixserve.errors import InvalidRequest
from radixserve.output import Completion
from radixserve.request import Request, SamplingParams

NUM_SEEDS = 2**63


def fan_out(request: Request, ids: Sequence[str]) -> list[Request]:
    """`request` as `params.num_samples` requests for one completion each; `ids`: of the others.

    In-batch prefix sharing computes their prompt once. Number i samples what a request of its own
    with the seed + i (modulo 2**63) would sample.
    """
    params = request.params
    if params.num_samples == 1:
        return [request]
    # Their sum is reported, and ranks the samples of best_of.
    logprobs: int | None = params.logprobs or 0
    if params.structured_output is not None and params.structured_output.jump_forward:
        logprobs = None  # forced tokens have none
    first = replace(request, params=replace(params, n=1, best_of=None, logprobs=logprobs))
    others = [replace(first, request_id=request_id) for request_id in ids]
    return [first, *(sample_of(first, one, number) for number, one in enumerate(others, 1))]


def sample_of(first: Request, request: Request, number: int) -> Request:
    """`request`, with the prompt and params of `first`, as sample `number` of that prompt.

    It does not score the prompt: `with_prompt_scores` copies what the first one found.
    """
    params = request.params
    if params.prompt_logprobs is not None:
        params = replace(params, prompt_logprobs=None)
    return replace(
        request,
        params=params,
        seed=(first.seed + number) % NUM_SEEDS,
        logprob_targets=None,
        also_generate=False,
    )


def with_prompt_scores(completion: Completion, first: Completion) -> Completion:
    """`completion` with the log-probabilities of the prompt that `first` found."""
    return replace(
        completion,
        prompt_logprobs=first.prompt_logprobs,
        prompt_top_logprobs=first.prompt_top_logprobs,
    )


def gather(
    completions: Sequence[Completion], params: Sequence[SamplingParams]
) -> list[Completion | list[Completion]]:
    """One entry a prompt from the completions of all requests: a list where n > 1."""
    rest = iter(completions)
    found: list[Completion | list[Completion]] = []
    for one in params:
        mine = list(islice(rest, one.num_samples))
        if one.prompt_logprobs is not None:
            mine = [mine[0], *(with_prompt_scores(c, mine[0]) for c in mine[1:])]
        if one.num_samples > one.n:
            mine = _best(mine, one.n)
        if one.logprobs is None and one.num_samples > 1:
            mine = [replace(c, logprobs=None, top_logprobs=None) for c in mine]
        found.append(mine if one.n > 1 else mine[0])
    return found


def _best(completions: list[Completion], count: int) -> list[Completion]:
    """The most likely ones, best first; aborted ones come last. The best one's usage takes over the
    prompt of the first sample, which computed it."""
    ranked = sorted(  # stable
        completions, key=lambda c: (c.finish_reason == "abort", -(c.cumulative_logprob or 0.0))
    )
    paid, best = completions[0], ranked[0]
    usages = {
        id(one): other.usage.with_answer(one.usage.completion_tokens)
        for one, other in ((paid, best), (best, paid))
    }
    return [replace(c, usage=usages.get(id(c), c.usage)) for c in ranked[:count]]


def check_single(params: SamplingParams, what: str) -> None:
    """Raises InvalidRequest where `what` takes one completion only."""
    if params.num_samples > 1:
        raise InvalidRequest(
            f"{what} takes n=1 and no best_of, got n={params.n}, best_of={params.best_of}"
        )
