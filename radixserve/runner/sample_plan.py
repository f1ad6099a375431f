"""A step's rows to sample and to score, sorted on the host before the forward pass ends.

Both runners sample by a `SamplePlan`. Rows that a device samples have their parameters in it as
arrays to upload. The host samples rows of beams, which need several tokens, rows with a caller's
logits_processors, rows with jump_forward, which appends several tokens, and rows with drafts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, compress
from operator import attrgetter, not_
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixserve.arrays import IntArray
from radixserve.attention.base import IndexArray
from radixserve.request import SamplingParams
from radixserve.runner.grammar_bitmask import GrammarBitmaskFuture
from radixserve.runner.input_batch import InputBatch
from radixserve.runner.logits_processing import ban_arrays, bias_arrays
from radixserve.runner.penalties import penalty_arrays
from radixserve.schedule import SampleOutput, SampleSpec, ScheduledRows

_NONE: IndexArray = np.empty(0, np.int64)
_IS_GREEDY_ONLY = attrgetter("is_greedy_only")
_TAKES_BEST, _BANNED_IDS = attrgetter("params.takes_best"), attrgetter("banned_ids")
_NUM_CANDIDATES, _MATCHER = attrgetter("num_candidates"), attrgetter("matcher")
_ON_HOST = attrgetter("on_host")


def are_greedy_only(specs: Sequence[SampleSpec]) -> bool:
    """Whether every row takes its best logit and requests nothing else. Called in every step:
    no Python code runs per row."""
    if all(map(_IS_GREEDY_ONLY, specs)):
        return True
    if not all(map(_TAKES_BEST, specs)) or any(map(_BANNED_IDS, specs)):
        return False
    return not any(map(_NUM_CANDIDATES, specs)) and not any(map(_MATCHER, specs))


class SampledRows(NamedTuple):
    """Rows that a token is sampled for, in output order, as columns [n]."""

    outputs: list[int]  # indices into ModelRunnerOutput.outputs: the row's number in the step
    logits: list[int]  # rows of the logits
    specs: list[SampleSpec]
    future_indices: list[int]  # as ScheduledRows has them; -1 where all tokens are known

    def select(self, is_selected: Sequence[bool]) -> SampledRows:
        return SampledRows(
            list(compress(self.outputs, is_selected)),
            list(compress(self.logits, is_selected)),
            list(compress(self.specs, is_selected)),
            list(compress(self.future_indices, is_selected)),
        )


_NO_ROWS = SampledRows([], [], [], [])


class DraftedRow(NamedTuple):
    """A row with drafts, whose first token is sampled like those of other rows."""

    output: int
    logit: int  # of the token after the first draft
    spec: SampleSpec  # of the first sample
    token_ids: tuple[int, ...]  # the drafts

    @property
    def needs_turns(self) -> bool:
        """Whether a draft is sampled after only once it is known to be right: a grammar, or a
        caller's function, sees the request's own tokens only."""
        return self.spec.matcher is not None or bool(self.spec.params.logits_processors)

    def later_specs(self) -> list[SampleSpec]:
        """Returns the sampler's input after each draft, if that and those before it are right."""
        return list(accumulate(self.token_ids, SampleSpec.after, initial=self.spec))[1:]


class Scoring(NamedTuple):
    """Targets to score after consecutive rows of the logits."""

    output: int
    logit: int  # the first of them
    targets: IntArray
    num_top_logprobs: int
    wants_ranks: bool


@dataclass(frozen=True, slots=True)
class RowParameters:
    """The sampling parameters of n rows that are sampled together."""

    wants_logprobs: IndexArray = field(default_factory=lambda: _NONE)  # [m] rows that do
    num_top_logprobs: IndexArray = field(default_factory=lambda: _NONE)  # [m] how many of the best
    logprob_ids: tuple[tuple[int, ...], ...] = ()  # [m] or none: the tokens that are reported
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)  # for `sampler.choose_tokens`

    @property
    def num_logprob_columns(self) -> int:
        """Tensors that `sampler.token_logprobs` returns."""
        if not len(self.wants_logprobs):
            return 0
        return 1 + 2 * bool(self.num_top_logprobs.any()) + bool(self.logprob_ids)


