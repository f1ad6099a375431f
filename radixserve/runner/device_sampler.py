"""From logits to tokens on the device, without waiting for them: `launch`, then `collect`.

Samples as sampler.py does. The tokens stay on the device too, where the next step can take them
before the host has seen them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.runner.grammar_masks import GrammarMasks
from radixserve.runner.logits_processing import add_bias, forbid
from radixserve.runner.sample_plan import SamplePlan
from radixserve.runner.sampler import sample, score_tensors, scored_output, with_scores
from radixserve.runner.token_counts import TokenCounts
from radixserve.runner.transfers import D2HBuffer, DeviceQueue, H2DBuffer, PendingD2H
from radixserve.schedule import SampleOutput, ScheduledRequest, new_tuple
from radixserve_kernels import gpu_ops

_PLAIN = SampleOutput(0, None, ())[1:]
_BROKEN = SampleOutput(-1, None, (), "no token can be sampled: the best logit is not finite")
_Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class PendingSample:
    """A step's queued sampling and scoring."""

    plan: SamplePlan
    tokens: Tensor  # [num_outputs] int64 on the device, 0 where the host samples or none is
    transfer: PendingD2H  # sampled tokens; log-probabilities; then each scoring's
    logits: Tensor | None  # [S, V] of the step, kept for the rows sampled on the host
    masks: GrammarMasks | None  # of the rows with a grammar


class DeviceSampler:
    """Keeps token counts of requests with penalties, see `TokenCounts`, and buffers."""

    def __init__(self, queue: DeviceQueue, num_slots: int, vocab_size: int) -> None:
        self._d2h = D2HBuffer(queue)
        self._bitmasks = H2DBuffer(queue, 0)
        self._counts = TokenCounts(num_slots, vocab_size, queue.device)
        self._no_token = torch.tensor(-1, device=queue.device)  # a plain -1 would be put there anew

    def plan(
        self, plan: SamplePlan, requests: Sequence[ScheduledRequest]
    ) -> dict[str, NDArray[Any]]:
        """All that `launch` needs on the device; for every step, once and in order."""
        return plan.arrays | self._counts.plan(requests, plan.penalized)

    def launch(
        self,
        logits: Tensor,
        plan: SamplePlan,
        tensors: dict[str, Tensor],
        previous: Tensor,
        *,
        in_graph_buffer: bool,
        masks: GrammarMasks | None = None,
    ) -> PendingSample:
        """Queue all rows. logits [S, V] float32; in_graph_buffer: the next step overwrites them.

        tensors: the arrays of `self.plan` on the device. previous [n] int64: the tokens that the
        previous step sampled, by output. masks: of the rows with a grammar.
        """
        sampled_logits = logits[: plan.num_sampled]
        if not plan.is_whole:
            sampled_logits = logits.index_select(0, tensors["sampled_rows"])
        changed = self._penalize(add_bias(sampled_logits, tensors), plan, tensors, previous)
        changed = forbid(changed, tensors, previous)
        if masks is not None:
            own = changed.clone() if changed is sampled_logits else changed
            changed = self._mask(own, masks)
        token_ids, is_finite = _sample_rows(changed, tensors)
        if plan.penalized:
            penalized = token_ids.index_select(0, tensors["penalized_rows"])
            self._counts.add(penalized, tensors["penalty_slots"])
        tokens = token_ids
        if plan.has_gaps:
            tokens = token_ids.new_zeros(plan.num_outputs)
            tokens.index_copy_(0, tensors["outputs"], token_ids)
        results = [torch.where(is_finite, token_ids, self._no_token)]
        if len(plan.wants_logprobs):
            results += _logprobs(sampled_logits, token_ids, plan, tensors)
        results += _scores(logits, plan, tensors)
        kept = None
        if plan.host_sampled:
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
            for at, output in zip(plan.outputs.tolist(), sampled, strict=True):
                outputs[at] = output
        if pending.logits is not None:
            _sample_on_host(plan, pending.logits, outputs)
        for scoring in plan.scored:
            num_arrays = 3 if scoring.num_top_logprobs else 1
            found = (one.tolist() for one in itertools.islice(arrays, num_arrays))
            outputs[scoring.output] = with_scores(outputs[scoring.output], scored_output(*found))
        self._d2h.release(transfer)
        return tuple(outputs)

    def _mask(self, logits: Tensor, masks: GrammarMasks) -> Tensor:
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


def _sample_rows(logits: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Token ids [n] int64, 0 where the best logit is not finite, and whether it is [n] bool."""
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


def _logprobs(
    logits: Tensor, token_ids: Tensor, plan: SamplePlan, tensors: dict[str, Tensor]
) -> list[Tensor]:
    """Logprobs of the rows that request them: own [m], best [m, K] and their ids."""
    rows = tensors["logprob_rows"]
    logprobs = logits.index_select(0, rows).log_softmax(-1)
    own = logprobs.gather(1, token_ids.index_select(0, rows)[:, None])[:, 0]
    most = int(plan.num_top_logprobs.max())
    return [own, *logprobs.topk(most, -1)] if most else [own]


def _scores(logits: Tensor, plan: SamplePlan, tensors: dict[str, Tensor]) -> list[Tensor]:
    """`score_tensors` of each scoring; one at a time, as its rows may be all of a prompt."""
    found: list[Tensor] = []
    first = 0
    for scoring in plan.scored:
        count = len(scoring.targets)
        targets = tensors["targets"][first : first + count]
        rows = logits[scoring.logit : scoring.logit + count]
        found += score_tensors(rows, targets, scoring.num_top_logprobs)
        first += count
    return found


def _read_samples(plan: SamplePlan, arrays: Iterator[NDArray[Any]]) -> list[SampleOutput]:
    """The outputs of the rows sampled on the device, in their order."""
    token_ids = next(arrays)
    values = zip(token_ids.tolist(), *map(itertools.repeat, _PLAIN), strict=False)
    outputs = [new_tuple(SampleOutput, one) for one in values]
    if len(plan.wants_logprobs):
        own = next(arrays).tolist()
        tops: list[_Top] = [()] * len(own)
        if plan.num_top_logprobs.any():
            counts, values, ids = (
                one.tolist() for one in (plan.num_top_logprobs, next(arrays), next(arrays))
            )
            tops = [
                tuple(itertools.islice(zip(*pair, strict=True), count))
                for count, *pair in zip(counts, ids, values, strict=True)
            ]
        for at, logprob, top in zip(plan.wants_logprobs.tolist(), own, tops, strict=True):
            outputs[at] = outputs[at]._replace(logprob=logprob, top_logprobs=top)
    if (token_ids < 0).any():
        outputs = [_BROKEN if output.token_id < 0 else output for output in outputs]
    return outputs


def _sample_on_host(plan: SamplePlan, logits: Tensor, outputs: list[SampleOutput | None]) -> None:
    places = torch.tensor([row.logit for row in plan.host_sampled], device=logits.device)
    sampled = sample(logits.index_select(0, places), [row.spec for row in plan.host_sampled])
    for row, output in zip(plan.host_sampled, sampled, strict=True):
        outputs[row.output] = output
