"""`TokenCounts`: penalties on the device, from counts of the tokens that each request has seen.

With them a step can be launched before the host knows the tokens of the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.runner.sample_plan import SampledRow
from radixserve.schedule import ScheduledRequest


class TokenCounts:
    """Per slot (`req_pool_idx`) and token id: whether the prompt has it, how often it was sampled.

    5 bytes a slot and token id, allocated when a request with a penalty first samples. A slot is
    filled from `SampleSpec.token_ids` when another request takes it; after that every token that
    the device samples is added there.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots, self._vocab_size, self._device = num_slots, vocab_size, device
        self._in_prompt = torch.empty(0)  # [num_slots, V] bool
        self._num_sampled = torch.empty(0)  # [num_slots, V] int32
        self._counted: dict[int, tuple[str, int]] = {}  # by slot: request, number of its tokens

    def plan(
        self, requests: Sequence[ScheduledRequest], penalized: Sequence[SampledRow]
    ) -> dict[str, NDArray[Any]]:
        """Arrays for `apply`, to fill the slots that do not hold their request; for every step.

        A slot is filled again after `first_new_page` was 0: it may be another request's by then.
        """
        if self._counted:
            for row in requests:
                if not row.first_new_page:
                    self._counted.pop(row.req_pool_idx, None)
        stale, prompts, sampled, future = [], [], [], []
        for sampled_row in penalized:
            slot, spec = sampled_row.request.req_pool_idx, sampled_row.spec
            known = sampled_row.request.request_id, len(spec.token_ids) + spec.num_placeholders
            if self._counted.get(slot) != known:
                first = slot * self._vocab_size
                ids = spec.token_ids.astype(np.int64) + first
                stale.append(slot)
                prompts.append(ids[: spec.num_prompt])
                sampled.append(ids[spec.num_prompt :])
                if spec.num_placeholders:
                    assert spec.num_placeholders == 1, "more than one step is in flight"
                    future.append((first, sampled_row.request.future_index))
            self._counted[slot] = known[0], known[1] + 1
        if not stale:
            return {}
        arrays: dict[str, NDArray[Any]] = {
            "stale_slots": np.array(stale, np.int64),
            "prompt_places": np.concatenate(prompts),
            "sampled_places": np.concatenate(sampled),
        }
        if future:
            arrays["counted_first"], arrays["counted_outputs"] = np.array(future, np.int64).T
        return arrays

    def apply(self, logits: Tensor, tensors: dict[str, Tensor], previous: Tensor) -> Tensor:
        """Logits [m, V] of the rows with penalties, as `apply_penalties` changes them.

        tensors: the arrays of `plan` and of `SamplePlan` on the device. previous: the tokens that
        the previous step sampled, by output.
        """
        if "stale_slots" in tensors:
            self._fill(tensors, previous)
        slots = tensors["penalty_slots"]
        num_sampled = self._num_sampled.index_select(0, slots)
        is_seen = self._in_prompt.index_select(0, slots) | (num_sampled > 0)
        repetition = tensors["repetition"][:, None]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(is_seen, repeated, logits)
        logits = logits - tensors["frequency"][:, None] * num_sampled.to(logits.dtype)
        return logits - tensors["presence"][:, None] * (num_sampled > 0).to(logits.dtype)

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
        self._in_prompt.view(-1).index_fill_(0, tensors["prompt_places"], True)
        self._add(tensors["sampled_places"])
        if "counted_first" in tensors:
            sampled = previous.index_select(0, tensors["counted_outputs"])
            self._add(tensors["counted_first"] + sampled)

    def _add(self, places: Tensor) -> None:
        ones = torch.ones_like(places, dtype=torch.int32)
        self._num_sampled.view(-1).index_add_(0, places, ones)
