"""A Runtime on the path of a CUDA device, over CPU tensors and a queue whose copies come late."""

from __future__ import annotations

from typing import Any

import pytest
from radixserve.runner.model_runner import ModelRunner

from radixserve import Runtime
from radixserve.config import EngineConfig
from radixserve.runner import model_runner
from radixserve.runner.device_batch import BatchUploader, DeviceBatch
from tests.runner.late_queue import LateQueue

SMALL: dict[str, Any] = {
    "max_running_requests": 8,
    "chunked_prefill_size": 64,
}  # so that the trial at load is short


def device_runner(folder: object, **fields: Any) -> ModelRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "DeviceQueue", LateQueue)
        return ModelRunner(str(folder), EngineConfig(**{**SMALL, **fields}), on_device=True)


class DeviceRuntime(Runtime):
    """Holds what the device says of every step's pages against the rows themselves."""

    runner: ModelRunner
    num_checked: int  # steps
    num_lean: int  # of them, those that sent no page but the last one of each row

    def __init__(self, model: object, **fields: Any) -> None:
        self.num_checked = self.num_lean = 0
        super().__init__(str(model), **{**SMALL, **fields})

    def _make_runner(self, model_path: str) -> ModelRunner:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model_runner, "DeviceQueue", LateQueue)
            self.runner = ModelRunner(model_path, self.config, on_device=True)
        steps = self.runner._steps
        assert steps is not None
        self._check(steps._sender)
        return self.runner

    def _check(self, sender: BatchUploader) -> None:
        send = sender.send

        def checked(*args: Any, **fields: Any) -> tuple[DeviceBatch, Any]:
            batch, device_tensors = send(*args, **fields)
            assert batch.kv_indices.tolist() == batch.host.kv_indices.tolist()
            self.num_checked += 1
            self.num_lean += "flat_slots" not in device_tensors
            return batch, device_tensors

        sender.send = checked  # type: ignore[method-assign]
