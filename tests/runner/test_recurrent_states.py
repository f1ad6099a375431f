"""The states of recurrent layers: copies, a step's rows, and what a device is sent for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from radixserve.attention.base import AttentionBackend, ForwardBatch
from radixserve.models.base import ModelInfo, StateShape
from radixserve.runner.input_batch import prepare_inputs
from radixserve.runner.recurrent_states import RecurrentStates
from radixserve.schedule import SampleSpec, ScheduledRequest, ScheduledRows, SchedulerOutput
from tests.checkpoints import make_model
from tests.models.causal_models import tiny_config
from tests.runner.driver import GREEDY
from tests.runner.late_queue import LateQueue
from tests.runner.on_device import SMALL, device_runner

CPU = torch.device("cpu")
FAMILIES = ("lfm2", "falcon_h1", "qwen3_next")
NUM_STATES = 40
NO_COPIES = np.empty((0, 3), np.int32)


def info_of(*shapes: StateShape) -> ModelInfo:
    sizes = dict.fromkeys(
        ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size"), 1
    )
    return ModelInfo(
        architecture="Some",
        is_native=False,
        max_positions=64,
        eos_ids=(),
        dtype=torch.float32,
        num_parameters=0,
        states=shapes,
        **sizes,
    )


def states_of(num_states: int) -> RecurrentStates:
    conv = StateShape(0, "conv", 0, (2, 3), torch.float32)
    recurrent = StateShape(1, "recurrent", 0, (5,), torch.bfloat16)
    states = RecurrentStates(info_of(conv, recurrent), num_states, CPU)
    assert states.num_bytes == num_states * (24 + 10)
    for tensor in states.tensors:
        tensor += torch.arange(num_states).view(-1, *[1] * (tensor.dim() - 1))
    return states


def row_of(num_tokens: int, start: int, state_id: int, *kept: tuple[int, int]) -> ScheduledRequest:
    tokens = np.arange(3, 3 + num_tokens, dtype=np.int32)
    pages = np.arange(start + num_tokens, dtype=np.int32) + 100 * state_id
    spec = SampleSpec(GREEDY, 0, 1, np.arange(3, 4 + start + num_tokens, dtype=np.int32), ())
    return ScheduledRequest(
        f"row {state_id}", tokens, start, pages, spec, slot=state_id, state_id=state_id,
        checkpoints=kept,
    )  # fmt: skip


def ids(tensor: Tensor | None) -> list[int] | None:
    return None if tensor is None else tensor.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_copies_at_once_do_what_they_do_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    copies = [(rng.randrange(6), rng.randrange(6)) for _ in range(rng.randrange(12))]
    expected = list(range(6))
    for source, destination in copies:
        expected[destination] = expected[source]
    states = states_of(6)
    states.copy(copies)
    for tensor in states.tensors:
        assert tensor.flatten(1)[:, 0].tolist() == expected
        assert torch.equal(tensor.flatten(1).amin(1), tensor.flatten(1).amax(1))


def test_rows_of_one_token_and_of_several() -> None:
    states = states_of(20)
    rows = [
        row_of(1, 5, 3, (6, 11)),
        row_of(1, 0, 4),
        row_of(7, 0, 5, (4, 12), (6, 13)),
        row_of(1, 9, 6, (10, 14)),
        row_of(2, 3, 7, (5, 15)),
    ]
    step = states.plan(ScheduledRows.of(rows), [(0, 1), (1, 2)])
    assert step is not None
    tensors = {name: torch.from_numpy(array) for name, array in step.arrays.items()}
    found = states.begin(step, tensors)
    assert [tensor[2].flatten()[0].item() for tensor in found.states] == [0.0, 0.0]
    assert found.tokens is not None
    assert ids(found.tokens.state_ids) == [3, 4, 6]
    assert ids(found.tokens.places) == [0, 1, 9]
    assert ids(found.tokens.new_rows) == [1]
    assert found.tokens.written_ids is None
    assert (ids(found.tokens.kept_rows), ids(found.tokens.kept_in)) == ([0, 2], [11, 14])
    first, second = found.rows
    assert (first.state_id, first.is_new, first.pieces) == (
        5,
        True,
        ((2, 6, 12), (6, 8, 13), (8, 9, -1)),
    )
    assert (second.state_id, second.is_new, second.pieces) == (7, False, ((10, 12, 15),))
    # Where all rows have one token, nothing has to be picked out of the step.
    step = states.plan(ScheduledRows.of(rows[:2]))
    assert step is not None
    assert sorted(step.arrays) == ["kept_in", "kept_rows", "new_rows", "state_ids"]
    step = states.plan(ScheduledRows.of([rows[0]._replace(written_state_id=9), rows[1]]))
    assert step is not None
    assert step.arrays["written_ids"].tolist() == [9, 4]
    step = states.plan(ScheduledRows.of(rows[2:3]))
    assert step is not None
    assert states.begin(step, {}).tokens is None
    assert RecurrentStates(info_of(), 0, CPU).plan(rows) is None


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(3)
    make_model(tiny_config(request.param)).save_pretrained(folder)
    return folder


class IndexedOperations(TorchDispatchMode):
    """Records the operations that take a tensor of indices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Any]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function).split(".")[1]
        if name.startswith("index") or name in ("_local_scalar_dense", "gather", "scatter_"):
            self.found.append((name, args))
        return function(*args, **(kwargs or {}))


