"""The same answers on a CUDA device, through real graphs, events and copies; and on the CPU.

Where there is no such device, the CPU's half still shows that the test is a test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve import Runtime, SamplingParams
from radixserve.completion import Completion
from tests.checkpoints import FAMILIES, load_reference, make_checkpoint
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


@pytest.mark.parametrize(
    ("device", "family"),
    [*(("cpu", family) for family in ("qwen3", "lfm2")), *(("cuda", name) for name in FAMILIES)],
    indirect=["device"],
)
def test_families(device: str, family: str, tmp_path: Path) -> None:
    """Cold and warm, against the CPU without a cache."""
    # One group, as in Granite's models: transformers before 5.24 took the norm over all of them.
    fields = {"mamba_n_groups": 1} if family.startswith("granite") and "hybrid" in family else {}
    folder = make_checkpoint(tmp_path, family, **fields)
    prompts = prompts_of([3, 20, 41, 90])
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
    with Runtime(str(folder), device="cpu", num_pages=TOKENS, cache="off") as rt:
        expected = rt.generate(prompts, params, progress=False)
    kind: type[Runtime] = DeviceRuntime if device == "cpu" else Runtime
    with kind(str(folder), device=device, **SMALL, dtype="float32", num_pages=TOKENS) as rt:
        for _ in range(2):
            assert_same(rt.generate(prompts, params, progress=False), expected)
            rt.check()
        assert rt.cache_stats()["matched_tokens"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_exact(family: str, dtype: str, device: str, tmp_path: Path) -> None:
    """`exact=True`: the same log-probabilities to the bit alone, at once, cold and warm."""
    folder = make_checkpoint(tmp_path, family, head_dim=64)
    prompts = prompts_of([3, 20, 41, 90, 64, 65])
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
    kind: type[Runtime] = DeviceRuntime if device == "cpu" else Runtime
    fields: dict[str, Any] = {**SMALL, "attention_backend": "triton", "dtype": dtype, "exact": True}
    with kind(str(folder), device=device, **fields, num_pages=TOKENS) as rt:
        assert not rt.resolved_config.inexact
        alone = []
        for prompt in prompts:
            rt.flush_cache()
            alone += rt.generate([prompt], params, progress=False)
        rt.flush_cache()
        for _ in range(2):
            outs = rt.generate(prompts, params, progress=False)
            assert [out.token_ids for out in outs] == [out.token_ids for out in alone]
            assert [out.logprobs for out in outs] == [out.logprobs for out in alone]


def test_a_closed_runtime_gives_its_memory_back(folder: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    for _ in range(2):
        before = torch.cuda.mem_get_info()[0]
        with Runtime(
            str(folder), device="cuda", dtype="bfloat16", num_pages=4_000_000, **SMALL
        ) as rt:
            assert torch.cuda.mem_get_info()[0] < before - (2 << 30)
            rt.generate([[1, 2, 3]], SamplingParams(max_tokens=4), progress=False)
        assert torch.cuda.mem_get_info()[0] > before - (1 << 30)  # all but what libraries keep


def _room(device: str) -> dict[str, int]:
    return {"num_pages": TOKENS // 16} if device == "cpu" else {"tokens": TOKENS}
