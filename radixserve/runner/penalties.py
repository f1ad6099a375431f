"""Repetition, presence and frequency penalties.

One formula, `penalize`, over what a request has seen: on the CPU that comes from its tokens, step
by step; on a device from counts that stay there (`TokenCounts`), so that a step can be launched
before the host knows the tokens of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.request import SamplingParams
from radixserve.schedule import SampleSpec, ScheduledRows


def penalty_arrays(params: Sequence[SamplingParams]) -> dict[str, NDArray[Any]]:
    """[m] float32 each."""
    return {
        "repetition": np.array([p.repetition_penalty for p in params], np.float32),
        "frequency": np.array([p.frequency_penalty for p in params], np.float32),
        "presence": np.array([p.presence_penalty for p in params], np.float32),
    }


def penalize(
    logits: Tensor,
    num_sampled: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    is_seen: Tensor | None = None,
) -> Tensor:
    """Logits after the penalties, as in vLLM: repetition over prompt and output, presence and
    frequency over the output. All arguments broadcast.

    num_sampled: how often each token was sampled, in the dtype of the logits. is_seen: whether
    prompt or output have it; None: all do.
    """
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    if is_seen is not None:
        repeated = torch.where(is_seen, repeated, logits)
    return repeated - frequency * num_sampled - presence * (num_sampled > 0).to(logits.dtype)


def apply_penalties(logits: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
    """Logits [S, V] after the penalties of rows whose tokens are all known; a copy if there are
    any. O(tokens of these rows)."""
    rows = [row for row, spec in enumerate(specs) if spec.params.has_penalty]
    if not rows:
        return logits
    chosen, vocab_size = [specs[row] for row in rows], logits.shape[1]
    cell_ids = [
        spec.token_ids.astype(np.int64) + row * vocab_size
        for row, spec in zip(rows, chosen, strict=True)
    ]
    outputs = [ids[spec.num_prompt :] for ids, spec in zip(cell_ids, chosen, strict=True)]
    cells = np.unique(np.concatenate(cell_ids))
    sampled, counts = np.unique(np.concatenate(outputs), return_counts=True)
    num_sampled = np.zeros(len(cells), np.float32)
    num_sampled[np.searchsorted(cells, sampled)] = counts
    row_of = np.searchsorted(rows, cells // vocab_size)  # index into `rows`
    columns = {
        name: torch.from_numpy(column[row_of]).to(logits)
        for name, column in penalty_arrays([spec.params for spec in chosen]).items()
    }
    flat, index = logits.flatten().clone(), torch.from_numpy(cells).to(logits.device)
    flat[index] = penalize(flat[index], torch.from_numpy(num_sampled).to(logits), **columns)
    return flat.view_as(logits)


class TokenCounts:
    """Per `slot` and token id: whether the prompt has it, how often it was sampled.

    5 bytes for each slot and token id, allocated when a request with a penalty first samples. A
    slot is filled from `SampleSpec.token_ids` when another request takes it; after that every token
    that the device samples is added there.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots, self._vocab_size, self._device = num_slots, vocab_size, device
        self._in_prompt = torch.empty(0)  # [num_slots, V] bool
        self._num_sampled = torch.empty(0)  # [num_slots, V] int32
        self._counted: dict[int, tuple[str, int]] = {}  # by slot: request, number of its tokens

    def plan(
        self, rows: ScheduledRows, penalized: Sequence[tuple[int, SampleSpec]]
    ) -> dict[str, NDArray[Any]]:
        """Arrays for `apply`, to fill the slots that do not hold their request; for every step.

        penalized: the rows of the step that have penalties. A slot is filled again after its
        `first_new_page` was 0: it may be another request's by then.
        """
        if self._counted:
            for slot, first in zip(rows.slots, rows.first_new_pages, strict=True):
                if not first:
                    self._counted.pop(slot, None)
        stale, prompts, sampled, future = [], [], [], []
        for row, spec in penalized:
            slot = rows.slots[row]
            known = rows.request_ids[row], len(spec.token_ids) + spec.num_placeholders
            if self._counted.get(slot) != known:
                first_cell = slot * self._vocab_size
                ids = spec.token_ids.astype(np.int64) + first_cell
                stale.append(slot)
                prompts.append(ids[: spec.num_prompt])
                sampled.append(ids[spec.num_prompt :])
                if spec.num_placeholders:
                    assert spec.num_placeholders == 1, "more than one step is in flight"
                    future.append((first_cell, rows.future_indices[row]))
            self._counted[slot] = known[0], known[1] + 1
        if not stale:
            return {}
        arrays: dict[str, NDArray[Any]] = {
            "stale_slots": np.array(stale, np.int64),
            "prompt_cells": np.concatenate(prompts),
            "sampled_cells": np.concatenate(sampled),
        }
        if future:
            arrays["counted_first"], arrays["counted_outputs"] = np.array(future, np.int64).T
        return arrays

    def apply(self, logits: Tensor, tensors: dict[str, Tensor], previous: Tensor) -> Tensor:
        """Logits [m, V] of the rows with penalties, after these.

        tensors: the arrays of `plan`, of `penalty_arrays`, and "penalty_slots" [m], on the device.
        previous: the tokens that the previous step sampled, by output.
        """
        if "stale_slots" in tensors:
            self._fill(tensors, previous)
        slots = tensors["penalty_slots"]
        num_sampled = self._num_sampled.index_select(0, slots)
        return penalize(
            logits,
            num_sampled.to(logits.dtype),
            repetition=tensors["repetition"][:, None],
            frequency=tensors["frequency"][:, None],
            presence=tensors["presence"][:, None],
            is_seen=self._in_prompt.index_select(0, slots) | (num_sampled > 0),
        )

    def add(self, token_ids: Tensor, slots: Tensor) -> None:
        """Count a token [m] int64 that was sampled in each of slots [m]."""
        self._add(slots * self._vocab_size + token_ids)

    def _fill(self, tensors: dict[str, Tensor], previous: Tensor) -> None:
        if not len(self._num_sampled):
            shape = self._num_slots, self._vocab_size
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._num_sampled = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._in_prompt.index_fill_(0, tensors["stale_slots"], False)
        self._num_sampled.index_fill_(0, tensors["stale_slots"], 0)
        self._in_prompt.view(-1).index_fill_(0, tensors["prompt_cells"], True)
        self._add(tensors["sampled_cells"])
        if "counted_first" in tensors:
            sampled = previous.index_select(0, tensors["counted_outputs"])
            self._add(tensors["counted_first"] + sampled)

    def _add(self, cells: Tensor) -> None:
        ones = torch.ones_like(cells, dtype=torch.int32)
        self._num_sampled.view(-1).index_add_(0, cells, ones)
