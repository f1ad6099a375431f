"""`make_runner`: the runner that the settings ask for."""

from __future__ import annotations

from radixserve.config import EngineConfig
from radixserve.runner.base import ModelRunner, RunnerKind
from radixserve.runner.cpu_runner import CpuModelRunner
from radixserve.runner.device import choose_device


def make_runner(model_path: str, config: EngineConfig) -> ModelRunner:
    """A runner for one device, or a TPModelRunner for `config.tensor_parallel_size` devices.

    Raises what these raise.
    """
    device = choose_device(config.device, config.attention_backend)
    kind: RunnerKind = CpuModelRunner
    if device.type == "cuda":
        from radixserve.runner.cuda_runner import CudaModelRunner

        kind = CudaModelRunner
    if config.tensor_parallel_size == 1:
        return kind(model_path, config, None)
    from radixserve.runner.tensor_parallel.runner import TPModelRunner

    return TPModelRunner(model_path, config, kind)
