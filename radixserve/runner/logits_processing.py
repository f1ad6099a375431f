"""Changes of the logits by a request's parameters, before temperature, filters and the sample.

In this order: logits_processors, logit_bias, penalties, then masks: all but allowed_token_ids, the
last tokens of bad_words, end tokens that min_tokens still forbids, and tokens that a grammar
excludes. Bias, allowed and forbidden tokens are arrays made on the host and applied with tensor
operations, here and on a device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.request import LogitsProcessor
from radixserve.schedule import SampleOutput, SampleSpec

IndexArray = NDArray[np.int64]


def process_logits(
    logits: Tensor,
    tensors: Mapping[str, Tensor],
    penalties: Callable[[Tensor], Tensor],
    previous: Tensor | None = None,
) -> Tensor:
    """Bias, penalties and bans: logits [S, V] float32 -> [S, V]; a copy if there are any.

    tensors: what `bias_arrays` and `ban_arrays` made, where the logits are. previous [n]: the
    tokens that the step in flight samples, by output.
    """
    return forbid(penalties(add_bias(logits, tensors)), tensors, previous)


# -- logits_processors ----------------------------------------------------------------------------


def run_processors(
    logits: Tensor, specs: Sequence[SampleSpec]
) -> tuple[Tensor, dict[int, SampleOutput]]:
    """Logits [S, V] after the rows' logits_processors, a copy if there are any; and by row the
    errors that these raised."""
    rows = [row for row, spec in enumerate(specs) if spec.params.logits_processors]
    if not rows:
        return logits, {}
    changed, failed = logits.clone(), {}
    for row in rows:
        spec, own = specs[row], logits[row].clone()
        prompt, output = np.split(spec.token_ids, [spec.num_prompt])
        try:
            for processor in spec.params.logits_processors:
                given = (prompt, output) if _takes_prompt(processor) else (output,)
                own = _as_logits(processor(*(ids.tolist() for ids in given), own), logits[row])
        except Exception as cause:
            message = f"a function of logits_processors failed: {cause!r}"
            failed[row] = SampleOutput(-1, error=message, cause=cause)
            continue
        changed[row] = own
    return changed, failed


def _as_logits(returned: Any, logits: Tensor) -> Tensor:
    if not isinstance(returned, Tensor) or returned.shape != logits.shape:
        got = list(returned.shape) if isinstance(returned, Tensor) else type(returned).__name__
        raise ValueError(f"it must return a tensor {list(logits.shape)} of logits, got {got}")
    return returned.to(logits)


def _takes_prompt(processor: LogitsProcessor) -> bool:
    try:
        arguments = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # it has no signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in arguments if each.kind in kinds and each.default is each.empty]
    return len(needed) == 3


# -- logit_bias, allowed_token_ids, bad_words, min_tokens -----------------------------------------


def bias_arrays(specs: Sequence[SampleSpec]) -> dict[str, NDArray[Any]]:
    """The rows' logit_bias: row, token id and number of each; empty arrays without any."""
    rows = [row for row, spec in enumerate(specs) if spec.params.logit_bias]
    if not rows:
        return {}
    each = [specs[row].params.bias_arrays for row in rows]
    return {
        "bias_rows": np.repeat(np.array(rows, np.int64), [len(ids) for ids, _ in each]),
        "bias_ids": np.concatenate([ids for ids, _ in each]),
        "bias": np.concatenate([values for _, values in each]),
    }


def add_bias(logits: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Logits [S, V] with what `bias_arrays` adds."""
    if "bias" not in tensors:
        return logits
    cells = tensors["bias_rows"], tensors["bias_ids"]
    return logits.index_put(cells, tensors["bias"].to(logits.dtype), accumulate=True)


class _ConditionalBan(NamedTuple):
    """A token forbidden only if the token that the step in flight samples is `needed`."""

    row: int
    token_id: int
    needed: int


def ban_arrays(
    specs: Sequence[SampleSpec], future_indices: Sequence[int] = ()
) -> dict[str, NDArray[Any]]:
    """The tokens that rows may not sample; empty if there are none.

    future_indices: of each row, the output of the step in flight that is its last token.
    """
    arrays: dict[str, NDArray[Any]] = {}
    allowed = [row for row, spec in enumerate(specs) if spec.params.allowed_token_ids is not None]
    if allowed:
        ids = [specs[row].params.allowed_array for row in allowed]
        arrays["allowed_rows"] = np.array(allowed, np.int64)
        arrays["allowed_index"] = np.repeat(np.arange(len(allowed)), list(map(len, ids)))
        arrays["allowed_ids"] = np.concatenate(ids)
    banned: list[tuple[int, int]] = []
    conditional: list[_ConditionalBan] = []
    for row, spec in enumerate(specs):
        if spec.matcher is None:  # else its mask forbids it
            banned += [(row, token_id) for token_id in spec.banned_ids]
        if spec.bad_words_ids:
            last_ids, conditional_pairs = _bad_words(spec)
            banned += [(row, token_id) for token_id in last_ids]
            conditional += [_ConditionalBan(row, *pair) for pair in conditional_pairs]
    if banned:
        arrays["banned_rows"], arrays["banned_ids"] = _columns(banned)
    if conditional:
        columns = _columns(conditional)
        arrays["conditional_rows"], arrays["conditional_ids"], arrays["conditional_needed"] = (
            columns
        )
        arrays["conditional_outputs"] = np.array(
            [future_indices[ban.row] for ban in conditional], np.int64
        )
    return arrays


def forbid(logits: Tensor, tensors: Mapping[str, Tensor], previous: Tensor | None = None) -> Tensor:
    """Logits [S, V] with what `ban_arrays` forbids at -inf. previous [n]: the tokens that the step
    before samples, by output."""
    if "allowed_ids" in tensors:
        rows = tensors["allowed_rows"]
        some = logits.index_select(0, rows)
        is_banned = torch.ones_like(some, dtype=torch.bool)
        is_banned[tensors["allowed_index"], tensors["allowed_ids"]] = False
        logits = logits.index_copy(0, rows, some.masked_fill(is_banned, -torch.inf))
    if "banned_ids" in tensors:
        cells = tensors["banned_rows"], tensors["banned_ids"]
        logits = logits.index_put(cells, logits.new_full((), -torch.inf))
    if "conditional_ids" in tensors:
        assert previous is not None
        sampled = previous.index_select(0, tensors["conditional_outputs"])
        zeros = torch.zeros_like(sampled, dtype=logits.dtype)
        change = zeros.masked_fill(sampled == tensors["conditional_needed"], -torch.inf)
        cells = tensors["conditional_rows"], tensors["conditional_ids"]
        logits = logits.index_put(cells, change, accumulate=True)
    return logits


def _bad_words(spec: SampleSpec) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokens that would complete a bad word; and (token, the unknown last token that is needed)."""
    output = spec.token_ids[spec.num_prompt :]
    banned, conditional = [], []
    assert spec.num_placeholders <= 1, "more than one step is in flight"
    for *before, last in spec.bad_words_ids:
        known = before[: len(before) - spec.num_placeholders]
        if len(before) > spec.num_sampled or output[len(output) - len(known) :].tolist() != known:
            continue
        if before and spec.num_placeholders:
            conditional.append((last, before[-1]))
        else:
            banned.append(last)
    return banned, conditional


def _columns(pairs: Sequence[tuple[int, ...]]) -> tuple[IndexArray, ...]:
    return tuple(np.ascontiguousarray(column) for column in np.array(pairs, np.int64).T)
