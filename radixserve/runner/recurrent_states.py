"""The recurrent states of a model: a tensor for each state of each layer, all with one row an id.

Owns the memory; the cache owns the assignment of ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixserve.attention.base import RecurrentPiece, RecurrentRow, RecurrentRows
from radixserve.config import EngineConfig, parse_bytes
from radixserve.errors import InvalidRequest
from radixserve.models.base import ModelInfo
from radixserve.runner.kv_pool import choose_num_pages
from radixserve.runner.system_memory import free_memory
from radixserve.schedule import ScheduledRequest

FREE_MEMORY_DIVISOR = 8  # the default takes at most this fraction of the free memory: 1 / 8
POOL_DIVISOR = 3  # or of kv_cache_memory: 1 / 3, as pages have twice of the free memory


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


def choose_num_states(config: EngineConfig, info: ModelInfo) -> int:
    """States as many as asked for, or one for each request that may run, three kept ones for each,
    and one for every `checkpoint_interval` tokens of the pool, at most a share of the memory that
    is free now or of `kv_cache_memory`, in which they are; 0 where the model has none.

    Raises InvalidRequest if they do not fit, or the requests that may run would not have one each.
    """
    if not info.states:
        return 0
    asked = config.kv_cache_memory
    whole = free_memory() if asked is None else parse_bytes(asked)
    where = "the free memory" if asked is None else "kv_cache_memory"
    if config.num_states is not None:
        if (needed := config.num_states * info.state_bytes) > whole:
            raise InvalidRequest(
                f"num_states={config.num_states} of {info.state_bytes} bytes need {needed} bytes; "
                f"{where} of {whole} bytes holds {whole // info.state_bytes}"
            )
        return config.num_states
    num_tokens = choose_num_pages(config, info) * config.page_size
    wanted = 4 * config.max_running_requests + num_tokens // config.checkpoint_interval
    fitting = whole // (FREE_MEMORY_DIVISOR if asked is None else POOL_DIVISOR) // info.state_bytes
    if fitting < (least := config.max_running_requests):
        share = "an eighth" if asked is None else "a third"
        raise InvalidRequest(
            f"{least} recurrent states of this model need {least * info.state_bytes} bytes, more "
            f"than {share} of {where}; set a smaller max_running_requests, or num_states"
        )
    return min(wanted, fitting)
