"""Adapters on the path of a device, over CPU tensors: the answers of the compiled decoder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve import Runtime
from radixserve.runner.cuda_graph import DecodeGraph
from tests.adapters.peft_adapters import make_adapter
from tests.adapters.test_activated import INVOCATION
from tests.adapters.test_adapters import CHOICES, Case, make_case, params, prompt_of
from tests.runner.on_device import SMALL, DeviceRuntime

CLOSE = 2e-4  # log-probabilities in float32


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    case = make_case("llama", tmp_path_factory.mktemp("device"))
    judge = make_adapter(
        tmp_path_factory.mktemp("judge"), case.model, 5, alora_invocation_tokens=INVOCATION
    )
    return case._replace(adapters={**case.adapters, "judge": str(judge)})


@pytest.fixture(scope="module")
def wanted(case: Case) -> Iterator[Runtime]:
    with Runtime(str(case.folder), device="cpu", num_pages=1024, adapters=case.adapters) as rt:
        yield rt


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return str(request.param)


def open_on(device: str, case: Case, **fields: Any) -> Runtime:
    kind: type[Runtime] = DeviceRuntime if device == "cpu" else Runtime
    return kind(str(case.folder), **{**SMALL, "num_pages": 1024, "device": device, **fields})


def assert_close(found: list[Any], expected: list[Any]) -> None:
    for out, right in zip(found, expected, strict=True):
        assert out.token_ids == right.token_ids
        assert out.logprobs == pytest.approx(right.logprobs, abs=CLOSE)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Graphs that were planned "with" adapters and "without", and captured again for adapters."""
    counts: Counter[str] = Counter()
    plan, capture = DecodeGraph.plan, DecodeGraph.captured_again

    def counted(self: DecodeGraph, batch: Any) -> Any:
        counts["without" if batch.lora is None else "with"] += 1
        return plan(self, batch)

    def captured(self: DecodeGraph, *args: Any) -> DecodeGraph:
        counts["captured"] += 1
        return capture(self, *args)

    monkeypatch.setattr(DecodeGraph, "plan", counted)
    monkeypatch.setattr(DecodeGraph, "captured_again", captured)
    return counts


@pytest.mark.parametrize("graphs", [True, False])
def test_mixed_batches_in_graphs(
    case: Case, wanted: Runtime, device: str, graphs: bool, replays: Counter[str]
) -> None:
    prompts = [prompt_of(seed, 9 + 13 * seed) for seed in range(5)]
    prompts.append([*prompt_of(6, 20), *INVOCATION, *prompt_of(7, 3)])
    names = [*(CHOICES[seed % 3] for seed in range(5)), "judge"]
    each = [params(name, max_tokens=9) for name in names]
    expected = wanted.generate(prompts, each)
    with open_on(device, case, adapters=case.adapters, cuda_graphs=graphs, page_size=4) as rt:
        for _ in range(2):
            assert_close(rt.generate(prompts, each), expected)
        assert_close([rt.generate(prompts[0], each[0])], expected[:1])
        rt.check()
    assert (replays["with"] > 0) == (replays["without"] > 0) == graphs


def test_graphs_are_captured_once_and_adapters_come_and_go(
    case: Case, wanted: Runtime, device: str, replays: Counter[str]
) -> None:
    prompt = prompt_of(3, 30)
    expected = {name: wanted.generate(prompt, params(name)) for name in CHOICES}
    with open_on(device, case) as rt:
        assert_close([rt.generate(prompt, params())], [expected[""]])
        for _ in range(2):
            for name in ("all", "some"):
                rt.load_adapter("sql", case.adapters[name])
                assert_close([rt.generate(prompt, params("sql"))], [expected[name]])
                rt.unload_adapter("sql")
        sizes = rt.resolved_config.graph_sizes
        rt.check()
    assert replays["with"] == 4 * 5  # decode steps after each prefill
    assert replays["captured"] == len(sizes)


def test_a_store_and_memory_for_one_adapter(case: Case, tmp_path: Path) -> None:
    """A request that waited for its adapter finds what the store has."""
    prompt = prompt_of(5, 200)
    settings: dict[str, Any] = {
        "adapters": {name: case.adapters[name] for name in ("all", "some")},
        "kv_store": str(tmp_path),
        "kv_store_write": "finish",
        "num_pages": 512,
    }
    with Runtime(str(case.folder), device="cpu", **settings) as rt:
        sizes = [info.num_bytes for info in rt.adapters.values()]
        first = [rt.generate(prompt, params(name)) for name in ("all", "some")]
    with Runtime(str(case.folder), device="cpu", adapter_memory=max(sizes), **settings) as rt:
        again = rt.generate([prompt] * 2, [params("all"), params("some")])
        stats: Any = rt.cache_stats()
        assert stats["adapters"]["read_again"] >= 1
        rt.check()
    for out, right in zip(again, first, strict=True):
        assert out.usage.loaded_tokens == 199
        assert out.logprobs == right.logprobs