_BEST_TOKEN = RowParameters()


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """Sampling plan of one step."""

    num_outputs: int
    num_sampled: int  # n: rows sampled where the logits are
    rows: SampledRows  # those; without columns in a plan of `_greedy_rows`
    is_greedy: bool  # the best logit of each decides, and nothing else is asked for
    has_gaps: bool  # whether their outputs are not just 0, 1 ... n - 1 of n
    is_whole: bool  # whether these are rows 0, 1 ... of the logits
    host_rows: SampledRows = _NO_ROWS  # rows that a device leaves to the host
    drafted: tuple[DraftedRow, ...] = ()  # verified once their first tokens are sampled
    scored: tuple[Scoring, ...] = ()
    has_grammar: bool = False  # whether one of `rows` has one
    penalized: tuple[int, ...] = ()  # of `rows` those with penalties
    parameters: RowParameters = _BEST_TOKEN  # of `rows`
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)  # to upload, those of
    # `parameters` included

    @property
    def sampled_outputs(self) -> IndexArray:
        """[n] the outputs of the rows sampled where the logits are."""
        if self.has_gaps:
            return np.array(self.rows.outputs, np.int64)
        return np.arange(self.num_sampled)

    @property
    def awaits_tokens(self) -> bool:
        """Whether a mask depends on a token that the step in flight samples."""
        return self.has_grammar and any(
            spec.num_placeholders and spec.matcher is not None for spec in self.rows.specs
        )


def plan_samples(inputs: InputBatch) -> SamplePlan:
    """Sort the rows of a step. O(rows) of Python, but for steps of greedy rows alone."""
    rows = inputs.rows
    specs = [spec for spec in rows.samples if spec is not None]
    is_greedy = are_greedy_only(specs) and not rows.drafts
    num_rows = len(rows.samples)
    if is_greedy and len(inputs.logits_indices) == len(specs) == num_rows and not rows.targets:
        return _greedy_rows(num_rows)
    is_sampled = [spec is not None for spec in rows.samples]
    if inputs.num_tokens == len(inputs.logits_indices) and not rows.targets:
        first = logits = list(accumulate(rows.num_tokens, initial=0))[:-1]
    else:
        ranges = inputs.logit_ranges()
        first = ranges[0].tolist()
        logits = (ranges[0] + ranges[1] - 1).tolist()
        for row, num_drafts in rows.drafts.items():
            logits[row] -= num_drafts
    sampled = SampledRows(
        outputs=list(compress(range(num_rows), is_sampled)),
        logits=list(compress(logits, is_sampled)),
        specs=specs,
        future_indices=list(compress(rows.future_indices or [-1] * num_rows, is_sampled)),
    )
    scored = tuple(
        Scoring(row, first[row], *targets[:3]) for row, targets in sorted(rows.targets.items())
    )
    plan = _plan_of(num_rows, sampled, scored, is_greedy=is_greedy)
    return replace(plan, drafted=_drafted_rows(rows, logits)) if rows.drafts else plan


def _drafted_rows(rows: ScheduledRows, logits: Sequence[int]) -> tuple[DraftedRow, ...]:
    """logits: of each row, that of its first sample."""
    ends, drafted = list(accumulate(rows.num_tokens)), []
    for row, num_drafts in rows.drafts.items():
        spec = rows.samples[row]
        assert spec is not None, "drafts are verified by sampling"
        token_ids = tuple(rows.input_ids[ends[row] - num_drafts : ends[row]])
        drafted.append(DraftedRow(row, logits[row] + 1, spec, token_ids))
    return tuple(drafted)


def plan_device_samples(inputs: InputBatch, vocab_size: int) -> SamplePlan:
    """`plan_samples` for a device: without the rows of the host, with all arrays to upload."""
    plan = plan_samples(inputs)
    if not plan.is_greedy:
        on_host = list(map(_ON_HOST, plan.rows.specs))
        if plan.drafted:  # the number of samples is known from their values alone
            drafts = inputs.rows.drafts
            on_host = [
                is_host or output in drafts
                for is_host, output in zip(on_host, plan.rows.outputs, strict=True)
            ]
        host_rows, rows = plan.rows.select(on_host), plan.rows.select(list(map(not_, on_host)))
        drafted = plan.drafted
        plan = _plan_of(plan.num_outputs, rows, plan.scored, is_greedy=False)
        parameters = row_parameters(rows.specs, vocab_size, rows.future_indices)
        penalized = tuple(row for row, spec in enumerate(rows.specs) if spec.params.has_penalty)
        plan = replace(
            plan,
            host_rows=host_rows,
            drafted=drafted,
            parameters=parameters,
            penalized=penalized,
        )
    arrays = dict(plan.parameters.arrays)
    if plan.has_gaps:
        arrays["outputs"] = plan.sampled_outputs
    if not plan.is_whole:
        arrays["sampled_rows"] = np.array(plan.rows.logits, np.int64)
    if plan.scored:
        targets = [scoring.targets for scoring in plan.scored]
        arrays["targets"] = np.concatenate(targets, dtype=np.int64)
    if plan.penalized:
        arrays |= _penalty_slots(plan, inputs.rows)
    return replace(plan, arrays=arrays) if arrays else plan


