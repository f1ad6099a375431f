"""The recurrent states of a model: a tensor for each state of each layer, all with one row an id.

Owns the memory; the cache owns the assignment of ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.attention.base import (
    RecurrentPiece,
    RecurrentRow,
    RecurrentRows,
    RecurrentTokens,
    StateRows,
)
from radixserve.models.base import ModelInfo
from radixserve.runner.device import lacks_memory
from radixserve.runner.input_batch import InputBatch
from radixserve.schedule import ScheduledRows

IdArray = NDArray[np.int64]
StateCopies = Sequence[tuple[int, int]]  # see `SchedulerOutput.state_copies`


class StepStates(NamedTuple):
    """The state reads, writes and copies of one step."""

    arrays: dict[str, IdArray]  # [n] int64 each: the fields of RecurrentTokens and the copies
    rows: tuple[RecurrentRow, ...]


class RecurrentStates:
    """tensors[i] [num_states, ...], in the order of `ModelInfo.states`.

    Everything done with them is queued on the device's stream: a state that the cache has given to
    another sequence is written after the steps that were launched before.
    """

    def __init__(self, info: ModelInfo, num_states: int, device: torch.device) -> None:
        """Raises InvalidRequest if they do not fit into memory."""
        self.num_states = num_states
        self._owed: list[tuple[int, int]] = []  # copies of planned steps that have not begun
        try:
            self.tensors = [
                torch.zeros((num_states, *state.shape), dtype=state.dtype, device=device)
                for state in info.states
            ]
        except (MemoryError, RuntimeError) as error:  # torch's allocators raise RuntimeError
            what, num_bytes = f"{num_states} recurrent states", num_states * info.state_bytes
            remedy = "set a smaller num_states or max_running_requests"
            raise lacks_memory(what, num_bytes, device, remedy) from error

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy states (source, destination), one after the other, in an upload of their own. `plan`
        takes the copies of a step with rows."""
        if (self._owed or copies) and self.tensors:
            device, arrays = self.tensors[0].device, _combine_copies([*self._owed, *copies])
            self._copy(*(torch.from_numpy(ids).to(device) for ids in arrays))
            self._owed.clear()

    def plan(self, rows: ScheduledRows, copies: StateCopies = ()) -> StepStates | None:
        """Lay out the states of a step's rows, and the copies to make before them. If the step
        never begins, the next `begin` makes the copies. None if the model has no states."""
        if not self.tensors:
            return None
        lists: dict[str, list[int]] = {name: [] for name in RecurrentTokens._fields}
        longer: list[RecurrentRow] = []
        first = 0
        for num_tokens, start, row in zip(rows.num_tokens, rows.starts, rows.states, strict=True):
            if num_tokens == 1:
                number = len(lists["state_ids"])
                if not start:
                    lists["new_rows"].append(number)
                for _, state_id in row.checkpoints:
                    lists["kept_rows"].append(number)
                    lists["kept_in"].append(state_id)
                lists["places"].append(first)
                lists["state_ids"].append(row.state_id)
                written = row.state_id if row.written_state_id < 0 else row.written_state_id
                lists["written_ids"].append(written)
            else:
                pieces = _pieces(start, start + num_tokens, row.checkpoints, first)
                longer.append(RecurrentRow(row.state_id, start == 0, pieces))
            first += num_tokens
        if not longer:
            lists["places"] = []
        if lists["written_ids"] == lists["state_ids"]:
            lists["written_ids"] = []
        arrays = {name: np.array(values, np.int64) for name, values in lists.items() if values}
        self._owed += copies
        if self._owed:
            arrays["copied_from"], arrays["copied_to"] = _combine_copies(self._owed)
        return StepStates(arrays, tuple(longer))

    def plan_copies(self, copies: StateCopies) -> StepStates:
        """The copies of a step alone, whose layers read `row_ids`."""
        self._owed += copies
        names = "copied_from", "copied_to"
        arrays = dict(zip(names, _combine_copies(self._owed), strict=True)) if self._owed else {}
        return StepStates(arrays, ())

    def row_ids(self, batch: InputBatch) -> dict[str, NDArray[np.int32]]:
        """The fields of StateRows for a step's rows; padding reads and writes no state."""
        num_rows, rows = batch.num_rows, batch.rows
        read, written = np.full((2, num_rows), -1, np.int32)
        kept = np.full(batch.num_tokens, -1, np.int32)
        starts, bounds = rows.starts, batch.host.qo_indptr
        for number, row in enumerate(rows.states):
            if starts[number]:
                read[number] = row.state_id
            own = row.state_id if row.written_state_id < 0 else row.written_state_id
            written[number] = own
            for length, state_id in row.checkpoints:
                kept[bounds[number] + length - starts[number] - 1] = state_id
        return {
            "indptr": bounds.astype(np.int32),
            "read": read,
            "written": written,
            "kept": kept,
        }

    def of_rows(self, ids: StateRows) -> RecurrentRows:
        """What the layers of a step read whose `row_ids` are on the device."""
        return RecurrentRows(self.tensors, None, (), ids)

    def begin(self, step: StepStates, tensors: Mapping[str, Tensor]) -> RecurrentRows:
        """Make the step's copies and return what its layers read. tensors: its arrays, on the
        device."""
        if "copied_from" in step.arrays:
            self._copy(tensors["copied_from"], tensors["copied_to"])
            self._owed.clear()
        fields = {name: tensors[name] for name in RecurrentTokens._fields if name in step.arrays}
        return RecurrentRows(self.tensors, RecurrentTokens(**fields) if fields else None, step.rows)

    def _copy(self, sources: Tensor, destinations: Tensor) -> None:
        for tensor in self.tensors:
            tensor.index_copy_(0, destinations, tensor.index_select(0, sources))


def _pieces(
    start: int, end: int, checkpoints: Sequence[tuple[int, int]], first: int
) -> tuple[RecurrentPiece, ...]:
    """A row's tokens [start, end), cut after each state that is kept. first: the index of the first
    of them among the step's tokens."""
    shift, begin, pieces = first - start, first, []
    for length, state_id in checkpoints:
        pieces.append(RecurrentPiece(begin, length + shift, state_id))
        begin = length + shift
    if begin < end + shift:
        pieces.append(RecurrentPiece(begin, end + shift, -1))
    return tuple(pieces)


def _combine_copies(copies: StateCopies) -> tuple[IdArray, IdArray]:
    """Sources and destinations of copies that, with everything read before anything is written, do
    what these do one after the other; the destinations are distinct."""
    origin: dict[int, int] = {}
    for source, destination in copies:
        origin[destination] = origin.get(source, source)
    return np.array(list(origin.values()), np.int64), np.array(list(origin), np.int64)
