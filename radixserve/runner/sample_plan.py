"""A step's rows to sample and to score, sorted on the host before anything is queued.

Kernels on the device sample most rows, those with penalties from token counts that lie there.
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
from radixserve.runner.logits_processing import ban_arrays, bias_arrays
from radixserve.runner.random_stream import uniform_numbers
from radixserve.runner.sampler import are_greedy_only
from radixserve.schedule import SampleOutput, SampleSpec, ScheduledRequest

_NONE: IndexArray = np.empty(0, np.int64)


class SampledRow(NamedTuple):
    """A row of the logits to sample a token from."""

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
    """Sampling plan of one step. The n rows sampled on the device are in output order."""

    num_outputs: int
    num_sampled: int  # n
    outputs: IndexArray  # [n] their outputs
    has_gaps: bool  # whether these are not just 0, 1 ... n - 1 of n
    is_whole: bool  # whether these are rows 0, 1 ... of the logits
    wants_logprobs: IndexArray  # [m] rows that do
    num_top_logprobs: IndexArray  # [m] how many of the best tokens each wants
    rows: tuple[SampledRow, ...]  # [n]; none where all are plainly greedy
    penalized: tuple[SampledRow, ...]  # those with penalties
    has_grammar: bool  # whether one of these has one
    host_sampled: tuple[SampledRow, ...]  # beams, rows with logits_processors or jump_forward
    scored: tuple[Scoring, ...]
    arrays: dict[str, NDArray[Any]]  # to upload; the names are DeviceSampler's

    @property
    def awaits_tokens(self) -> bool:
        """Whether a mask depends on a token that the step in flight samples."""
        return self.has_grammar and any(
            row.spec.num_placeholders and row.spec.matcher is not None for row in self.rows
        )


def plan_samples(inputs: InputBatch, vocab_size: int) -> SamplePlan:
    """Sort the rows of a step. O(rows) of Python, but for steps of greedy rows alone."""
    rows, specs = inputs.requests, inputs.columns.sample
    is_decode = inputs.num_tokens == inputs.num_rows and all(specs)  # None: nothing is sampled
    if is_decode and are_greedy_only(specs):
        return _greedy_step(len(rows))
    first, counts = inputs.logit_ranges()
    sampled = [
        SampledRow(at, logit, row, row.sample)
        for at, (logit, row) in enumerate(zip((first + counts - 1).tolist(), rows, strict=True))
        if row.sample is not None
    ]
    is_simple = are_greedy_only([one.spec for one in sampled])
    host_sampled: tuple[SampledRow, ...] = ()
    if not is_simple:
        on_host = [one.spec.on_host for one in sampled]
        host_sampled = tuple(itertools.compress(sampled, on_host))
        sampled = [one for one, is_there in zip(sampled, on_host, strict=True) if not is_there]
    scored = tuple(
        Scoring(at, int(first[at]), row.logprob_targets, row.num_top_logprobs)
        for at, row in enumerate(rows)
        if row.logprob_targets is not None
    )
    plan = _greedy_plan(len(rows), sampled, host_sampled, scored)
    return plan if is_simple else _with_parameters(plan, sampled, vocab_size)


def _greedy_plan(
    num_outputs: int,
    rows: Sequence[SampledRow],
    host_sampled: tuple[SampledRow, ...],
    scored: tuple[Scoring, ...],
) -> SamplePlan:
    """Plan for greedy rows on the device."""
    outputs = np.array([row.output for row in rows], np.int64)
    logits = np.array([row.logit for row in rows], np.int64)
    order = np.arange(len(rows))
    has_gaps = len(rows) != num_outputs or bool((outputs != order).any())
    is_whole = bool((logits == order).all())
    arrays: dict[str, NDArray[Any]] = {}
    if has_gaps:
        arrays["outputs"] = outputs
    if not is_whole:
        arrays["sampled_rows"] = logits
    if scored:
        arrays["targets"] = np.concatenate([one.targets for one in scored], dtype=np.int64)
    return SamplePlan(
        num_outputs=num_outputs,
        num_sampled=len(rows),
        outputs=outputs,
        has_gaps=has_gaps,
        is_whole=is_whole,
        wants_logprobs=_NONE,
        num_top_logprobs=_NONE,
        penalized=(),
        has_grammar=False,
        rows=tuple(rows),
        host_sampled=host_sampled,
        scored=scored,
        arrays=arrays,
    )


@functools.lru_cache(maxsize=512)
def _greedy_step(num_rows: int) -> SamplePlan:
    """Plan for so many greedy decode rows, which it does not list."""
    plan = _greedy_plan(0, (), (), ())
    return replace(plan, num_outputs=num_rows, num_sampled=num_rows, outputs=np.arange(num_rows))


def _with_parameters(plan: SamplePlan, rows: Sequence[SampledRow], vocab_size: int) -> SamplePlan:
    """`plan` with all sampling parameters besides the best token."""
    specs, arrays = [row.spec for row in rows], dict(plan.arrays)
    params = [spec.params for spec in specs]
    if not all(one.is_greedy for one in params):
        arrays |= _parameters(specs)
    tops = [(at, one.logprobs) for at, one in enumerate(params) if one.logprobs is not None]
    wants_logprobs, num_top = np.array(tops, np.int64).reshape(-1, 2).T
    if tops:
        arrays["logprob_rows"] = np.ascontiguousarray(wants_logprobs)
    arrays |= bias_arrays(specs)
    arrays |= ban_arrays(specs, [row.request.future_index for row in rows])
    penalized = [at for at, one in enumerate(params) if one.has_penalty]
    if penalized:
        arrays |= _penalties([rows[at] for at in penalized])
        arrays["penalized_rows"] = np.array(penalized, np.int64)
    return replace(
        plan,
        wants_logprobs=wants_logprobs,
        num_top_logprobs=np.minimum(num_top, vocab_size),
        penalized=tuple(rows[at] for at in penalized),
        has_grammar=any(spec.matcher is not None for spec in specs),
        arrays=arrays,
    )


def _parameters(specs: Sequence[SampleSpec]) -> dict[str, NDArray[Any]]:
    """[n] each. Where the temperature is 0 nothing else counts: such rows may lack a history."""
    params = [spec.params for spec in specs]
    temperature = np.array([one.temperature for one in params])
    sampled = np.flatnonzero(temperature)
    uniform = np.full(len(specs), 0.5)
    uniform[sampled] = uniform_numbers([specs[at] for at in sampled.tolist()])
    top_k = np.clip(np.array([one.top_k for one in params], np.float64), 0, 2**31 - 1)
    return {
        "temperature": temperature.astype(np.float32),
        "top_k": top_k.astype(np.int32),
        "top_p": np.array([one.top_p for one in params], np.float64),
        "min_p": np.array([one.min_p for one in params], np.float32),
        "uniform": uniform,
    }


def _penalties(rows: Sequence[SampledRow]) -> dict[str, NDArray[Any]]:
    """[m] each, of the rows with penalties."""
    params = [row.spec.params for row in rows]
    return {
        "penalty_slots": np.array([row.request.req_pool_idx for row in rows], np.int64),
        "repetition": np.array([one.repetition_penalty for one in params], np.float32),
        "frequency": np.array([one.frequency_penalty for one in params], np.float32),
        "presence": np.array([one.presence_penalty for one in params], np.float32),
    }


def begin_device_masks(
    plan: SamplePlan, vocab_size: int, previous: Sequence[SampleOutput | None] | None = None
) -> StepMasks:
    """The masks of the rows sampled on the device. previous: the outputs of the step before, where
    a row follows a token of that."""
    last_tokens: dict[int, int] = {}
    for at, row in enumerate(plan.rows):
        if row.spec.num_placeholders and previous is not None:
            output = previous[row.request.future_index]
            if output is not None and output.error is None:
                last_tokens[at] = output.token_id
    return StepMasks([row.spec for row in plan.rows], vocab_size, last_tokens)
