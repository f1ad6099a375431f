"""A step's draws and scores, sorted on the host before anything is queued.

Most rows are drawn by kernels on the device, those with penalties from token counts that lie there.
Beams need several tokens, a caller's logits_processors run on the host and jump_forward appends
more tokens than one: these go through sampler.py when the step is collected.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.attention.base import IndexArray
from radixserve.runner.grammar_masks import StepMasks
from radixserve.runner.input_batch import InputBatch
from radixserve.runner.logit_changes import ban_arrays, bias_arrays
from radixserve.runner.plain_draws import uniform_numbers
from radixserve.runner.sampler import are_greedy_only
from radixserve.schedule import SampleOutput, SampleSpec, ScheduledRequest

_NONE: IndexArray = np.empty(0, np.int64)


class Draw(NamedTuple):
    """A token to draw."""

    output: int  # index into ModelRunnerOutput.outputs
    logit: int  # row of the logits
    request: ScheduledRequest
    spec: SampleSpec


class Scoring(NamedTuple):
    """Targets to score after consecutive rows of the logits."""

    output: int
    logit: int  # the first of them
    targets: IntArray
    num_top_logprobs: int


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Sampling plan of one step. The n device draws are in output order."""

    num_outputs: int
    num_drawn: int  # n
    outputs: IndexArray  # [n] outputs of the device draws
    has_gaps: bool  # whether these are not just 0, 1 ... n - 1 of n
    is_whole: bool  # whether draw i is drawn from row i of the logits
    wants_logprobs: IndexArray  # [m] draws that do
    num_top_logprobs: IndexArray  # [m] how many of the best tokens each wants
    draws: tuple[Draw, ...]  # [n]; none where all are plainly greedy
    penalized: tuple[Draw, ...]  # those with penalties
    has_grammar: bool  # whether device draws have one
    host_sampled: tuple[Draw, ...]  # beams, draws with logits_processors or jump_forward
    scored: tuple[Scoring, ...]
    arrays: dict[str, NDArray[Any]]  # to upload; the names are DeviceSampler's

    @property
    def awaits_tokens(self) -> bool:
        """Whether a mask depends on a token that the step in flight draws."""
        return self.has_grammar and any(
            draw.spec.num_placeholders and draw.spec.matcher is not None for draw in self.draws
        )


def plan_samples(inputs: InputBatch, vocab_size: int) -> SamplePlan:
    """Sort the rows of a step. O(rows) of Python, but for steps of greedy rows alone."""
    rows, specs = inputs.requests, inputs.columns.sample
    is_decode = inputs.num_tokens == inputs.num_rows and all(specs)  # None: nothing is drawn
    if is_decode and are_greedy_only(specs):
        return _greedy_step(len(rows))
    first, counts = inputs.logit_ranges()
    draws = [
        Draw(at, logit, row, row.sample)
        for at, (logit, row) in enumerate(zip((first + counts - 1).tolist(), rows, strict=True))
        if row.sample is not None
    ]
    is_simple = are_greedy_only([draw.spec for draw in draws])
    host_sampled: tuple[Draw, ...] = ()
    if not is_simple:
        on_host = [draw.spec.on_host for draw in draws]
        host_sampled = tuple(itertools.compress(draws, on_host))
        draws = [draw for draw, is_there in zip(draws, on_host, strict=True) if not is_there]
    scored = tuple(
        Scoring(at, int(first[at]), row.logprob_targets, row.num_top_logprobs)
        for at, row in enumerate(rows)
        if row.logprob_targets is not None
    )
    plan = _greedy_plan(len(rows), draws, host_sampled, scored)
    return plan if is_simple else _with_parameters(plan, draws, vocab_size)


