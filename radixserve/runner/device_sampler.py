"""From logits to tokens on the device, without waiting for them: `launch`, then `collect`.

Samples as sampler.py does. The tokens stay on the device too, where the next step can take them
before the host has seen them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.runner.grammar_bitmask import GrammarBitmask
from radixserve.runner.logits_processing import process_logits
from radixserve.runner.penalties import TokenCounts
from radixserve.runner.sample_plan import SamplePlan
from radixserve.runner.sampler import (
    add_logprobs,
    choose_tokens,
    sample,
    score_tensors,
    scored_output,
    token_logprobs,
    verify_drafts,
    with_scores,
)
from radixserve.runner.transfers import D2HBuffer, DeviceQueue, H2DBuffer, PendingD2H
from radixserve.schedule import SampleOutput, ScheduledRows
from radixserve_kernels import gpu_ops

_BROKEN = SampleOutput(-1, error="no token can be sampled: the best logit is not finite")


@dataclass(frozen=True, slots=True)
class PendingSample:
    """A step's queued sampling and scoring."""

    plan: SamplePlan
    tokens: Tensor  # [num_outputs] int64 on the device, 0 where the host samples or none is
    transfer: PendingD2H  # sampled tokens; log-probabilities; then each scoring's
    logits: Tensor | None  # [S, V] of the step, kept for the rows sampled on the host
    masks: GrammarBitmask | None  # of the rows with a grammar


class DeviceSampler:
    """Keeps token counts of requests with penalties, see `TokenCounts`, and buffers."""

    def __init__(self, queue: DeviceQueue, num_slots: int, vocab_size: int) -> None:
        self._d2h = D2HBuffer(queue)
        self._bitmasks = H2DBuffer(queue, 0)
        self._counts = TokenCounts(num_slots, vocab_size, queue.device)
        self._no_token = torch.tensor(-1, device=queue.device)  # a plain -1 would be put there anew

    def plan(self, plan: SamplePlan, rows: ScheduledRows) -> dict[str, NDArray[Any]]:
        """All that `launch` needs on the device; for every step, once and in order."""
        penalized = [(plan.rows.outputs[row], plan.rows.specs[row]) for row in plan.penalized]
        return plan.arrays | self._counts.plan(rows, penalized)

    def launch(
        self,
        logits: Tensor,
        plan: SamplePlan,
        tensors: dict[str, Tensor],
        previous: Tensor,
        *,
        in_graph_buffer: bool,
        masks: GrammarBitmask | None = None,
    ) -> PendingSample:
        """Queue all rows. logits [S, V] float32; in_graph_buffer: the next step overwrites them.

        tensors: the arrays of `self.plan` on the device. previous [n] int64: the tokens that the
        previous step sampled, by output. masks: of the rows with a grammar.
        """
        sampled_logits = logits[: plan.num_sampled]
        if not plan.is_whole:
            sampled_logits = logits.index_select(0, tensors["sampled_rows"])
        penalties = partial(self._penalize, plan=plan, tensors=tensors, previous=previous)
        changed = process_logits(sampled_logits, tensors, penalties, previous)
        if masks is not None:
            own = changed.clone() if changed is sampled_logits else changed
            changed = self._mask(own, masks)
        token_ids, is_finite = choose_tokens(changed, tensors)
        if plan.penalized:
            penalized = token_ids.index_select(0, tensors["penalized_rows"])
            self._counts.add(penalized, tensors["penalty_slots"])
        tokens = token_ids
        if plan.has_gaps:
            tokens = token_ids.new_zeros(plan.num_outputs)
            tokens.index_copy_(0, tensors["outputs"], token_ids)
        results = [torch.where(is_finite, token_ids, self._no_token)]
        results += token_logprobs(sampled_logits, token_ids, plan.parameters, tensors)
        results += _scores(logits, plan, tensors)
        kept = None
        if plan.host_rows.specs:
            kept = logits.clone() if in_graph_buffer else logits
        return PendingSample(plan, tokens, self._d2h.fetch(results), kept, masks)

    def collect(self, pending: PendingSample) -> tuple[SampleOutput | None, ...]:
        """Wait for the tokens; one entry for each output of the schedule."""
        plan, transfer = pending.plan, pending.transfer
        transfer.event.wait()
        arrays = iter(transfer.arrays)
        sampled = _read_samples(plan, arrays)
        if pending.masks is not None:
            pending.masks.note_outputs(sampled)
        outputs: list[SampleOutput | None] = list(sampled)
        if plan.has_gaps:
            outputs = [None] * plan.num_outputs
            for row, output in zip(plan.rows.outputs, sampled, strict=True):
                outputs[row] = output
        if pending.logits is not None:
            _sample_on_host(plan, pending.logits, outputs)
        for scoring in plan.scored:
            num_arrays = 1 + scoring.wants_ranks + 2 * bool(scoring.num_top_logprobs)
            columns = [column.tolist() for column in itertools.islice(arrays, num_arrays)]
            scored = scored_output(columns, wants_ranks=scoring.wants_ranks)
            outputs[scoring.output] = with_scores(outputs[scoring.output], scored)
        self._d2h.release(transfer)
        return tuple(outputs)

    def _mask(self, logits: Tensor, masks: GrammarBitmask) -> Tensor:
        """Logits [n, V] of the sampled rows, changed in place."""
        rows = np.array(masks.rows, np.int64)
        arrays: dict[str, NDArray[Any]] = {"bitmask": masks.bitmask, "rows": rows}
        sent = self._bitmasks.send(arrays)
        gpu_ops.forbid_(logits, sent["bitmask"], sent["rows"])
        return logits

    def _penalize(
        self, logits: Tensor, plan: SamplePlan, tensors: dict[str, Tensor], previous: Tensor
    ) -> Tensor:
        """Logits [n, V] of the sampled rows, after penalties; a copy if there are any."""
        if not plan.penalized:
            return logits
        if len(plan.penalized) == plan.num_sampled:
            return self._counts.apply(logits, tensors, previous)
        rows = tensors["penalized_rows"]
        changed = self._counts.apply(logits.index_select(0, rows), tensors, previous)
        return logits.index_copy(0, rows, changed)


