"""Rows that the best logit or a temperature alone decides, sampled by the compiled CPU code.

One pass over logits that are not in the caches, and no copy of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from radixserve.runner.grammar_masks import GrammarMasks
from radixserve.runner.random_stream import uniform_numbers
from radixserve.schedule import SampleOutput, SampleSpec
from radixserve_kernels import cpu_ops
from radixserve_kernels.cpu_library import is_loaded


def is_temperature_only(spec: SampleSpec) -> bool:
    """Whether `sample_temperature_only` can sample the row, where the kernels are loaded."""
    is_free = not spec.banned_ids or spec.matcher is not None  # else its mask says so
    return spec.params.is_temperature_only and is_free and not spec.num_candidates


def sample_temperature_only(
    logits: Tensor, specs: Sequence[SampleSpec], masks: GrammarMasks | None
) -> list[SampleOutput]:
    """`sampler.sample` for such rows: logits [S, V] float32 on the CPU."""
    rows = [row for row, spec in enumerate(specs) if not spec.params.is_greedy]
    if not rows:
        found = cpu_ops.argmax(logits) if masks is None else masks.best_tokens(logits)
        return _outputs(logits, *found)
    temperature = np.array([spec.params.temperature for spec in specs], np.float32)
    uniform = np.full(len(specs), 0.5)
    uniform[rows] = uniform_numbers([specs[row] for row in rows])
    if masks is None:
        masks = GrammarMasks((), (), np.empty((0, -(-logits.shape[1] // 32)), np.int32))
    return _outputs(logits, *masks.sample(logits, temperature, uniform))


def sample_greedy(logits: Tensor) -> list[SampleOutput]:
    """The best token of each row, also without the kernels."""
    if is_loaded():  # not compiled for this alone: the torch backend was asked for, then
        return _outputs(logits, *cpu_ops.argmax(logits))
    rows = logits.numpy()
    places = rows.argmax(-1)  # the first NaN where there is one; far faster than torch's
    num_broken = int((~np.isfinite(rows[np.arange(len(rows)), places])).sum())
    return _outputs(logits, places.tolist(), num_broken)


def _outputs(logits: Tensor, token_ids: list[int], num_broken: int) -> list[SampleOutput]:
    """num_broken: rows whose best logit is not finite, or which have none that is allowed (-1)."""
    outputs = [SampleOutput(token_id, None, ()) for token_id in token_ids]
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
    return SampleOutput(-1, None, (), f"no token can be sampled: {reason}")