def _greedy_plan(
    num_outputs: int,
    draws: Sequence[Draw],
    host_sampled: tuple[Draw, ...],
    scored: tuple[Scoring, ...],
) -> SamplePlan:
    """Plan for greedy device draws."""
    outputs = np.array([draw.output for draw in draws], np.int64)
    logits = np.array([draw.logit for draw in draws], np.int64)
    order = np.arange(len(draws))
    has_gaps = len(draws) != num_outputs or bool((outputs != order).any())
    is_whole = bool((logits == order).all())
    arrays: dict[str, NDArray[Any]] = {}
    if has_gaps:
        arrays["outputs"] = outputs
    if not is_whole:
        arrays["draw_rows"] = logits
    if scored:
        arrays["targets"] = np.concatenate([one.targets for one in scored], dtype=np.int64)
    return SamplePlan(
        num_outputs=num_outputs,
        num_drawn=len(draws),
        outputs=outputs,
        has_gaps=has_gaps,
        is_whole=is_whole,
        wants_logprobs=_NONE,
        num_top_logprobs=_NONE,
        penalized=(),
        has_grammar=False,
        draws=tuple(draws),
        host_sampled=host_sampled,
        scored=scored,
        arrays=arrays,
    )


@functools.lru_cache(maxsize=512)
def _greedy_step(num_rows: int) -> SamplePlan:
    """Plan for a greedy draw after each of so many rows of one token; the draws are not listed."""
    plan = _greedy_plan(0, (), (), ())
    return replace(plan, num_outputs=num_rows, num_drawn=num_rows, outputs=np.arange(num_rows))


def _with_parameters(plan: SamplePlan, draws: Sequence[Draw], vocab_size: int) -> SamplePlan:
    """`plan` with all sampling parameters besides the best token."""
    specs, arrays = [draw.spec for draw in draws], dict(plan.arrays)
    params = [spec.params for spec in specs]
    if not all(one.is_greedy for one in params):
        arrays |= _parameters(specs)
    tops = [(at, one.logprobs) for at, one in enumerate(params) if one.logprobs is not None]
    wants_logprobs, num_top = np.array(tops, np.int64).reshape(-1, 2).T
    if tops:
        arrays["logprob_draws"] = np.ascontiguousarray(wants_logprobs)
    arrays |= bias_arrays(specs)
    arrays |= ban_arrays(specs, [draw.request.future_index for draw in draws])
    penalized = [at for at, one in enumerate(params) if one.has_penalty]
    if penalized:
        arrays |= _penalties([draws[at] for at in penalized])
        arrays["penalty_draws"] = np.array(penalized, np.int64)
    return replace(
        plan,
        wants_logprobs=wants_logprobs,
        num_top_logprobs=np.minimum(num_top, vocab_size),
        penalized=tuple(draws[at] for at in penalized),
        has_grammar=any(spec.matcher is not None for spec in specs),
        arrays=arrays,
    )


def _parameters(specs: Sequence[SampleSpec]) -> dict[str, NDArray[Any]]:
    """[n] each. Where the temperature is 0 nothing else counts: such rows may lack a history."""
    params = [spec.params for spec in specs]
    temperature = np.array([one.temperature for one in params])
    drawn = np.flatnonzero(temperature)
    uniform = np.full(len(specs), 0.5)
    uniform[drawn] = uniform_numbers([specs[at] for at in drawn.tolist()])
    top_k = np.clip(np.array([one.top_k for one in params], np.float64), 0, 2**31 - 1)
    return {
        "temperature": temperature.astype(np.float32),
        "top_k": top_k.astype(np.int32),
        "top_p": np.array([one.top_p for one in params], np.float64),
        "min_p": np.array([one.min_p for one in params], np.float32),
        "uniform": uniform,
    }


def _penalties(draws: Sequence[Draw]) -> dict[str, NDArray[Any]]:
    """[m] each, of the draws with penalties."""
    params = [draw.spec.params for draw in draws]
    return {
        "penalty_slots": np.array([draw.request.req_pool_idx for draw in draws], np.int64),
        "repetition": np.array([one.repetition_penalty for one in params], np.float32),
        "frequency": np.array([one.frequency_penalty for one in params], np.float32),
        "presence": np.array([one.presence_penalty for one in params], np.float32),
    }


def begin_device_masks(
    plan: SamplePlan, vocab_size: int, previous: Sequence[SampleOutput | None] | None = None
) -> StepMasks:
    """The masks of the device draws. previous: the outputs of the step before, where a draw follows
    a token of that."""
    last_tokens: dict[int, int] = {}
    for at, draw in enumerate(plan.draws):
        if draw.spec.num_placeholders and previous is not None:
            output = previous[draw.request.future_index]
            if output is not None and output.error is None:
                last_tokens[at] = output.token_id
    return StepMasks([draw.spec for draw in plan.draws], vocab_size, last_tokens)
