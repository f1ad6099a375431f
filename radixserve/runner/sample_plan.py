"""What a step asks of its logits, sorted on the host before anything runs.

Most rows are drawn by kernels on the device. Those with penalties and beams need their history, and
scored prompts need many rows: they go through sampler.py when the step is collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.attention.base import IndexArray
from radixserve.runner.sampler import is_greedy_only, uniform_numbers
from radixserve.runner.step_layout import StepLayout
from radixserve.schedule import SampleSpec, SchedulerOutput


class Draw(NamedTuple):
    """A token to be drawn."""

    output: int  # its place in ModelRunnerOutput.outputs
    logit: int  # the row of the logits
    spec: SampleSpec


class Scoring(NamedTuple):
    """Targets to be scored behind rows of the logits that follow each other."""

    output: int
    logit: int  # the first of them
    logprob_targets: IntArray
    num_top_logprobs: int


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Of one step. The n device draws are in the order of the outputs."""

    num_rows: int
    num_outputs: int  # one a row
    num_drawn: int  # n
    outputs: IndexArray  # [n] places of the device draws among the outputs
    has_gaps: bool  # whether these are not just 0, 1 ... n - 1 of n
    is_whole: bool  # whether draw i is drawn from row i of the logits
    is_greedy: bool  # no draw needs a random number
    wants_logprobs: IndexArray  # [m] draws that do
    num_top_logprobs: IndexArray  # [m] how many of the best tokens each wants
    hosted: tuple[Draw, ...]
    scored: tuple[Scoring, ...]
    arrays: dict[str, NDArray[Any]]  # to be sent along; the names are DeviceSampler's


def plan_samples(schedule: SchedulerOutput, layout: StepLayout, vocab_size: int) -> SamplePlan:
    """Sort the rows of a schedule. O(rows) of Python."""
    rows = schedule.rows
    logits = (layout.first_logit + layout.num_logits - 1)[: len(rows)].tolist()
    specs = [row.sample for row in rows]
    draws = [
        (at, place, spec)
        for at, (place, spec) in enumerate(zip(logits, specs, strict=True))
        if spec is not None
    ]
    is_simple = all(is_greedy_only(spec) for _, _, spec in draws)
    hosted: tuple[Draw, ...] = ()
    if not is_simple:
        hosted = tuple(Draw(*one) for one in draws if needs_host(one[2]))
        draws = [one for one in draws if not needs_host(one[2])] if hosted else draws
    scored = tuple(
        Scoring(at, int(layout.first_logit[at]), row.logprob_targets, row.num_top_logprobs)
        for at, row in enumerate(rows)
        if row.logprob_targets is not None
    )
    plan = _arrange(len(rows), len(specs), draws, hosted, scored)
    return plan if is_simple else _with_parameters(plan, [one[2] for one in draws], vocab_size)


def needs_host(spec: SampleSpec) -> bool:
    """Whether its token depends on all tokens before, or several are wanted."""
    return spec.num_candidates > 0 or spec.params.has_penalty


def _arrange(
    num_rows: int,
    num_outputs: int,
    draws: Sequence[tuple[int, int, SampleSpec]],  # output and row of the logits of each
    hosted: tuple[Draw, ...],
    scored: tuple[Scoring, ...],
) -> SamplePlan:
    """Of draws on the device that all take the best token."""
    outputs = np.array([one[0] for one in draws], np.int64)
    logits = np.array([one[1] for one in draws], np.int64)
    order, none = np.arange(len(draws)), np.empty(0, np.int64)
    has_gaps = len(draws) != num_outputs or bool((outputs != order).any())
    is_whole = bool((logits == order).all())
    arrays: dict[str, NDArray[Any]] = {}
    if has_gaps:
        arrays["outputs"] = outputs
    if not is_whole:
        arrays["draw_rows"] = logits
    return SamplePlan(
        num_rows=num_rows,
        num_outputs=num_outputs,
        num_drawn=len(draws),
        outputs=outputs,
        has_gaps=has_gaps,
        is_whole=is_whole,
        is_greedy=True,
        wants_logprobs=none,
        num_top_logprobs=none,
        hosted=hosted,
        scored=scored,
        arrays=arrays,
    )


def _with_parameters(plan: SamplePlan, specs: Sequence[SampleSpec], vocab_size: int) -> SamplePlan:
    """What the device draws `specs` ask for besides."""
    params, arrays = [spec.params for spec in specs], dict(plan.arrays)
    is_greedy = all(one.is_greedy for one in params)
    if not is_greedy:
        arrays |= _parameters(specs)
    tops = [(at, one.logprobs) for at, one in enumerate(params) if one.logprobs is not None]
    wants_logprobs, num_top = np.array(tops, np.int64).reshape(-1, 2).T
    if tops:
        arrays["logprob_draws"] = np.ascontiguousarray(wants_logprobs)
    if any(spec.banned_ids for spec in specs):
        arrays["banned_draws"], arrays["banned_ids"] = _banned(specs)
    return replace(
        plan,
        is_greedy=is_greedy,
        wants_logprobs=wants_logprobs,
        num_top_logprobs=np.minimum(num_top, vocab_size),
        arrays=arrays,
    )


def _parameters(specs: Sequence[SampleSpec]) -> dict[str, NDArray[Any]]:
    """[n] each. Where the temperature is 0 nothing else counts: plain rows may lack a history."""
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


def _banned(specs: Sequence[SampleSpec]) -> tuple[IndexArray, IndexArray]:
    """(draw, token id) of every token that a row may not draw."""
    draws = np.repeat(np.arange(len(specs)), [len(spec.banned_ids) for spec in specs])
    token_ids = [token_id for spec in specs for token_id in spec.banned_ids]
    return draws, np.array(token_ids, np.int64)
