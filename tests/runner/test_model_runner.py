"""CpuModelRunner driven by hand-built Schedules, against transformers; sizes and refusals."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixserve.attention.choice import choose_backend
from radixserve.attention.cpu import CpuBackend
from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest, ModelNotSupported
from radixserve.models.base import StateShape
from radixserve.request import SamplingParams
from radixserve.runner.cpu_runner import CpuModelRunner
from radixserve.runner.input_batch import build_forward_batch
from radixserve.runner.kv_pool import KVPool
from radixserve.runner.pool_sizing import PoolSize, choose_num_pages, choose_num_states
from radixserve.runner.system_memory import free_memory
from radixserve.schedule import ScheduledRequest, ScheduledRows, SchedulerOutput
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.checkpoints import (
    FAMILIES,
    NATIVE,
    NATIVE_PARTS,
    RECURRENT,
    SHAPED,
    VOCAB_SIZE,
    all_logprobs,
    greedy,
    load_reference,
    make_checkpoint,
)
from tests.runner.driver import GREEDY, Driver, Stream

TOLERANCE = 1e-4  # of log-probabilities, float32


def check_parity(streams: list[Stream], reference: torch.nn.Module) -> None:
    """Tokens equal transformers' generate, log-probabilities its forward."""
    for stream in streams:
        prompt = stream.tokens[: stream.num_prompt]
        assert stream.tokens == greedy(reference, prompt, len(stream.outputs))
        logprobs = all_logprobs(reference, stream.tokens)
        for place, out in enumerate(stream.outputs, stream.num_prompt - 1):
            assert out.logprob == pytest.approx(logprobs[place, out.token_id].item(), abs=TOLERANCE)
            best = logprobs[place].topk(len(out.top_logprobs))
            assert [p for _, p in out.top_logprobs] == pytest.approx(
                best.values.tolist(), abs=TOLERANCE
            )
            assert out.top_logprobs[0][0] == out.token_id


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(VOCAB_SIZE) for _ in range(n)] for n in lengths]


def runner_of(
    folder: Path, page_size: int = 1, tokens: int = 1500, **fields: object
) -> CpuModelRunner:
    config = EngineConfig(num_pages=-(-tokens // page_size), page_size=page_size, **fields)
    return CpuModelRunner(str(folder), config)


def run_mixed(
    folder: Path, page_size: int, chunk: int, lengths: list[int], seed: int, **fields: object
) -> None:
    driver = Driver(runner_of(folder, page_size, **fields), page_size, seed)
    for prompt in prompts_of(lengths, seed):
        driver.add(prompt)
    driver.run(chunk)
    check_parity(driver.sequences, load_reference(folder))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(root / family, family) for family in NATIVE}


@pytest.mark.pairs
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("family", NATIVE)
def test_native_families(
    checkpoints: dict[str, Path], family: str, page_size: int, chunk: int
) -> None:
    run_mixed(checkpoints[family], page_size, chunk, [1, 3, 20, 41, 90], seed=page_size + chunk)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", NATIVE)
def test_native_families_on_torch(
    checkpoints: dict[str, Path], family: str, page_size: int
) -> None:
    lengths = [1, 3, 20, 41, 90]
    run_mixed(checkpoints[family], page_size, 7, lengths, 1, attention_backend="torch")


# RECURRENT: tests/models/test_recurrent_layers.py; in transformers' code they need states, which
# the driver does not hand out.
@pytest.mark.parametrize(
    "family", sorted(set(FAMILIES) - {*NATIVE, *NATIVE_PARTS, *RECURRENT, *SHAPED})
)
def test_transformers_families(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family, seed=1)
    backend = "torch" if family in ("starcoder2", "gpt2") else "auto"
    runner = runner_of(folder, 2, attention_backend=backend, model_impl="transformers")
    driver = Driver(runner, 2)
    assert not driver.runner.info.is_native
    for prompt in prompts_of([1, 5, 37, 70]):
        driver.add(prompt)
    driver.run(chunk=7)
    check_parity(driver.sequences, load_reference(folder))


@pytest.mark.pairs
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 32), (4, 1, 64), (8, 1, 128), (8, 2, 48)]
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_head_shapes(
    tmp_path: Path, family: str, heads: int, kv_heads: int, head_dim: int, seed: int
) -> None:
    fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    make_checkpoint(tmp_path, family, seed, tie_word_embeddings=seed == 1, **fields)
    run_mixed(tmp_path, 4, 16, [2, 30, 63], seed)


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_shared_pages_and_copied_heads(checkpoints: dict[str, Path], page_size: int) -> None:
    driver = Driver(runner_of(checkpoints["llama"], page_size, 3000), page_size)
    first = driver.add(prompts_of([75])[0])
    driver.step([(first, 75)])
    streams = []
    for shared in (1, 15, 16, 37, 64, 74):
        tail = prompts_of([9], seed=shared)[0]
        streams.append(driver.add(first.tokens[:shared] + tail, share=(first, shared)))
    driver.run(chunk=5)
    check_parity(driver.sequences, load_reference(checkpoints["llama"]))


