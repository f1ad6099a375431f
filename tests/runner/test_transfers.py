"""Host arrays on their way to a device, and results on their way back, by a queue that is late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from radixserve.runner.transfers import D2HBuffer, DeviceQueue, Event, H2DBuffer
from tests.runner.late_queue import POISON, LateQueue

DTYPES = (np.int32, np.int64, np.float32, np.float64)


def arrays_of(generator: np.random.Generator, sizes: list[int]) -> dict[str, NDArray[Any]]:
    return {
        f"{at}": (1000 * generator.standard_normal(size)).astype(DTYPES[at % 4])
        for at, size in enumerate(sizes)
    }


def test_everything_arrives_in_one_copy() -> None:
    queue = LateQueue()
    staging = H2DBuffer(queue, 4096)
    generator = np.random.default_rng(0)
    for step in range(40):
        sizes = generator.integers(0, 30, 5).tolist() if step % 3 else [7, 0, 3, 1]
        arrays = arrays_of(generator, sizes)
        device_tensors = staging.send(arrays)
        assert list(device_tensors) == list(arrays)
        for name, array in arrays.items():
            assert device_tensors[name].numpy().dtype == array.dtype
            assert device_tensors[name].tolist() == array.tolist()
            assert device_tensors[name].data_ptr() % 16 == 0
            array.fill(0)  # it was copied
            assert device_tensors[name].shape == array.shape
    assert queue.num_uploads == 40
    queue.wait()  # no host buffer was changed too early


def test_a_buffer_waits_for_its_own_copy_alone() -> None:
    queue = LateQueue()
    staging = H2DBuffer(queue, 1024)
    for step in range(6):
        staging.send({"x": np.full(4, step)})
        assert queue.num_waits == max(0, step - 1)  # for the copy before the last one


def test_without_waits_a_buffer_changes_too_early() -> None:
    """What the late queue is for."""

    class Hasty(LateQueue):
        def record_event(self) -> Event:
            return DeviceQueue.record_event(self)  # passed at once

    queue = Hasty()
    staging = H2DBuffer(queue, 1024)
    staging.send({"x": np.zeros(4, np.int64)})
    staging.send({"x": np.ones(4, np.int64)})
    staging.send({"x": np.ones(4, np.int64)})
    with pytest.raises(AssertionError, match="changed before its copy"):
        queue.wait()


def test_growing_waits_and_keeps_what_was_sent() -> None:
    queue = LateQueue()
    staging = H2DBuffer(queue, 128)
    first = staging.send({"x": np.arange(8)})["x"]
    assert not staging.fits({"x": np.arange(17)})
    second = staging.send({"x": np.arange(100)})["x"]
    assert first.tolist() == list(range(8))
    assert second.tolist() == list(range(100))
    assert staging.num_bytes >= 832
    assert queue.num_waits == 1
    queue.wait()


def test_a_fixed_buffer_keeps_its_places() -> None:
    staging = H2DBuffer(LateQueue(), 1024, can_grow=False)
    one = staging.send({"a": np.arange(5), "b": np.ones(3, np.int32)})
    other = staging.send({"a": np.arange(5, 10), "b": np.zeros(3, np.int32), "c": np.ones(9)})
    for name in one:
        assert one[name].data_ptr() == other[name].data_ptr()
    assert one["a"].tolist() == [5, 6, 7, 8, 9]  # the same memory
    with pytest.raises(AssertionError, match="do not fit 1024"):
        staging.send({"a": np.arange(500)})


def test_forms_do_not_pile_up() -> None:
    staging = H2DBuffer(DeviceQueue(torch.device("cpu")), 1 << 14)
    for size in range(1200):
        assert len(staging.send({"x": np.zeros(size, np.int32)})["x"]) == size
    assert staging.num_layouts <= 512


def test_results_are_there_behind_their_mark() -> None:
    queue = LateQueue()
    d2h = D2HBuffer(queue)
    sent = [torch.arange(3), torch.tensor([0.5]), torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)]
    one = d2h.fetch(sent)
    other = d2h.fetch([torch.arange(10, 13)])
    poison = int.from_bytes(bytes([POISON] * 8), "little", signed=True)
    assert one.arrays[0].tolist() == [poison] * 3
    one.event.wait()
    assert [array.tolist() for array in one.arrays] == [x.tolist() for x in sent]
    assert other.arrays[0].tolist() == [poison] * 3
    other.event.wait()
    assert other.arrays[0].tolist() == [10, 11, 12]
    assert one.arrays[0].tolist() == [0, 1, 2]


def test_buffers_are_used_again_once_they_are_released() -> None:
    queue = LateQueue()
    d2h = D2HBuffer(queue)
    where = set()
    for step in range(20):  # two in flight
        transfers = [d2h.fetch([torch.full((4,), step + at)]) for at in range(2)]
        for at, transfer in enumerate(transfers):
            transfer.event.wait()
            assert transfer.arrays[0].tolist() == [step + at] * 4
            where.add(transfer.buffer.data_ptr())
            d2h.release(transfer)
    assert len(where) == 2
    large = d2h.fetch([torch.arange(10_000)])
    large.event.wait()
    assert large.arrays[0].tolist() == list(range(10_000))
