"""From logits to tokens, for all sampled rows of a step at once.

It knows each row's parameters (`SampleSpec`) and keeps nothing between calls: a row's token depends
on its own logits, parameters, seed and index only, whatever the rest of the batch. On the CPU,
compiled code samples greedy rows and rows with a temperature only, in one pass over the logits and
without a copy. All other rows take the tensor operations that device_sampler.py queues on a device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.arrays import IntArray
from radixserve.runner.grammar_bitmask import GrammarBitmask, GrammarBitmaskFuture, begin_bitmask
from radixserve.runner.logits_processing import (
    ban_arrays,
    bias_arrays,
    process_logits,
    run_processors,
)
from radixserve.runner.penalties import apply_penalties
from radixserve.runner.sample_plan import (
    DraftedRow,
    RowParameters,
    SamplePlan,
    are_greedy_only,
    row_parameters,
    uniform_numbers,
)
from radixserve.schedule import Candidates, SampleOutput, SampleSpec
from radixserve_kernels import cpu_ops, gpu_ops
from radixserve_kernels.cpu_library import is_loaded
from radixserve_kernels.sampling import best_tokens

SCORED_AT_ONCE = 512  # rows of logits
SAMPLED_AT_ONCE = 1 << 19  # logits on the CPU: what is made of them stays in its caches

SampleFunction = Callable[[Tensor, Sequence[SampleSpec], GrammarBitmask | None], list[SampleOutput]]
TopLogprobs = tuple[tuple[int, float], ...]


def sample_step(
    logits: Tensor, plan: SamplePlan, mask_future: GrammarBitmaskFuture | None = None
) -> tuple[SampleOutput | None, ...]:
    """The outputs of a step: a token or scores for each row that asks for them.

    logits [S, V] float32, left unchanged; mask_future: the masks of the rows with a grammar.
    """
    if plan.is_greedy and plan.is_whole and not plan.has_gaps and not plan.scored:
        return tuple(sample_greedy(logits))  # without drafts: `is_greedy` is false with them
    if plan.drafted and not plan.scored and not plan.has_gaps and are_greedy_only(plan.rows.specs):
        return _sample_greedy_drafts(logits, plan)
    return _sample_and_score(logits, plan, mask_future)


@torch.inference_mode()
def _sample_and_score(
    logits: Tensor, plan: SamplePlan, mask_future: GrammarBitmaskFuture | None
) -> tuple[SampleOutput | None, ...]:
    """`sample_step` of rows that are not just greedy."""
    rows = plan.rows
    sampled_logits = logits if plan.is_whole else logits[rows.logits]
    sampled = sample(sampled_logits[: plan.num_sampled], rows.specs, mask_future)
    outputs: list[SampleOutput | None] = [None] * plan.num_outputs
    for row, output in zip(rows.outputs, sampled, strict=True):
        outputs[row] = output
    for scoring in plan.scored:
        targets = scoring.targets
        target_logits = logits[scoring.logit : scoring.logit + len(targets)]
        scored = score(
            target_logits, targets, scoring.num_top_logprobs, wants_ranks=scoring.wants_ranks
        )
        outputs[scoring.output] = with_scores(outputs[scoring.output], scored)
    verify_drafts(logits, plan, outputs)
    return tuple(outputs)


def _sample_greedy_drafts(logits: Tensor, plan: SamplePlan) -> tuple[SampleOutput | None, ...]:
    """The outputs of greedy rows, some with drafts, by one look at all logits."""
    samples = sample_greedy(logits)
    outputs: list[SampleOutput | None] = [samples[logit] for logit in plan.rows.logits]
    known = {
        row.output: samples[row.logit : row.logit + len(row.token_ids)] for row in plan.drafted
    }
    verify_drafts(logits, plan, outputs, known)
    return tuple(outputs)


def verify_drafts(
    logits: Tensor,
    plan: SamplePlan,
    outputs: list[SampleOutput | None],
    known: Mapping[int, Sequence[SampleOutput]] | None = None,
) -> None:
    """Add the further samples to the outputs of rows with drafts, whose first token is sampled.

    logits [S, V] of the step. known: by output the samples after each draft, where they were made.
    The sample after a draft counts only if the draft equals the sample before it: each sample
    follows the request's own tokens, as without drafts.
    """
    known = known or {}
    for row in plan.drafted:
        first = output = outputs[row.output]
        assert first is not None
        assert output is not None
        more: list[SampleOutput] = []
        samples = iter(known.get(row.output) or _samples_after(logits, row))
        for draft in row.token_ids:
            if output.token_id != draft or output.is_complete:
                break
            output = next(samples)
            if output.error is not None:  # the next step finds it, before the K/V is published
                break
            more.append(output)
        if more:
            outputs[row.output] = first._replace(more=tuple(more))


def _samples_after(logits: Tensor, row: DraftedRow) -> Iterator[SampleOutput]:
    """Yields the sample after each draft, if that and those before it are right: made in turns
    where the row needs that, else at once."""
    if row.needs_turns:
        for index, spec in enumerate(row.later_specs(), row.logit):
            yield from sample(logits[index : index + 1], [spec])
    else:
        yield from sample(logits[row.logit : row.logit + len(row.token_ids)], row.later_specs())


def sample(
    logits: Tensor, specs: Sequence[SampleSpec], mask_future: GrammarBitmaskFuture | None = None
) -> list[SampleOutput]:
    """Sample one token a row, or list the best ones (for a beam).

    logits [S, V] float32, row r for specs[r]; left unchanged. Order: logits_processing.py, then
    temperature, min_p, top_k, top_p, the sample. Log-probabilities are those of `logits`.
    A row without a finite best logit gets an error instead of a token; others are not touched.
    mask_future: the masks of the specs' grammars, where they are being computed already.
    """
    if not specs:
        return []
    if logits.is_cpu and are_greedy_only(specs):
        return sample_greedy(logits)
    if mask_future is None:
        mask_future = begin_bitmask(specs, logits.shape[1])
    masks = None if mask_future is None else mask_future.get()
    outputs = _sample_by_kind(logits, specs, masks)
    if masks is not None:
        masks.note_outputs(outputs)
    return outputs


def _sample_by_kind(
    logits: Tensor, specs: Sequence[SampleSpec], masks: GrammarBitmask | None
) -> list[SampleOutput]:
    """Sample beams, rows for the compiled code, and other rows in one pass per kind."""
    is_native = logits.is_cpu and is_loaded()
    kinds: dict[SampleFunction, list[int]] = {}
    for row, spec in enumerate(specs):
        function: SampleFunction = best_candidates if spec.num_candidates else _sample_in_parts
        if is_native and _is_temperature_only(spec):
            function = _sample_temperature_only
        kinds.setdefault(function, []).append(row)
    if len(kinds) == 1:
        return next(iter(kinds))(logits, specs, masks)
    outputs = [SampleOutput(-1)] * len(specs)
    for function, rows in kinds.items():
        index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
        own = None if masks is None else masks.select(rows)
        sampled = function(logits.index_select(0, index), [specs[row] for row in rows], own)
        for row, output in zip(rows, sampled, strict=True):
            outputs[row] = output
    return outputs


# -- compiled code --------------------------------------------------------------------------------


def sample_greedy(logits: Tensor) -> list[SampleOutput]:
    """The best token of each row of logits [S, V] float32 on the CPU, also without the kernels."""
    if is_loaded():  # not compiled for this alone: the torch backend was asked for, then
        return _best_outputs(logits, *cpu_ops.argmax(logits))
    rows = logits.numpy()
    token_ids = rows.argmax(-1)  # the first NaN where there is one; far faster than torch's
    num_broken = int((~np.isfinite(rows[np.arange(len(rows)), token_ids])).sum())
    return _best_outputs(logits, token_ids.tolist(), num_broken)


def _is_temperature_only(spec: SampleSpec) -> bool:
    """Whether `_sample_temperature_only` can sample the row, where the kernels are loaded."""
    is_free = not spec.banned_ids or spec.matcher is not None  # else its mask forbids them
    return spec.params.is_temperature_only and is_free and not spec.num_candidates


def _sample_temperature_only(
    logits: Tensor, specs: Sequence[SampleSpec], masks: GrammarBitmask | None
) -> list[SampleOutput]:
    rows = [row for row, spec in enumerate(specs) if not spec.params.is_greedy]
    if not rows:
        best = cpu_ops.argmax(logits) if masks is None else masks.best_tokens(logits)
        return _best_outputs(logits, *best)
    temperature = np.array([spec.params.temperature for spec in specs], np.float32)
    uniform = np.full(len(specs), 0.5)
    uniform[rows] = uniform_numbers([specs[row] for row in rows])
    if masks is None:
        masks = GrammarBitmask((), (), np.empty((0, -(-logits.shape[1] // 32)), np.int32))
    return _best_outputs(logits, *masks.sample(logits, temperature, uniform))


def _best_outputs(logits: Tensor, token_ids: list[int], num_broken: int) -> list[SampleOutput]:
    """num_broken: rows whose best logit is not finite, or which have none that is allowed (-1)."""
    outputs = list(map(SampleOutput, token_ids))
    if num_broken:
        for row, token_id in enumerate(token_ids):
            best = float(logits[row, token_id]) if token_id >= 0 else -math.inf
            if not math.isfinite(best):
                outputs[row] = broken_output(best)
    return outputs


def broken_output(best: float) -> SampleOutput:
    """The output of a row whose best logit is not finite."""
    reason = f"the best logit is {best}"
    if best == -math.inf:
        reason += "; all tokens are forbidden, by the request or by the model"
    return SampleOutput(-1, error=f"no token can be sampled: {reason}")


# -- tensor operations ----------------------------------------------------------------------------


def _sample_in_parts(
    logits: Tensor, specs: Sequence[SampleSpec], masks: GrammarBitmask | None
) -> list[SampleOutput]:
    outputs: list[SampleOutput] = []
    num_rows = max(1, SAMPLED_AT_ONCE // logits.shape[1]) if logits.is_cpu else len(specs)
    for first in range(0, len(specs), num_rows):
        rows = slice(first, first + num_rows)
        own = None if masks is None else masks.select(range(len(specs))[rows])
        outputs += _sample_rows(logits[rows], specs[rows], own)
    return outputs


def _sample_rows(
    logits: Tensor, specs: Sequence[SampleSpec], masks: GrammarBitmask | None
) -> list[SampleOutput]:
    processed, failed = run_processors(logits, specs)
    parameters = row_parameters(specs, logits.shape[1])
    tensors = _tensors(parameters.arrays, logits.device)
    changed = process_logits(processed, tensors, partial(apply_penalties, specs=specs))
    changed = changed if masks is None else masks.apply(changed)
    token_ids, is_finite = choose_tokens(changed, tensors)
    outputs = list(map(SampleOutput, token_ids.tolist()))
    logprobs = token_logprobs(logits, token_ids, parameters, tensors)
    add_logprobs(outputs, parameters, [column.tolist() for column in logprobs])
    for row in (~is_finite).nonzero()[:, 0].tolist():
        outputs[row] = broken_output(float(changed[row].amax()))
    for row, output in failed.items():
        outputs[row] = output
    return outputs


def _tensors(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def choose_tokens(logits: Tensor, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A token for each row, by the parameters that `row_parameters` has put into `tensors`.

    logits [n, V] float32. Returns ids [n] int64, 0 where the best logit is not finite, and whether
    it is, [n] bool.
    """
    if "temperature" not in tensors:
        return gpu_ops.argmax(logits)
    is_finite = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    token_ids = gpu_ops.sample(
        logits,
        tensors["temperature"],
        tensors["top_k"],
        tensors["top_p"],
        tensors["min_p"],
        tensors["uniform"],
        is_finite,
    )
    return token_ids, is_finite