def test_forks_share_a_page_that_its_owner_still_fills(checkpoints: dict[str, Path]) -> None:
    driver = Driver(runner_of(checkpoints["qwen2"], 16), 16)
    first = driver.add(prompts_of([20])[0])
    driver.step([(first, 20)])
    fork = driver.add([*first.tokens[:20], 5, 6], share=(first, 20))
    for _ in range(
        3
    ):  # the owner writes after the shared tokens while the fork copies and reads it
        driver.step([(first, 1), (fork, len(fork.tokens) - fork.computed)])
    check_parity([first, fork], load_reference(checkpoints["qwen2"]))


def test_bfloat16_stays_close(checkpoints: dict[str, Path]) -> None:
    driver = Driver(runner_of(checkpoints["llama"], 4, dtype="bfloat16"), 4)
    assert driver.runner.info.dtype == torch.bfloat16
    stream = driver.add(prompts_of([50])[0])
    driver.run(chunk=20)
    reference = load_reference(checkpoints["llama"]).to(torch.bfloat16)
    logprobs = all_logprobs(reference, stream.tokens)
    for place, out in enumerate(stream.outputs, stream.num_prompt - 1):
        assert out.logprob == pytest.approx(logprobs[place, out.token_id].item(), abs=0.25)


def test_seeded_tokens_do_not_depend_on_company(checkpoints: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, max_tokens=12)
    prompts = prompts_of([30, 12, 45])

    def tokens_with(company: list[list[int]], chunk: int) -> list[int]:
        driver = Driver(runner_of(checkpoints["llama"], 2), 2, seed=chunk)
        watched = driver.add(prompts[0], params, seed=123)
        for seed, prompt in enumerate(company):
            driver.add(prompt, params if seed else GREEDY, seed=seed)
        driver.run(chunk)
        return watched.output_ids

    alone = tokens_with([], 64)
    assert tokens_with(prompts[1:], 7) == alone
    assert tokens_with(prompts[:2], 64) == alone


def test_rows_without_a_sample_and_empty_schedules(checkpoints: dict[str, Path]) -> None:
    runner = runner_of(checkpoints["llama"])
    driver = Driver(runner, 1)
    stream = driver.add(prompts_of([20])[0])
    driver.step([(stream, 6)])
    assert stream.outputs == []
    nothing = SchedulerOutput(0, ScheduledRows(), np.zeros((0, 3), np.int32), 0, 0)
    output = driver.compute(nothing)
    assert output.outputs == ()
    assert set(output.seconds) == {"prepare", "forward", "sample"}
    seconds = driver.step([(stream, 14)])
    assert all(value >= 0 for value in seconds.values())
    assert len(stream.outputs) == 1


def test_pool_copies_heads_of_all_layers(checkpoints: dict[str, Path]) -> None:
    info = runner_of(checkpoints["llama"]).info
    pool = KVPool(info, PoolSize(6), 4, torch.device("cpu"))
    assert not pool.kv.any()
    pool.kv.copy_(torch.randn_like(pool.kv))
    before = pool.kv.clone()
    pool.copy_page_prefixes(np.array([[0, 3, 3], [0, 4, 1], [1, 5, 4]], np.int32))
    assert torch.equal(pool.kv[:, :, 3, :3], before[:, :, 0, :3])
    assert torch.equal(pool.kv[:, :, 3, 3:], before[:, :, 3, 3:])
    assert torch.equal(pool.kv[:, :, 4, :1], before[:, :, 0, :1])
    assert torch.equal(pool.kv[:, :, 4, 1:], before[:, :, 4, 1:])
    assert torch.equal(pool.kv[:, :, 5], before[:, :, 1])
    assert torch.equal(pool.kv[:, :, :3], before[:, :, :3])


def test_sizes(checkpoints: dict[str, Path]) -> None:
    folder = str(checkpoints["llama"])
    runner = CpuModelRunner(folder, EngineConfig(kv_cache_memory="1MB", page_size=16))
    info = runner.info
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert runner.num_pages == (1 << 20) // (info.kv_bytes_per_token * 16)
    assert runner.backend_name == ("torch" if unsupported_reason(torch.float32) else "cpu")
    reference = load_reference(checkpoints["llama"])
    assert info.num_parameters == sum(p.numel() for p in reference.parameters())
    plan = runner.memory_plan()
    assert plan.weight_bytes == info.num_parameters * 4
    assert plan.pool_tokens == runner.num_pages * 16
    assert plan.pool_bytes == plan.pool_tokens * info.kv_bytes_per_token

    default = choose_num_pages(EngineConfig(max_running_requests=3, page_size=100), info)
    assert default == 3 * 6  # 512 positions
    assert choose_num_pages(EngineConfig(max_running_requests=3, max_seq_len=10), info) == 30
    many = choose_num_pages(EngineConfig(max_running_requests=10**6), info)
    assert many * info.kv_bytes_per_token <= free_memory() // 2


