"""Random requests, aborts and tiny pools on the path of a device: what is said stays the same."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from radixserve import SamplingParams
from radixserve.api.engine_factory import make_engine
from radixserve.config import EngineConfig
from radixserve.drafts.drafter import Drafts
from radixserve.engine.engine import Engine
from radixserve.request import Request
from radixserve.runner.cpu_runner import CpuModelRunner
from tests.checkpoints import load_reference, make_checkpoint, make_model
from tests.drafts.sources import KINDS, ForcedSource, Kind, Memory
from tests.models.causal_models import tiny_config
from tests.runner.driver import Driver
from tests.runner.on_device import device_runner
from tests.runner.test_model_runner import check_parity, prompts_of

NUM_REQUESTS = 10
COUNTERS = ("evicted_window_pages", "drafted_tokens", "accepted_draft_tokens")

RECURRENT = ("lfm2", "falcon_h1", "qwen3_next")  # with recurrent layers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("storm"), "qwen3")


@pytest.fixture(scope="module", params=RECURRENT)
def recurrent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_model(tiny_config(request.param)).save_pretrained(folder)
    return folder


def requests_of(rng: random.Random) -> list[Request]:
    found: list[Request] = []
    for at in range(NUM_REQUESTS):
        head: list[int] = []
        if found and rng.random() < 0.7:
            other = rng.choice(found).token_ids.tolist()
            head = other[: rng.randrange(len(other) + 1)]
        tail = [rng.randrange(256) for _ in range(rng.choice([1, 2, 7, 30]))]
        kind = rng.choice(["greedy", "sampled", "penalty", "short", "min"])
        params = SamplingParams(
            temperature=0.9 if kind == "sampled" else 0.0,
            top_k=3 if kind == "sampled" else 0,
            max_tokens=1 if kind == "short" else rng.randrange(2, 20),
            min_tokens=2 if kind == "min" else 0,
            presence_penalty=0.5 if kind == "penalty" else 0.0,
            logprobs=rng.choice([None, None, 2]),
        )
        ends = frozenset(range(0, 256, 5)) if kind in ("min", "sampled") else frozenset()
        ids = np.array((head + tail)[:70], np.int32)
        found.append(Request(f"{at}", ids, params, rng.getrandbits(60), ends, 100))
        if at and rng.random() < 0.2:  # another one of the same prompt
            first = found[-2]
            found[-1] = replace(found[-1], token_ids=first.token_ids)
    return found


def run(engine: Engine, requests: list[Request], aborts: dict[str, int]) -> dict[str, list[int]]:
    """The tokens of each; `aborts` come when so many steps are done."""
    said: dict[str, list[int]] = {one.request_id: [] for one in requests}
    waiting, done, num_steps = list(requests), set(), 0
    while waiting or engine.has_work():
        for _ in range(3):
            if waiting:
                engine.add(waiting.pop(0))
        for output in engine.step():
            said[output.request_id] += output.token_ids
            if output.finish is not None:
                assert output.finish.reason != "error", output.finish.error
                done.add(output.request_id)
        num_steps += 1
        for name, when in aborts.items():
            if when == num_steps:
                engine.abort(name)
        engine.check()
        assert num_steps < 2_000
    assert done | set(aborts) == set(said)
    return said


def check_storm(
    folder: Path,
    seed: int,
    *,
    has_windows: bool = False,
    has_states: bool = False,
    drafts: Kind | None = None,
) -> Counter[str]:
    """Returns the sums of some of the engine's counters. drafts: some, which are right, wrong or
    half right."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 16])
    tokens = rng.choice([110, 160, 600])
    caches = ["radix", "off"] if has_windows else ["radix", "radix", "off", "hash"]
    config = EngineConfig(
        page_size=size,
        num_pages=-(-tokens // size),
        chunked_prefill_size=rng.choice([3, 16, 64]),
        max_running_requests=rng.choice([2, 5, 8]),
        cache=rng.choice(caches),
        overlap=rng.random() < 0.8,
        cuda_graphs=rng.random() < 0.7,
        swa_full_tokens_ratio=0.001 if has_windows else None,  # as few window pages as can be
    )
    if has_states:
        spare = rng.choice([0, 3, 30])
        config = replace(
            config,
            cache="off" if config.cache == "off" else "radix",
            num_states=config.max_running_requests + spare,
            checkpoint_interval=rng.choice([4, 16, 512]),
        )
    fields = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    runner = device_runner(folder, **fields)
    plain = CpuModelRunner(str(folder), EngineConfig(num_pages=800))
    counts: Counter[str] = Counter()
    for _ in range(2):  # the same names again: nothing is known of the ones before
        requests = requests_of(rng)
        wanted = run(make_engine(plain, EngineConfig(num_pages=800, cache="off")), requests, {})
        names = rng.sample(list(wanted), 3)
        aborts = {name: rng.randrange(1, 30) for name in names}
        engine = make_engine(runner, config)
        if drafts is not None:
            memory = Memory()
            for each in requests:
                memory.note(each.token_ids.tolist(), wanted[each.request_id])
            source = ForcedSource(drafts, memory.guess, 256, seed)
            engine.set_drafter(Drafts([source], 8))
        found = run(engine, requests, aborts)
        stats = engine.stats()
        counts += {name: stats.get(name, 0) for name in COUNTERS}
        for name, said in found.items():
            if name in aborts:
                assert said == wanted[name][: len(said)]
            else:
                assert said == wanted[name]
    return counts


@pytest.mark.parametrize("seed", range(2))
def test_storm(folder: Path, seed: int) -> None:
    check_storm(folder, seed)


@pytest.mark.parametrize("family", ["gemma3", "mistral_window"])
def test_storm_with_window_pages(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path, family)
    storms = (check_storm(folder, seed, has_windows=True) for seed in range(2))
    assert sum(counts["evicted_window_pages"] for counts in storms) > 0


@pytest.mark.parametrize("seed", range(2))
def test_storm_of_states(recurrent: Path, seed: int) -> None:
    check_storm(recurrent, seed, has_states=True)


@pytest.mark.parametrize("drafts", KINDS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "lfm2"])
def test_storm_of_drafts(tmp_path: Path, family: str, drafts: Kind) -> None:
    """Rejected tokens, and what they have left behind, change no answer; nor do windows and states,
    nor graphs, which compute the steps without drafts."""
    folder = make_checkpoint(tmp_path, family)
    more = {"has_windows": family == "gemma3", "has_states": family == "lfm2"}
    counts = check_storm(folder, KINDS.index(drafts), drafts=drafts, **more)
    assert counts["drafted_tokens"] > 20
    assert counts["accepted_draft_tokens"] > 0 or drafts == "wrong"


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 140, 10))
@pytest.mark.parametrize("drafts", KINDS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "lfm2", "falcon_h1", "qwen3_next"])
def test_long_storm_of_drafts(tmp_path: Path, family: str, drafts: Kind, first: int) -> None:
    folder, has_windows = make_checkpoint(tmp_path, family), family == "gemma3"
    has_states = family in RECURRENT
    for seed in range(first, first + 10):
        check_storm(folder, seed, has_windows=has_windows, has_states=has_states, drafts=drafts)


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 140, 10))
def test_long_storm_of_states(recurrent: Path, first: int) -> None:
    for seed in range(first, first + 10):
        check_storm(recurrent, seed, has_states=True)