def token_logprobs(
    logits: Tensor, token_ids: Tensor, parameters: RowParameters, tensors: Mapping[str, Tensor]
) -> list[Tensor]:
    """For the m rows that request log-probabilities: those of their tokens [m]; where any wants
    them, the best [m, K] and their token ids [m, K]; and where any names tokens, those of these
    [m, L]. Nothing where no row does."""
    if not len(parameters.wants_logprobs):
        return []
    rows = tensors["logprob_rows"]
    logprobs = logits.index_select(0, rows).log_softmax(-1)
    own = logprobs.gather(1, token_ids.index_select(0, rows)[:, None])[:, 0]
    most = int(parameters.num_top_logprobs.max())
    columns = [own, *logprobs.topk(most, -1)] if most else [own]
    if parameters.logprob_ids:
        columns.append(logprobs.gather(1, tensors["logprob_ids"]))
    return columns


def add_logprobs(
    outputs: list[SampleOutput], parameters: RowParameters, columns: Sequence[list[Any]]
) -> None:
    """Put the columns of `token_logprobs` into the outputs of the rows that request them."""
    if not columns:
        return
    own = columns[0]
    tops: list[TopLogprobs] = [()] * len(own)
    if parameters.num_top_logprobs.any():
        tops = [
            tuple(zip(ids[:count], values[:count], strict=True))
            for count, values, ids in zip(
                parameters.num_top_logprobs.tolist(), *columns[1:3], strict=True
            )
        ]
    for index, ids in enumerate(parameters.logprob_ids):
        if ids:
            tops[index] = tuple(zip(ids, columns[-1][index][: len(ids)], strict=True))
    for row, logprob, top in zip(parameters.wants_logprobs.tolist(), own, tops, strict=True):
        outputs[row] = outputs[row]._replace(logprob=logprob, top_logprobs=top)


