"""Answers under random settings of the engine: page size, chunks, small pools, kept K/V on disk,
policies, recurrent states. To the bit those of the same requests alone and without a cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve import Runtime
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.checkpoints import make_checkpoint
from tests.exact.programs import Program

FAMILIES = (
    *("llama", "gemma3", "qwen3_moe", "gpt_oss", "lfm2", "qwen3_next", "cohere2", "gpt2"),
    *("granitemoehybrid", "gemma4", "gemma4_moe"),
)
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
}  # whole vectors, for models in transformers' code
FORMS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "weight_dtype": "int8"},
    {"dtype": "bfloat16", "weight_dtype": "int8", "activation_bits": 8},
]
pytestmark = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)), reason="there are no CPU kernels here"
)


def random_settings(drawn: random.Random, alone: Runtime, folder: Path) -> dict[str, Any]:
    """Of an engine that runs the model of `alone`."""
    has_states = bool(alone.model.states)
    cache = drawn.choice(["radix", "radix", "radix", "off" if has_states else "hash"])
    page_size = drawn.choice([1, 2, 5, 16, 64])
    settings: dict[str, Any] = {
        "cache": cache,
        "page_size": page_size,
        "num_pages": -(-drawn.choice([300, 420, 800, 6_000]) // page_size) + 2,
        "chunked_prefill_size": drawn.choice([1, 7, 16, 37, 64, 200, 512]),
        "max_running_requests": drawn.choice([1, 3, 8, 64]),
        "cascade_attention": drawn.random() < 0.8,
        "schedule_policy": drawn.choice(["lpm", "fcfs", "dfs-weight"]),
        "max_overtake": drawn.choice([0, 3, 64]),
    }
    if cache == "radix":
        eviction = drawn.choice(["lru", "arc", "lfu", "slru", "expected-return"])
        settings["eviction"] = eviction
        if eviction == "expected-return" and drawn.random() < 0.5:
            settings["admission"] = "priced"
        kind = drawn.choice(["plain", "windows", "store"])
        if kind == "windows" or has_states:
            settings["swa_full_tokens_ratio"] = drawn.choice([0.3, 0.6, 1.0])
        elif kind == "store":
            settings["swa_full_tokens_ratio"] = 1.0  # a store has no window pages
            settings["kv_store"] = str(folder)
            settings["kv_store_write"] = drawn.choice(["finish", "reuse"])
    if has_states and drawn.random() < 0.7:
        settings["max_running_requests"] = drawn.randint(1, 6)
        settings["num_states"] = drawn.randint(12, 60)
        settings["checkpoint_interval"] = drawn.choice([1, 9, 16, 50])
    return settings


def check_settings(model: str, form: dict[str, Any], seed: int, folder: Path) -> None:
    """A program in two parts; between them the engine ends, and a store keeps its K/V."""
    drawn = random.Random(seed)
    with Runtime(model, **form, num_pages=6_000, cache="off", cascade_attention=False) as alone:
        assert alone.resolved_config.inexact == ""
        settings = {**form, **random_settings(drawn, alone, folder)}
        program = Program.of(alone, drawn, longest=200)
        for _ in range(2):
            with Runtime(model, **settings) as program.runtime:
                program.run(3)
                program.runtime.check()
        assert not list(program.differences(alone)), settings


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        family: str(make_checkpoint(folder / family, family, **(WIDE if family == "gpt2" else {})))
        for family in FAMILIES
    }


@pytest.mark.long
@pytest.mark.parametrize("seed", range(200))
def test_random_settings(seed: int, models: dict[str, str], tmp_path: Path) -> None:
    drawn = random.Random(seed)
    family = drawn.choice(FAMILIES)
    form = drawn.choice(FORMS[:2] if family == "gpt2" else FORMS)
    check_settings(models[family], form, seed, tmp_path)
