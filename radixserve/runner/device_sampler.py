"""From logits to tokens on the device, without waiting for them: `launch`, then `collect`.

Draws what sampler.py draws. The tokens stay on the device too, where the next step can take them
before the host has seen them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from radixserve.models.parallel import TPGroup
from radixserve.runner.device_queue import DeviceQueue
from radixserve.runner.readback import Parcel, Readback
from radixserve.runner.sample_plan import SamplePlan
from radixserve.runner.sampler import sample, score, with_scores
from radixserve.schedule import SampleOutput
from radixserve_kernels import gpu_ops

_BROKEN = SampleOutput(-1, None, (), "no token can be drawn: the best logit is not finite")
_Top = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """What was queued for one step."""

    plan: SamplePlan
    tokens: Tensor  # [num_outputs] int64 on the device, 0 where the host draws or none can be drawn
    parcel: Parcel
    logits: Tensor | None  # [S, V] of the step, kept where the host has something to do with them


class DeviceSampler:
    """Keeps nothing between steps but the memory of its copies to the host."""

    def __init__(self, queue: DeviceQueue, ranks: TPGroup | None = None) -> None:
        self._readback = Readback(queue)
        self._ranks = ranks

    def launch(
        self, logits: Tensor, plan: SamplePlan, there: dict[str, Tensor], *, is_lent: bool
    ) -> Drawing:
        """Queue all draws. logits [S, V] float32; `is_lent`: the next step may overwrite them.

        there: `plan.arrays` on the device.
        """
        kept = None
        if plan.hosted or plan.scored:
            kept = logits.clone() if is_lent else logits
        own = logits[: plan.num_drawn]
        if not plan.is_whole:
            own = logits.index_select(0, there["draw_rows"])
        token_ids, is_finite = _draw(own, plan, there)
        tokens = token_ids
        if plan.has_gaps:
            tokens = token_ids.new_zeros(plan.num_outputs).index_copy_(
                0, there["outputs"], token_ids
            )
        if self._ranks is not None:
            self._ranks.broadcast(tokens[: plan.num_rows])  # what comes behind them feeds no step
        told = [torch.where(is_finite, token_ids, -1)]
        if len(plan.wants_logprobs):
            told += _logprobs(own, token_ids, plan, there)
        return Drawing(plan, tokens, self._readback.fetch(told), kept)

    def follow(self, num_rows: int, device: torch.device) -> Tensor:
        """The tokens [num_rows] that rank 0 draws in this step, for the other ranks."""
        assert self._ranks is not None
        tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._ranks.broadcast(tokens)
        return tokens

    def collect(self, drawing: Drawing) -> tuple[SampleOutput | None, ...]:
        """Wait for the tokens; one entry for each output of the schedule."""
        plan, parcel = drawing.plan, drawing.parcel
        parcel.mark.wait()
        drawn = _read(plan, parcel)
        self._readback.release(parcel)
        outputs: list[SampleOutput | None] = list(drawn)
        if plan.has_gaps:
            outputs = [None] * plan.num_outputs
            for at, output in zip(plan.outputs.tolist(), drawn, strict=True):
                outputs[at] = output
        if drawing.logits is not None:
            _finish_on_host(plan, drawing.logits, outputs)
        return tuple(outputs)


def _draw(logits: Tensor, plan: SamplePlan, there: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Token ids [n] int64, 0 where the best logit is not finite, and whether it is [n] bool."""
    if "banned_ids" in plan.arrays:
        banned = there["banned_draws"], there["banned_ids"]
        logits = logits.index_put(banned, logits.new_full((), -torch.inf))
    if plan.is_greedy:
        return gpu_ops.argmax(logits)
    is_finite = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    token_ids = gpu_ops.sample(
        logits,
        there["temperature"],
        there["top_k"],
        there["top_p"],
        there["min_p"],
        there["uniform"],
        is_finite,
    )
    return token_ids, is_finite


def _logprobs(
    logits: Tensor, token_ids: Tensor, plan: SamplePlan, there: dict[str, Tensor]
) -> list[Tensor]:
    """Of the draws that want them: the token's own [m], and the best ones [m, K] and their ids."""
    draws = there["logprob_draws"]
    logprobs = logits.index_select(0, draws).log_softmax(-1)
    own = logprobs.gather(1, token_ids.index_select(0, draws)[:, None])[:, 0]
    most = int(plan.num_top_logprobs.max())
    return [own, *logprobs.topk(most, -1)] if most else [own]


def _read(plan: SamplePlan, parcel: Parcel) -> list[SampleOutput]:
    """The device draws, in their order."""
    told, *logprobs = parcel.arrays
    outputs = [SampleOutput(token_id, None, ()) for token_id in told.tolist()]
    if logprobs:
        tops: list[_Top] = [()] * len(plan.num_top_logprobs)
        if len(logprobs) > 1:
            counts, values, ids = (one.tolist() for one in (plan.num_top_logprobs, *logprobs[1:]))
            tops = [
                tuple(itertools.islice(zip(*pair, strict=True), count))
                for count, *pair in zip(counts, ids, values, strict=True)
            ]
        wanted = plan.wants_logprobs.tolist()
        for at, own, top in zip(wanted, logprobs[0].tolist(), tops, strict=True):
            outputs[at] = outputs[at]._replace(logprob=own, top_logprobs=top)
    if (told < 0).any():
        outputs = [_BROKEN if output.token_id < 0 else output for output in outputs]
    return outputs


def _finish_on_host(plan: SamplePlan, logits: Tensor, outputs: list[SampleOutput | None]) -> None:
    """Draw what depends on a history, and score; a row may be drawn from and scored."""
    if plan.hosted:
        places = torch.tensor([one.logit for one in plan.hosted], device=logits.device)
        drawn = sample(logits.index_select(0, places), [one.spec for one in plan.hosted])
        for one, output in zip(plan.hosted, drawn, strict=True):
            outputs[one.output] = output
    for scoring in plan.scored:
        rows = logits[scoring.logit : scoring.logit + len(scoring.logprob_targets)]
        outputs[scoring.output] = with_scores(
            outputs[scoring.output], score(rows, scoring.logprob_targets, scoring.num_top_logprobs)
        )