# -- beams ----------------------------------------------------------------------------------------


def best_candidates(
    logits: Tensor, specs: Sequence[SampleSpec], masks: GrammarBitmask | None = None
) -> list[SampleOutput]:
    """The best tokens of each row by their log-probability after penalties and bans.

    logits [S, V] float32, left unchanged. Penalties change log-probabilities here, not logits, and
    nothing is normalised again: so transformers' beam search has it. A row with a NaN or without a
    possible token gets an error.
    """
    norm = logits.logsumexp(-1, keepdim=True)  # [S, 1]
    num_best = min(max(spec.num_candidates for spec in specs), logits.shape[1])
    if any(spec.banned_ids or spec.params.changes_logits for spec in specs):
        arrays = bias_arrays(specs) | ban_arrays(specs)
        tensors = _tensors(arrays, logits.device)
        changed = process_logits(logits - norm, tensors, partial(apply_penalties, specs=specs))
        changed = changed if masks is None else masks.apply(changed)
        scores, token_ids = best_tokens(changed, num_best)
        own = logits.gather(1, token_ids) - norm
    else:  # the best logits are the best tokens
        values, token_ids = best_tokens(logits, num_best)
        scores = own = values - norm
    top = _top_logprobs(logits, norm, specs)
    columns = [column.cpu().numpy() for column in (token_ids.to(torch.int32), scores, own)]
    outputs = []
    for row, (spec, best) in enumerate(zip(specs, columns[1][:, 0].tolist(), strict=True)):
        if not math.isfinite(best):
            outputs.append(broken_output(best))
            continue
        candidates = Candidates(*(column[row, : spec.num_candidates] for column in columns))
        outputs.append(SampleOutput(-1, None, top.get(row, ()), candidates=candidates))
    return outputs