def _plan_of(
    num_outputs: int, rows: SampledRows, scored: tuple[Scoring, ...], *, is_greedy: bool
) -> SamplePlan:
    in_order = list(range(len(rows.specs)))
    return SamplePlan(
        num_outputs=num_outputs,
        num_sampled=len(in_order),
        rows=rows,
        is_greedy=is_greedy,
        has_gaps=len(in_order) != num_outputs or rows.outputs != in_order,
        is_whole=rows.logits == in_order,
        scored=scored,
        has_grammar=not is_greedy and any(map(_MATCHER, rows.specs)),
    )


@functools.lru_cache(maxsize=512)
def _greedy_rows(num_rows: int) -> SamplePlan:
    """Plan for so many greedy rows with one row of logits each, whose columns it does not have."""
    plan = _plan_of(0, _NO_ROWS, (), is_greedy=True)
    return replace(plan, num_outputs=num_rows, num_sampled=num_rows)


def row_parameters(
    specs: Sequence[SampleSpec], vocab_size: int, future_indices: Sequence[int] = ()
) -> RowParameters:
    """All sampling parameters of rows besides their penalties on the host. future_indices: of rows
    that may follow a token of the step in flight."""
    arrays: dict[str, NDArray[Any]] = {}
    params = [spec.params for spec in specs]
    if not all(p.is_greedy for p in params):
        arrays |= _distribution_arrays(specs)
    tops = [(row, p.logprobs) for row, p in enumerate(params) if p.logprobs is not None]
    wants_logprobs, num_top = np.array(tops, np.int64).reshape(-1, 2).T
    if tops:
        arrays["logprob_rows"] = np.ascontiguousarray(wants_logprobs)
    logprob_ids = _logprob_ids([params[row] for row, _ in tops])
    if logprob_ids:
        arrays["logprob_ids"] = _padded(logprob_ids)
    arrays |= bias_arrays(specs)
    arrays |= ban_arrays(specs, future_indices)
    return RowParameters(wants_logprobs, np.minimum(num_top, vocab_size), logprob_ids, arrays)


def _logprob_ids(params: Sequence[SamplingParams]) -> tuple[tuple[int, ...], ...]:
    """The tokens that each row wants reported; nothing where no row names any."""
    if all(p.logprob_token_ids is None for p in params):
        return ()
    return tuple(tuple(p.logprob_token_ids or ()) for p in params)


def _padded(rows: Sequence[Sequence[int]]) -> IndexArray:
    """[m, longest] with zeros behind shorter rows."""
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, ids in enumerate(rows):
        padded[row, : len(ids)] = ids
    return padded


def _distribution_arrays(specs: Sequence[SampleSpec]) -> dict[str, NDArray[Any]]:
    """[n] each. Where the temperature is 0 nothing else counts: such rows may lack a history."""
    params = [spec.params for spec in specs]
    temperature = np.array([p.temperature for p in params])
    sampled = np.flatnonzero(temperature)
    uniform = np.full(len(specs), 0.5)
    uniform[sampled] = uniform_numbers([specs[row] for row in sampled.tolist()])
    top_k = np.clip(np.array([p.top_k for p in params], np.float64), 0, 2**31 - 1)
    return {
        "temperature": temperature.astype(np.float32),
        "top_k": top_k.astype(np.int32),
        "top_p": np.array([p.top_p for p in params], np.float64),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "uniform": uniform,
    }


def _penalty_slots(plan: SamplePlan, rows: ScheduledRows) -> dict[str, NDArray[Any]]:
    """[m] each, of the rows with penalties."""
    slots = [rows.slots[plan.rows.outputs[row]] for row in plan.penalized]
    return {
        "penalized_rows": np.array(plan.penalized, np.int64),
        "penalty_slots": np.array(slots, np.int64),
        **penalty_arrays([plan.rows.specs[row].params for row in plan.penalized]),
    }


def begin_device_bitmask(
    plan: SamplePlan, vocab_size: int, previous: Sequence[SampleOutput | None] | None = None
) -> GrammarBitmaskFuture:
    """The masks of the rows sampled on the device. previous: the outputs of the step before, where
    a row follows a token of that."""
    last_tokens: dict[int, int] = {}
    rows = plan.rows
    for row, (spec, future_index) in enumerate(zip(rows.specs, rows.future_indices, strict=True)):
        if spec.num_placeholders and previous is not None:
            output = previous[future_index]
            if output is not None and output.error is None:
                last_tokens[row] = output.token_id
    return GrammarBitmaskFuture(rows.specs, vocab_size, last_tokens)


def uniform_numbers(specs: Sequence[SampleSpec]) -> NDArray[np.float64]:
    """[S] numbers in (0, 1), each a pure function of its row's seed and index.

    Two rounds of splitmix64's finalizer (Steele, Lea and Flood 2014), as a counter-based generator.
    """
    seeds = np.array([spec.seed & (2**64 - 1) for spec in specs], np.uint64)
    index = np.array([spec.num_sampled for spec in specs], np.uint64)
    bits = _mix(_mix(seeds) + (index + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