def places_of(tensors: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_no_layer_sends_an_index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In transformers' code: what states are indexed by has come with the step's one upload, and no
    layer reads a value back."""
    queue, batches = LateQueue(), []
    runner = device_runner(
        *(folder, queue),
        num_pages=NUM_STATES * 100,
        num_states=NUM_STATES,
        model_impl="transformers",
    )
    forward = runner.model.forward

    def note(batch: ForwardBatch, backend: AttentionBackend) -> Tensor:
        batches.append(batch)
        return forward(batch, backend)

    monkeypatch.setattr(runner.model, "forward", note)
    begin = row_of(6, 0, 1, (4, 11), (6, 12)), row_of(1, 0, 2)
    go_on = row_of(1, 6, 1, (7, 13))._replace(written_state_id=15), row_of(1, 1, 2)
    mixed = row_of(1, 7, 1)._replace(state_id=15), row_of(1, 0, 3), row_of(5, 2, 2, (4, 14))
    for step, (rows, copies) in enumerate(((begin, ()), (go_on, ((11, 20),)), (mixed, ()))):
        num_uploads = queue.num_uploads
        with IndexedOperations() as operations:
            pending = runner.launch(
                SchedulerOutput(step, ScheduledRows.of(rows), NO_COPIES, 5, 1, copies)
            )
        assert queue.num_uploads == num_uploads + 1
        runner.collect(pending)
        batch = batches[step]
        assert batch.recurrent is not None
        states, sent = places_of(batch.recurrent.states), places_of([batch.input_ids])
        assert batch.recurrent.tokens is not None
        assert places_of(one for one in batch.recurrent.tokens if one is not None) == sent
        num_found = 0
        for name, args in operations.found:
            assert name != "_local_scalar_dense", "a layer waits for a value"
            if places_of([args[0]]) & states:
                assert name in ("index_select", "index_copy_")
                assert places_of([args[2]]) == sent
                num_found += 1
        num_tensors = len(batch.recurrent.states)
        # Read and written, kept, copied: they do not grow with the rows of one token.
        assert num_found == num_tensors * (5 if step == 1 else 2)


def test_copies_of_a_step_that_never_begins() -> None:
    states = states_of(4)
    assert states.plan(ScheduledRows.of([row_of(2, 0, 3)]), [(1, 0)]) is not None
    step = states.plan(ScheduledRows.of([row_of(2, 2, 3)]), [(0, 2)])
    assert step is not None
    tensors = {name: torch.from_numpy(array) for name, array in step.arrays.items()}
    assert ids(states.begin(step, tensors).states[1][:, 0]) == [1, 1, 1, 3]
    step = states.plan(ScheduledRows.of([row_of(2, 4, 3)]))
    assert step is not None
    assert not step.arrays


def test_memory_and_graphs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="radixserve"):
        runner = device_runner(
            folder, kv_cache_memory="2MB", cuda_graphs=True, model_impl="transformers"
        )
    plan, info = runner.memory_plan(), runner.info
    assert runner.num_states >= SMALL["max_running_requests"]
    assert plan.states_bytes == runner.num_states * info.state_bytes
    left = (2 << 20) - plan.states_bytes - plan.pool_bytes
    assert 0 <= left < info.kv_bytes_per_token
    assert runner.resolved_config.graph_sizes == ()
    assert runner.resolved_config.piecewise_tokens == 0
    assert "runs in transformers' code, without graphs" in caplog.text
    assert f"{runner.num_states} recurrent states" in caplog.text


def test_ids_of_native_layers() -> None:
    """Of each row with the padding of a graph, and of each token."""
    states = states_of(20)
    rows = ScheduledRows.of(
        [row_of(1, 5, 3, (6, 11)), row_of(1, 0, 4), row_of(1, 9, 6)._replace(written_state_id=9)]
    )
    ids = states.row_ids(prepare_inputs(rows, 1).padded(4))
    assert ids["indptr"].tolist() == [0, 1, 2, 3, 4]
    assert ids["read"].tolist() == [3, -1, 6, -1]
    assert ids["written"].tolist() == [3, 4, 9, -1]
    assert ids["kept"].tolist() == [11, -1, -1, -1]
    rows = ScheduledRows.of([row_of(1, 3, 7), row_of(7, 2, 5, (4, 12), (9, 13))])
    ids = states.row_ids(prepare_inputs(rows, 1))
    assert ids["indptr"].tolist() == [0, 1, 8]
    assert ids["kept"].tolist() == [-1, -1, 12, -1, -1, -1, -1, 13]
    assert {array.dtype for array in ids.values()} == {np.dtype(np.int32)}


def test_native_steps_and_their_graphs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One upload a step; what a decode step reads lies where its graph was captured."""
    queue = LateQueue()
    runner = device_runner(folder, queue, num_pages=NUM_STATES * 100, num_states=NUM_STATES)
    assert runner.resolved_config.graph_sizes == (1, 2, 4, 8)
    assert runner.resolved_config.piecewise_tokens > 0
    places: list[list[int]] = []
    upload = runner._uploader.upload

    def note(*args: Any, **fields: Any) -> Any:
        batch, tensors = upload(*args, **fields)
        assert batch.recurrent is not None
        assert batch.recurrent.ids is not None
        assert batch.recurrent.tokens is None
        places.append([tensor.data_ptr() for tensor in batch.recurrent.ids])
        return batch, tensors

    monkeypatch.setattr(runner._uploader, "upload", note)
    steps = (
        ((row_of(6, 0, 1, (4, 11)), row_of(1, 0, 2)), ()),
        ((row_of(1, 6, 1, (7, 13)), row_of(1, 1, 2)), ((11, 20),)),
        ((row_of(1, 7, 1)._replace(written_state_id=15), row_of(1, 2, 2)), ()),
    )
    for step, (rows, copies) in enumerate(steps):
        num_uploads = queue.num_uploads
        pending = runner.launch(
            SchedulerOutput(step, ScheduledRows.of(rows), NO_COPIES, 5, 1, copies)
        )
        assert queue.num_uploads == num_uploads + 1
        runner.collect(pending)
    assert places[1] == places[2]
    for tensor in runner._states.tensors:
        assert torch.equal(tensor[20], tensor[11])
        assert not torch.equal(tensor[13], tensor[15])


def test_copies_without_rows(folder: Path) -> None:
    """State 2 goes on where state 1 stands, as if it had computed the same tokens."""
    runner = device_runner(folder, num_pages=400, num_states=NUM_STATES)
    first = row_of(6, 0, 1)
    outs = runner.collect(
        runner.launch(SchedulerOutput(0, ScheduledRows.of([first]), NO_COPIES, 6, 0))
    ).outputs
    runner.collect(
        runner.launch(SchedulerOutput(1, ScheduledRows(), NO_COPIES, 0, 0, ((1, 3), (3, 2))))
    )
    found = []
    for step, state_id in ((2, 1), (3, 2)):
        row = row_of(1, 6, 1)._replace(state_id=state_id)
        schedule = SchedulerOutput(step, ScheduledRows.of([row]), NO_COPIES, 0, 1)
        found.append(runner.collect(runner.launch(schedule)).outputs)
    assert outs[0] is not None
    assert found[0] == found[1]
