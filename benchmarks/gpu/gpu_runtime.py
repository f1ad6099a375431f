"""`Runtime` as users have it; in a dry run on the path of a CUDA device, over CPU tensors."""

from __future__ import annotations

from typing import Any

from gpu_bench import Bench

from radixserve import Runtime
from radixserve.runner.cuda_runner import CudaModelRunner


class DryRuntime(Runtime):
    """Computes what a CUDA device would, in the torch references of the kernels."""

    def _make_runner(self, model_path: str) -> CudaModelRunner:
        return CudaModelRunner(model_path, self.config)


def open_runtime(bench: Bench, model: str, *, engines: int = 1, **settings: Any) -> Runtime:
    """A Runtime of a size with random weights and a pool of settings["num_pages"] pages.

    Raises Skip where `engines` like this have no room on the card.
    """
    chosen = {**bench.engine_settings, **settings}
    if bench.is_dry:
        return DryRuntime(bench.model(model), **chosen)
    bench.check_engine(model, chosen["num_pages"], engines)
    return Runtime(bench.model(model), **chosen)
