"""Promise 2 for layers with windows, chunks, soft caps and sinks, and values of another size.

As in test_parity.py: transformers' own tokens, cold, warm and with the cache off. Windows hold 13
to 21 positions; prompts have up to 90 tokens and answers up to 60, those of FEW requests up to 28,
so that both cross them.
"""

from __future__ import annotations

from typing import Any

import pytest

from radixserve import Runtime
from tests.api.test_parity import SETTINGS, Case, Reference, reference, run
from tests.runner.on_device import DeviceRuntime

FEW = 6, 28  # requests of each family in the sample, tokens of their longest answers
EVICTED = Case("mistral_window", 32)
SAMPLE = [  # of native families, and others in transformers' code
    EVICTED,
    Case("gemma3", 31),
    Case("gemma2", 30),
    Case("gpt_oss", 33),
    Case("olmo3", 34),
    Case("cohere2", 35),
    Case("starcoder2_window", 41),
    Case("gemma4", 42),
    Case("gemma4_moe", 43),
]
OTHERS = [
    Case("qwen2_window", 36),
    Case("phi3_window", 37),
    Case("exaone4", 38),
    Case("llama4", 39),
    Case("deepseek_v3", 40),
]
TIGHT = SETTINGS[1]  # pages of 16, chunks of 7, evicted and preempted
ROOMY: dict[str, Any] = {"page_size": 4, "chunked_prefill_size": 33}
DROPPING: list[dict[str, Any]] = [  # window pages for one or two of eight requests
    {"page_size": 1, "chunked_prefill_size": 16, "swa_full_tokens_ratio": 0.001},
    {"page_size": 4, "chunked_prefill_size": 7, "swa_full_tokens_ratio": 0.001},
    {"page_size": 16, "chunked_prefill_size": 33, "swa_full_tokens_ratio": 0.001},
]
BARE: dict[str, Any] = {"page_size": 1, "chunked_prefill_size": 64, "cache": "off"}


@pytest.fixture(scope="module")
def references() -> dict[Case, Reference]:
    return {}


@pytest.fixture(scope="module")
def short_references() -> dict[Case, Reference]:
    """Of FEW."""
    return {}


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        (EVICTED, TIGHT),
        (EVICTED, ROOMY),
        (EVICTED, BARE),
        *(
            pytest.param(case, settings, marks=pytest.mark.long)
            for case in (*SAMPLE, *OTHERS)
            for settings in (TIGHT, ROOMY, BARE, *SETTINGS, *DROPPING)
        ),
    ],
    ids=str,
)
def test_every_setting(
    case: Case,
    settings: dict[str, Any],
    references: dict[Case, Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    run(reference(case, references, tmp_path_factory), **settings)


@pytest.mark.parametrize(
    ("settings", "kind", "backend"),
    [
        *((settings, Runtime, "cpu") for settings in DROPPING),
        (DROPPING[0], Runtime, "torch"),
        (DROPPING[1], DeviceRuntime, "triton"),
        (DROPPING[2], DeviceRuntime, "torch"),
        *(
            pytest.param(settings, *way, marks=pytest.mark.long)
            for way in ((Runtime, "torch"), (DeviceRuntime, "triton"), (DeviceRuntime, "torch"))
            for settings in DROPPING
        ),
    ],
    ids=str,
)
def test_dropped_windows(
    settings: dict[str, Any],
    kind: type[Runtime],
    backend: str,
    short_references: dict[Case, Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Layers with windows alone, some of them, and in transformers' code."""
    for case in (EVICTED, Case("gpt_oss", 33), Case("starcoder2_window", 41), Case("gemma3", 31)):
        expected = reference(case, short_references, tmp_path_factory, *FEW)
        stats = run(expected, kind=kind, **settings, attention_backend=backend)
        assert stats["evicted_window_pages"] > 0


@pytest.mark.parametrize("case", SAMPLE[1:], ids=str)
def test_a_few_requests(
    case: Case,
    short_references: dict[Case, Reference],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    expected = reference(case, short_references, tmp_path_factory, *FEW)
    run(expected, **ROOMY)
    run(expected, **BARE, attention_backend="torch")
