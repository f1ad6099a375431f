"""What devices would hold of a model: against direct counts, and through `radixserve info`."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from radixserve.cli import main
from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest
from radixserve.models.decoder import describe_part
from radixserve.models.decoder_tensors import describe
from radixserve.models.names import RANDOM
from radixserve.models.sizes import SIZES
from radixserve.models.source import find_model
from radixserve.runner.memory_plan import MemoryPlan, plan_memory

GIB = 1 << 30


def plan(name: str, gib: float, **settings: Any) -> MemoryPlan:
    source = find_model(RANDOM + name)
    return plan_memory(source, torch.bfloat16, None, EngineConfig(**settings), int(gib * GIB))


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "qwen3-0.6b", "qwen3-32b"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_parts_are_the_whole(name: str, num_ranks: int) -> None:
    """Every rank has the embedding and the norms, a part of the head, and a part of the layers."""
    source, fields = find_model(RANDOM + name), SIZES[name]
    whole = describe(source, torch.bfloat16)
    part = describe_part(source, torch.bfloat16, num_ranks)
    embedding = fields["vocab_size"] * fields["hidden_size"]
    layers = whole.num_parameters - embedding * (1 if fields["tie_word_embeddings"] else 2)
    wanted = embedding + (embedding + layers) / num_ranks
    assert part.num_parameters == pytest.approx(wanted, rel=1e-3)  # norms are not split
    assert num_ranks * part.kv_bytes_per_token == whole.kv_bytes_per_token


def test_a_device_holds_what_weights_and_steps_leave() -> None:
    made = plan("llama-3-8b", 80)
    assert made.weight_bytes == 2 * 8_030_261_248
    assert made.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    left = int(80 * GIB * 0.9) - made.weight_bytes - made.working_bytes
    assert GIB < made.working_bytes < 4 * GIB
    assert made.pool_tokens == left // made.kv_bytes_per_token
    assert made.pool_bytes == made.pool_tokens * made.kv_bytes_per_token
    assert made.num_sessions(8192) == made.pool_tokens // 8192
    paged = plan("llama-3-8b", 80, page_size=16, gpu_memory_utilization=0.5)
    assert paged.pool_tokens == (left - int(40 * GIB) + int(8 * GIB)) // (16 << 17) * 16


def test_kv_in_8_bits_and_given_pools() -> None:
    source = find_model(RANDOM + "llama-3-8b")
    args = EngineConfig(), 80 * GIB
    whole = plan_memory(source, torch.bfloat16, None, *args)
    half = plan_memory(source, torch.bfloat16, torch.float8_e4m3fn, *args)
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token // 2
    assert half.pool_tokens // 2 == whole.pool_tokens
    assert plan("llama-3-8b", 80, kv_cache_memory="1GB").pool_tokens == 8192
    assert plan("llama-3-8b", 80, num_pages=77).pool_tokens == 77


def test_more_devices_hold_more() -> None:
    with pytest.raises(InvalidRequest, match="leaves no room"):
        plan("llama-3-70b", 80)
    two, four, eight = (plan("llama-3-70b", 80, tensor_parallel_size=n) for n in (2, 4, 8))
    assert two.kv_bytes_per_token == 327_680 // 2
    assert two.pool_tokens < four.pool_tokens < eight.pool_tokens
    assert four.weight_bytes == pytest.approx(36.85e9, rel=1e-3)


def test_layers_with_windows_hold_other_tokens() -> None:
    made = plan("gpt-oss-20b", 80)
    assert made.window_size == 128
    assert 0 < made.window_tokens < made.pool_tokens
    assert made.num_sessions(8192) == made.pool_tokens // 8192


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    return (code, *capsys.readouterr())


def test_info_shows_what_devices_would_hold(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["info", "--config", "llama-3-70b", "--device-memory", "80GB"]
    code, out, _ = run(capsys, *asked, "--kv-dtype", "fp8_e4m3", "--json")
    assert code == 0
    model = json.loads(out)["model"]
    assert model["device_memory_bytes"] == 80 * GIB
    one, *others = model["plans"]
    assert "leaves no room" in one["reason"]
    assert [other["devices"] for other in others] == [2, 4, 8]
    for other in others:
        assert other["kv_bytes_per_token"] == 327_680 // 2 // other["devices"]
        assert other["sessions"] == [
            {"tokens": size, "number": other["pool_tokens"] // size} for size in (2048, 8192)
        ]
    code, out, _ = run(capsys, *asked, "--tensor-parallel-size", "4", "--session-tokens", "1k,5000")
    assert code == 0
    assert "4 devices" in out
    assert "of 5,000 tokens" in " ".join(out.split())
    assert "2 devices" not in out


def test_info_tells_of_a_model_without_loading_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "info", "demo", "--device-memory", "8GB", "--json")
    assert code == 0
    (one, *_) = json.loads(out)["model"]["plans"]
    assert one["pool_tokens"] > 1_000_000


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--device-memory", "lots"], "--device-memory"),
        (["--session-tokens", "8k"], "--session-tokens needs --device-memory"),
        (["--device-memory", "80GB", "--session-tokens", "x"], "--session-tokens must be a number"),
        (["--device-memory", "80GB", "--session-tokens", "many"], '"250k"'),
        (["--device-memory", "80GB", "--session-tokens", "1M"], "--session-tokens"),
        (["--device-memory", "80GB", "--tensor-parallel-size", "3"], "cannot split"),
        (["--device-memory", "8GB", "--tensor-parallel-size", "1"], "leaves no room"),
    ],
)
def test_wrong_use_is_told(capsys: pytest.CaptureFixture[str], more: list[str], words: str) -> None:
    code, out, err = run(capsys, "info", "--config", "llama-3-8b", *more)
    assert (code, out) == (2, "")
    assert words in err