def _scores(logits: Tensor, plan: SamplePlan, tensors: dict[str, Tensor]) -> list[Tensor]:
    """`score_tensors` of each scoring; one at a time, as its rows may be all of a prompt."""
    results: list[Tensor] = []
    first = 0
    for scoring in plan.scored:
        count = len(scoring.targets)
        targets = tensors["targets"][first : first + count]
        rows = logits[scoring.logit : scoring.logit + count]
        results += score_tensors(
            rows, targets, scoring.num_top_logprobs, wants_ranks=scoring.wants_ranks
        )
        first += count
    return results


def _read_samples(plan: SamplePlan, arrays: Iterator[NDArray[Any]]) -> list[SampleOutput]:
    """The outputs of the rows sampled on the device, in their order."""
    token_ids, parameters = next(arrays), plan.parameters
    outputs = list(map(SampleOutput, token_ids.tolist()))
    if len(parameters.wants_logprobs):
        columns = itertools.islice(arrays, parameters.num_logprob_columns)
        add_logprobs(outputs, parameters, [column.tolist() for column in columns])
    if (token_ids < 0).any():
        outputs = [_BROKEN if output.token_id < 0 else output for output in outputs]
    return outputs


def _sample_on_host(plan: SamplePlan, logits: Tensor, outputs: list[SampleOutput | None]) -> None:
    """Sample at once all that needs no turns: each call waits for the device."""
    rows, places, specs = plan.host_rows, list(plan.host_rows.logits), list(plan.host_rows.specs)
    drafted = [row for row in plan.drafted if not row.needs_turns]
    for row in drafted:
        places += range(row.logit, row.logit + len(row.token_ids))
        specs += row.later_specs()
    index = torch.tensor(places, device=logits.device)
    sampled = iter(sample(logits.index_select(0, index), specs))
    for number in rows.outputs:
        outputs[number] = next(sampled)
    known = {row.output: list(itertools.islice(sampled, len(row.token_ids))) for row in drafted}
    verify_drafts(logits, plan, outputs, known)
