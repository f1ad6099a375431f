"""A Runtime on the path of a CUDA device, over CPU tensors and a queue whose copies come late."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from radixserve import Runtime
from radixserve.attention.base import ForwardBatch
from radixserve.config import EngineConfig
from radixserve.runner import cuda_runner
from radixserve.runner.cuda_runner import CudaModelRunner
from radixserve.runner.device_batch import BatchUploader
from tests.runner.late_queue import LateQueue

SMALL: dict[str, Any] = {
    "max_running_requests": 8,
    "chunked_prefill_size": 64,
}  # so that the profile run is short


def device_runner(folder: object, queue: LateQueue | None = None, **fields: Any) -> CudaModelRunner:
    config = EngineConfig(**{**SMALL, **fields})
    return CudaModelRunner(str(folder), config, queue=LateQueue() if queue is None else queue)


class CheckedUploader(BatchUploader):
    """Compares the device's pages of every step with the rows' own."""

    num_checked = 0  # steps
    num_lean = 0  # of them, those that sent no page but the last one of each row

    def upload(self, *args: Any, **fields: Any) -> tuple[ForwardBatch, dict[str, Tensor]]:
        batch, tensors = super().upload(*args, **fields)
        assert batch.kv_indices.tolist() == batch.host.kv_indices.tolist()
        if batch.window is not None:
            assert batch.window.device_page_table is not None
            assert batch.window.device_page_table.tolist() == batch.window.page_table.tolist()
        self.num_checked += 1
        self.num_lean += "table_slots" not in tensors
        return batch, tensors


class DeviceRuntime(Runtime):
    runner: CudaModelRunner
    uploader: CheckedUploader

    def __init__(self, model: object, **fields: Any) -> None:
        super().__init__(str(model), **{**SMALL, **fields})

    def _make_runner(self, model_path: str) -> CudaModelRunner:
        def make_uploader(*args: Any) -> CheckedUploader:
            self.uploader = CheckedUploader(*args)
            return self.uploader

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_runner, "BatchUploader", make_uploader)
            self.runner = CudaModelRunner(model_path, self.config, queue=LateQueue())
        return self.runner
