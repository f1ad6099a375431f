"""The recurrent states of a model: a tensor for each state of each layer, all with one row an id.

Owns the memory; the cache owns the assignment of ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixserve.attention.base import RecurrentPiece, RecurrentRow, RecurrentRows
from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest
from radixserve.models.base import ModelInfo
from radixserve.runner.system_memory import free_memory
from radixserve.schedule import ScheduledRequest

FREE_MEMORY_DIVISOR = 8  # the default takes at most this fraction of the free memory: 1 / 8


class RecurrentStates:
    """tensors[i] [num_states, ...], in the order of `ModelInfo.states`."""

    def __init__(self, info: ModelInfo, num_states: int, device: torch.device) -> None:
        self.num_states = num_states
        self.tensors = [
            torch.zeros((num_states, *one.shape), dtype=one.dtype, device=device)
            for one in info.states
        ]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """(source, destination), one after the other."""
        for source, destination in copies:
            for tensor in self.tensors:
                tensor[destination] = tensor[source]

    def of_rows(self, rows: Sequence[ScheduledRequest]) -> RecurrentRows:
        """The states of a step's rows, whose tokens lie end to end."""
        found, first = [], 0
        for row in rows:
            shift, at, pieces = first - row.start, first, []
            for length, state_id in row.checkpoints:
                pieces.append(RecurrentPiece(at, length + shift, state_id))
                at = length + shift
            end = row.end + shift
            if at < end:
                pieces.append(RecurrentPiece(at, end, -1))
            found.append(RecurrentRow(row.state_id, row.start == 0, end - first, tuple(pieces)))
            first = end
        return RecurrentRows(self.tensors, found)


def choose_num_states(config: EngineConfig, info: ModelInfo, num_pages: int) -> int:
    """States as many as asked for, or one for each request that may run, three kept ones for each,
    and one for every `checkpoint_interval` tokens of the pool, at most a share of the memory that
    is free now; 0 where the model has none.

    Raises InvalidRequest if the requests that may run would not have one each.
    """
    if not info.states:
        return 0
    if config.num_states is not None:
        return config.num_states
    wanted = 4 * config.max_running_requests
    wanted += num_pages * config.page_size // config.checkpoint_interval
    fitting = free_memory() // FREE_MEMORY_DIVISOR // info.state_bytes
    if fitting < min(wanted, config.max_running_requests):
        raise InvalidRequest(
            f"{config.max_running_requests} recurrent states of this model need "
            f"{config.max_running_requests * info.state_bytes} bytes, more than an eighth of the "
            "free memory; set a smaller max_running_requests, or num_states"
        )
    return min(wanted, fitting)