def test_states_are_part_of_the_pools_memory(checkpoints: dict[str, Path]) -> None:
    plain = CpuModelRunner(str(checkpoints["llama"]), EngineConfig(num_pages=9)).info
    state = StateShape(0, "conv", 0, (1000,), torch.float32)
    info = dataclasses.replace(plain, states=(state,))

    def sizes(memory: int | None = 1 << 20, **settings: Any) -> tuple[int, int]:
        config = EngineConfig(kv_cache_memory=memory, **settings)
        count = choose_num_states(config, info)
        return count, choose_num_pages(config, info, count * info.state_bytes)

    for settings in ({"max_running_requests": 4}, {"num_states": 100}):
        count, num_pages = sizes(**settings)
        spare = (1 << 20) - count * 4000 - num_pages * info.kv_bytes_per_token
        assert count > 16
        assert 0 <= spare < info.kv_bytes_per_token
    assert sizes(max_running_requests=60)[0] == (1 << 20) // 3 // 4000
    with pytest.raises(InvalidRequest, match="more than a third of kv_cache_memory"):
        sizes(max_running_requests=90)
    with pytest.raises(InvalidRequest, match="kv_cache_memory of 9000 bytes holds 2"):
        sizes(9000, num_states=3)
    with pytest.raises(InvalidRequest, match="holds no page beside 8000 bytes of states"):
        sizes(8100, num_states=2)
    with pytest.raises(InvalidRequest, match="the free memory of"):
        sizes(None, num_states=2**31 - 1)
    assert choose_num_states(EngineConfig(num_states=5), plain) == 0


def test_too_small_or_too_large(checkpoints: dict[str, Path]) -> None:
    folder = str(checkpoints["llama"])
    with pytest.raises(InvalidRequest, match="needs 8192 bytes"):
        CpuModelRunner(folder, EngineConfig(kv_cache_memory=8191, page_size=16))
    with pytest.raises(InvalidRequest, match="512 positions"):
        CpuModelRunner(folder, EngineConfig(num_pages=10, max_seq_len=513))
    with pytest.raises(InvalidRequest, match=r"this machine has [\d.]+ .iB free; set a"):
        CpuModelRunner(folder, EngineConfig(num_pages=2**31 - 1, page_size=4096))


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_the_pool_is_never_copied(checkpoints: dict[str, Path], backend: str) -> None:
    if backend == "cpu" and (reason := unsupported_reason(torch.float32)):
        pytest.skip(reason)
    runner = runner_of(checkpoints["llama"], 4, attention_backend=backend)
    assert runner.backend_name == backend
    where = runner.pool.kv.data_ptr()
    driver = Driver(runner, 4)
    first = driver.add(prompts_of([90])[0])
    driver.run(chunk=32)
    driver.add([*first.tokens[:50], 1, 2, 3], share=(first, 50))  # copies a page's head
    driver.run(chunk=32)
    assert runner.pool.kv.data_ptr() == where
    held = runner.backend
    views = [view for pair in held.slots for view in pair]
    views += [held.kv] if backend == "cpu" else []
    for view in views:
        assert view.untyped_storage().data_ptr() == where


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="attention_backend must be one of auto, cpu, torch"):
        EngineConfig(attention_backend="flash")


def test_choice_of_a_backend() -> None:
    with pytest.raises(ModelNotSupported, match="the device is meta"):
        choose_backend("cpu", torch.float32, torch.device("meta"))
    assert choose_backend("auto", torch.float64, torch.device("cpu")) == "torch"
    assert choose_backend("torch", torch.bfloat16, torch.device("cpu")) == "torch"


@pytest.mark.parametrize("cascade_attention", [True, False])
def test_cascade_attention_can_be_switched_off(
    checkpoints: dict[str, Path], cascade_attention: bool
) -> None:
    if reason := unsupported_reason(torch.float32):
        pytest.skip(reason)
    runner = runner_of(
        checkpoints["llama"],
        tokens=9_000,
        attention_backend="cpu",
        cascade_attention=cascade_attention,
    )
    pages, token = np.arange(8_194, dtype=np.int32), np.ones(1, np.int32)
    tables = (pages[:8_193], np.append(pages[:8_192], pages[8_193]))  # all but the last in common
    rows = [ScheduledRequest("r", token, 8_192, table, None) for table in tables]
    attention = runner.backend
    attention.plan(build_forward_batch(rows, 1, torch.device("cpu")))
    assert isinstance(attention, CpuBackend)
    num_shared = len(attention.planned.jobs().num_keys) - len(rows)
    assert num_shared == (1 if cascade_attention else 0)


def test_tree_attention_is_a_switch() -> None:
    with pytest.raises(InvalidRequest, match="cascade_attention must be True or False, got 'auto'"):
        EngineConfig(cascade_attention="auto")
