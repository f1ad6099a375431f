"""The same answers on a CUDA device, through real graphs, events and copies; and on the CPU.

Where there is no such device, the CPU's half still shows that the test is a test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve import Runtime
from radixserve.output import Completion
from tests.checkpoints import load_reference, make_checkpoint
from tests.runner.driver import Driver
from tests.runner.on_device import SMALL, DeviceRuntime, device_runner
from tests.runner.test_device_runner import assert_same, run_jobs
from tests.runner.test_model_runner import check_parity, prompts_of, runner_of

TOKENS = 1200
MODES = [(True, True), (False, False)]
if torch.cuda.is_available():
    MODES += [(True, False), (False, True)]


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cuda"), "qwen3", head_dim=64)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Completion]:
    with Runtime(str(folder), device="cpu", num_pages=TOKENS, cache="off") as rt:
        return run_jobs(rt)


@pytest.mark.parametrize(("overlap", "graphs"), MODES)
def test_same_answers(
    folder: Path, expected: list[Completion], device: str, overlap: bool, graphs: bool
) -> None:
    fields: dict[str, Any] = {"overlap": overlap, "cuda_graphs": graphs, "num_pages": TOKENS // 2}
    kind: type[Runtime] = DeviceRuntime if device == "cpu" else Runtime
    with kind(folder, **{**SMALL, **fields}, device=device, page_size=2) as rt:
        assert rt.resolved_config.device.startswith(device)
        assert rt.resolved_config.overlap == overlap
        assert bool(rt.resolved_config.graph_sizes) == graphs
        for _ in range(2):
            assert_same(run_jobs(rt), expected)
            rt.check()


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_mixed_steps(folder: Path, device: str, backend: str) -> None:
    fields: dict[str, Any] = {"attention_backend": backend, "device": device, **SMALL}
    make = device_runner if device == "cpu" else runner_of
    driver = Driver(make(folder, page_size=16, **fields, **_room(device)), 16)
    for prompt in prompts_of([1, 20, 41, 90]):
        driver.add(prompt)
    driver.run(chunk=13)
    check_parity(driver.sequences, load_reference(folder))


def test_window_pages(device: str, tmp_path: Path) -> None:
    """In graphs and pieces of steps; window pages for one or two of the requests."""
    folder = make_checkpoint(tmp_path, "gemma3", head_dim=64)
    with Runtime(str(folder), device="cpu", num_pages=TOKENS, cache="off") as rt:
        expected = run_jobs(rt)
    fields: dict[str, Any] = {**SMALL, "attention_backend": "triton", "dtype": "float32"}
    kind: type[Runtime] = DeviceRuntime if device == "cpu" else Runtime
    with kind(
        str(folder), device=device, **fields, num_pages=TOKENS, swa_full_tokens_ratio=0.001
    ) as rt:
        for _ in range(2):
            assert_same(run_jobs(rt), expected)
            rt.check()
        assert rt.cache_stats()["evicted_window_pages"] > 0


def _room(device: str) -> dict[str, int]:
    return {"num_pages": TOKENS // 16} if device == "cpu" else {"tokens": TOKENS}
