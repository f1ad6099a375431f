"""Window pages on the path of a device: the bits of a run without them, whatever is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixserve import RequestFailed, Runtime, SamplingParams
from radixserve.attention.choice import BACKENDS
from radixserve.completion import Completion
from radixserve.runner.device_sampler import DeviceSampler
from radixserve.schedule import ScheduledRows, SchedulerOutput, WindowUpdates
from tests.checkpoints import load_reference, make_checkpoint
from tests.runner.driver import Driver
from tests.runner.on_device import DeviceRuntime, device_runner
from tests.runner.test_device_runner import assert_same, run_jobs, take_fake_flashinfer
from tests.runner.test_model_runner import check_parity, prompts_of

FAMILIES = ["mistral_window", "gemma3", "gpt_oss"]  # all layers have windows; some
PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("windows")
    return {family: make_checkpoint(root / family, family) for family in FAMILIES}


@pytest.mark.parametrize(
    ("page_size", "graphs"),
    [(1, True), pytest.param(16, True, marks=pytest.mark.long), (16, False)],
)
@pytest.mark.parametrize(
    ("family", "backend"),
    [(family, "triton") for family in FAMILIES]
    + [("mistral_window", "flashinfer"), ("gemma3", "flashinfer")],
)
def test_exact_bits(
    checkpoints: dict[str, Path],
    family: str,
    backend: str,
    page_size: int,
    graphs: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three rows at a time, in graphs padded to four, whose window pages do not hold all that they
    computed, but what they see: they run in the same steps."""
    if backend == "flashinfer":
        take_fake_flashinfer(monkeypatch)
    prompts = prompts_of([90, 60, 75, 3, 41])
    said: list[list[Completion]] = []
    num_steps = []
    # Padding goes to experts, too, and how many rows one has changes bits on the CPU: no padding.
    num_rows = 3 if family == "gpt_oss" else 4
    for ratio in (1.0, 0.2):
        with DeviceRuntime(
            checkpoints[family],
            page_size=page_size,
            num_pages=1100 // page_size,
            chunked_prefill_size=3 * page_size + 37,
            max_running_requests=num_rows,
            cuda_graphs=graphs,
            cache="off",
            swa_full_tokens_ratio=ratio,
        ) as rt:
            assert (rt.runner.windows is None) == (ratio == 1)
            assert rt.runner.backend.name == backend
            said.append([])
            for at in range(2):
                said[-1] += rt.generate(prompts[at : at + 3], PARAMS, progress=False)
                said[-1].append(rt.generate(prompts[at], PARAMS, progress=False))
            rt.check()
            stats = rt.cache_stats()
            assert (stats.get("evicted_window_pages", 0) > 0) == (ratio < 1)
            num_steps.append(stats["steps"])
    assert num_steps[0] == num_steps[1]
    for mine, theirs in zip(*said, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == theirs.logprobs
        assert mine.top_logprobs == theirs.top_logprobs


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> list[Completion]:
    with Runtime(str(checkpoints["gemma3"]), num_pages=1200, cache="off") as rt:
        return run_jobs(rt)


@pytest.mark.parametrize(
    "fields",
    [
        {"page_size": 1, "num_pages": 400},
        {"page_size": 16, "num_pages": 30, "chunked_prefill_size": 20},
        {"page_size": 4, "num_pages": 60, "overlap": False, "cuda_graphs": False},
    ],
    ids=lambda fields: " ".join(f"{name}={value}" for name, value in fields.items()),
)
def test_same_answers(
    checkpoints: dict[str, Path], expected: list[Completion], fields: dict[str, Any]
) -> None:
    """Cold and warm, with samples, penalties, scores and beams; then with steps that fail."""
    folder = checkpoints["gemma3"]
    with DeviceRuntime(folder, swa_full_tokens_ratio=0.001, **fields) as rt:
        for _ in range(2):
            assert_same(run_jobs(rt), expected)
            rt.check()
        assert rt.cache_stats()["evicted_window_pages"] > 0
        real, count = DeviceSampler.launch, 0

        def sometimes(*args: Any, **fields: Any) -> Any:
            nonlocal count
            count += 1
            if count % 9 == 0:
                raise RuntimeError("the device is on fire")
            return real(*args, **fields)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeviceSampler, "launch", sometimes)
            with pytest.raises(RequestFailed, match="on fire"):
                run_jobs(rt)
        assert_same(run_jobs(rt), expected)
        rt.check()


def test_steps_without_rows_and_those_that_are_refused(checkpoints: dict[str, Path]) -> None:
    """What they say of window pages is not lost. Padding is stored nowhere."""
    folder = checkpoints["gemma3"]
    runner = device_runner(folder, num_pages=300, swa_full_tokens_ratio=0.5, max_running_requests=4)
    windows, pool = runner.windows, runner.pool.windows
    assert windows is not None
    assert pool is not None
    driver, nothing = Driver(runner, 1), np.empty((0, 3), np.int32)
    for prompt in prompts_of([5, 9, 12]):
        driver.add(prompt)
    rows = tuple(driver.row(one, len(one.tokens)) for one in driver.sequences)
    pages = np.concatenate([row.page_ids for row in rows])
    pairs = np.stack((pages, np.arange(len(pages), dtype=np.int32)), 1)
    first, rest = WindowUpdates(pairs[:9], []), WindowUpdates(pairs[9:], [])
    runner.collect(runner.launch(SchedulerOutput(0, ScheduledRows(), nothing, 0, 0, windows=first)))
    broken = rows[0]._replace(page_ids=rows[0].page_ids[:-1])
    with pytest.raises(ValueError, match="has 4 pages"):
        runner.launch(SchedulerOutput(1, ScheduledRows.of([broken]), nothing, 0, 0, windows=rest))
    pool.kv.fill_(float("nan"))  # stays where nothing is written
    pool.kv[:, :, -1] = 0
    driver.step([(one, len(one.tokens)) for one in driver.sequences])
    written = ~pool.kv.isnan().flatten(3).any(-1).any(0).any(0)
    assert written.nonzero()[:, 0].tolist() == [*range(len(pages)), windows.num_pages]
    check_parity(driver.sequences, load_reference(folder))


def test_where_there_are_none(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"num_pages": 300, "swa_full_tokens_ratio": 0.5}
    folder = checkpoints["mistral_window"]
    runner = device_runner(folder, **fields)
    assert runner.windows == (150, 21)
    assert runner.memory_plan().window_tokens == 150
    assert runner.memory_plan().pool_bytes == 151 * runner.info.kv_bytes_per_token
    assert device_runner(folder, num_pages=300).windows is None
    memory = 300 * runner.info.kv_bytes_per_token
    divided = device_runner(folder, kv_cache_memory=memory)
    assert (divided.num_pages, divided.windows) == (600, (300, 21))  # no layer without a window
    whole = device_runner(folder, kv_cache_memory=memory, cache="hash", page_size=1)
    assert whole.windows is None
    assert whole.memory_plan().window_tokens == 0
    plain = make_checkpoint(folder / "plain", "llama")
    assert device_runner(plain, **fields).windows is None
    monkeypatch.setattr(BACKENDS["triton"], "has_window_pages", False)
    assert device_runner(folder, **fields).windows is None