def _top_logprobs(
    logits: Tensor, norm: Tensor, specs: Sequence[SampleSpec]
) -> dict[int, TopLogprobs]:
    """The most likely tokens of the rows that want to know them, by row: logits [S, V], norm [S, 1]
    the logarithm of the sum of their exponentials."""
    rows = [row for row, spec in enumerate(specs) if spec.params.logprobs]
    if not rows:
        return {}
    wanted = [min(specs[row].params.logprobs or 0, logits.shape[1]) for row in rows]
    index = torch.tensor(rows, device=logits.device)
    best, token_ids = best_tokens(logits.index_select(0, index), max(wanted))
    values, ids = (best - norm.index_select(0, index)).tolist(), token_ids.tolist()
    return {
        row: tuple(zip(ids[i][: wanted[i]], values[i][: wanted[i]], strict=True))
        for i, row in enumerate(rows)
    }


# -- scores ---------------------------------------------------------------------------------------


def score(
    logits: Tensor, targets: IntArray, num_top_logprobs: int = 0, *, wants_ranks: bool = False
) -> SampleOutput:
    """The log-probability of each target, and of the num_top_logprobs best tokens in its place;
    `wants_ranks`: and its rank, 1 for the most likely token.

    logits [k, V] float32, targets [k] token ids.
    """
    index = torch.from_numpy(targets.astype(np.int64)).to(logits.device)
    columns = score_tensors(logits, index, num_top_logprobs, wants_ranks=wants_ranks)
    return scored_output([column.tolist() for column in columns], wants_ranks=wants_ranks)


def score_tensors(
    logits: Tensor, targets: Tensor, num_top_logprobs: int, *, wants_ranks: bool
) -> tuple[Tensor, ...]:
    """`score` on the device of the logits: scores [k] of targets [k] int64; their ranks [k] if they
    are wanted; and if there are any, the best log-probabilities [k, num_top_logprobs] and their
    token ids.

    Takes memory for SCORED_AT_ONCE rows of logits, not for all k.
    """
    parts: list[list[Tensor]] = []
    num_top = min(num_top_logprobs, logits.shape[1])
    for rows, wanted in zip(
        logits.split(SCORED_AT_ONCE), targets.split(SCORED_AT_ONCE), strict=True
    ):
        logprobs = rows.log_softmax(-1)
        parts.append([logprobs.gather(1, wanted[:, None])[:, 0]])
        if wants_ranks:
            parts[-1].append((rows > rows.gather(1, wanted[:, None])).sum(-1) + 1)
        if num_top:
            parts[-1] += logprobs.topk(num_top, -1)
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def scored_output(columns: Sequence[Any], *, wants_ranks: bool) -> SampleOutput:
    """The result of `score_tensors`, as lists, as an output."""
    scores, ranks = columns[0], columns[1] if wants_ranks else ()
    values, ids = columns[1 + wants_ranks :] or ((), ())
    if any(map(math.isnan, scores)):
        error = "no token can be scored: there are logits that are no numbers"
        return SampleOutput(-1, error=error)
    top = tuple(tuple(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True))
    return SampleOutput(-1, scores=tuple(scores), top_scores=top, ranks=tuple(ranks))


def with_scores(output: SampleOutput | None, scored: SampleOutput) -> SampleOutput:
    """The output of a row that was sampled (or not, None) and scored."""
    if output is None or scored.error is not None:
        return scored
    return output._replace(scores=scored.scores, top_scores=scored.top_scores, ranks=scored.ranks)
