"""Steps as pieces between their attention calls: as the whole forward, and nothing is stored of
padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from radixserve.attention.base import ForwardBatch
from radixserve.runner import piecewise_graph
from radixserve.runner.piecewise_graph import PiecewiseGraphs, capture_tokens
from tests.checkpoints import load_reference, make_checkpoint
from tests.runner.driver import Driver
from tests.runner.on_device import device_runner
from tests.runner.test_model_runner import check_parity, prompts_of

NUM_PAGES = 400


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of tokens of steps that ran in pieces."""
    monkeypatch.setattr(piecewise_graph, "CAPTURE_TOKENS", (4, 16, 24))
    found: list[int] = []
    real = PiecewiseGraphs.forward

    def forward(graphs: PiecewiseGraphs, batch: ForwardBatch, backend: Any) -> Tensor:
        found.append(batch.num_tokens)
        return real(graphs, batch, backend)

    monkeypatch.setattr(PiecewiseGraphs, "forward", forward)
    return found


# Norms before, after and around; one for attention and MLP; experts; windows and scaled embeddings.
@pytest.mark.parametrize("family", ["llama", "olmo2", "cohere", "qwen3_moe", "gemma3", "granite"])
def test_as_the_whole_forward(tmp_path: Path, family: str, seen: list[int]) -> None:
    folder = make_checkpoint(tmp_path, family)
    runner = device_runner(folder, page_size=2, num_pages=NUM_PAGES)
    assert runner.resolved_config.piecewise_tokens == 24
    assert "piecewise graphs of up to 24 tokens" in str(runner.resolved_config)
    runner.pool.kv.fill_(float("nan"))
    seen.clear()
    driver = Driver(runner, 2)
    for prompt in prompts_of([1, 3, 20, 41, 90]):
        driver.add(prompt)
    driver.run(chunk=13)
    check_parity(driver.sequences, load_reference(folder))
    assert len(seen) > 2
    assert set(seen) - {4, 16, 24}, "some were padded"
    assert driver.num_steps > len(seen), "some had more tokens"
    assert runner.pool.kv[:, :, driver.free].isnan().all()


def test_off(tmp_path: Path, seen: list[int]) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    runner = device_runner(folder, num_pages=NUM_PAGES, cuda_graphs=False)
    assert runner.resolved_config.piecewise_tokens == 0
    driver = Driver(runner, 1)
    driver.add([5, 6, 7])
    driver.run()
    assert not seen


@pytest.mark.parametrize(
    ("most", "sizes"), [(3, (3,)), (16, (4, 16)), (17, (4, 16, 17)), (99, (4, 16, 24))]
)
def test_sizes(monkeypatch: pytest.MonkeyPatch, most: int, sizes: tuple[int, ...]) -> None:
    monkeypatch.setattr(piecewise_graph, "CAPTURE_TOKENS", (4, 16, 24))
    assert capture_tokens(most) == sizes