@pytest.mark.long
@pytest.mark.parametrize("first", range(100, 220, 10))
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_long_storm(tmp_path: Path, family: str, first: int) -> None:
    for seed in range(first, first + 10):
        check_storm(make_checkpoint(tmp_path, family), seed, has_windows=family != "qwen3")


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
def test_with_the_kernels_themselves(folder: Path) -> None:
    """Not their references: the whole path with Triton's interpreter in their place."""
    runner = device_runner(
        folder, num_pages=40, page_size=4, max_running_requests=2, chunked_prefill_size=24
    )
    driver = Driver(runner, 4)
    for prompt in prompts_of([5, 21]):
        driver.add(prompt)
    driver.run(chunk=11)
    check_parity(driver.sequences, load_reference(folder))


@pytest.mark.long
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("page_size", [1, 4])
def test_window_pages_with_the_kernels_themselves(tmp_path: Path, page_size: int) -> None:
    folder, rng = make_checkpoint(tmp_path, "gemma3"), random.Random(1)
    prompts = [np.array(prompt, np.int32) for prompt in prompts_of([70, 9, 45])]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    requests = [
        Request(f"{at}", ids, params, rng.getrandbits(60), frozenset(), 100)
        for at, ids in enumerate([*prompts, np.concatenate((prompts[0][:50], prompts[1]))])
    ]
    config = EngineConfig(
        num_pages=200 // page_size,
        page_size=page_size,
        max_running_requests=2,
        chunked_prefill_size=12,
        swa_full_tokens_ratio=0.001,
    )
    fields = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    engine = make_engine(device_runner(folder, **fields), config)
    plain = CpuModelRunner(str(folder), EngineConfig(num_pages=800))
    assert run(engine, requests, {}) == run(make_engine(plain, EngineConfig()), requests, {})
    assert engine.stats()["evicted_window_pages"] > 0
