"""What transformers' code can and cannot run through the cache, refused by name at load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from radixserve.config import EngineConfig
from radixserve.errors import ModelNotSupported
from radixserve.models import hf
from radixserve.models.weights import load_config
from radixserve.runner.cpu_runner import CpuModelRunner
from tests.checkpoints import edit_json, make_checkpoint
from tests.runner.driver import Driver

SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FULL = {"layer_types": ["full_attention"] * 2}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Phi3Config", {"sliding_window": 64}, "sliding window attention over 64"),
    ("Starcoder2Config", {"sliding_window": 64}, "sliding window attention over 64"),
    ("Gemma3TextConfig", {"head_dim": 8}, "sliding_attention"),
    ("Cohere2Config", {"head_dim": 8, "sliding_window": 32}, "sliding_attention"),
    ("Gemma2Config", {"head_dim": 8, **FULL}, "soft-capped"),
    ("GptOssConfig", {"head_dim": 8, "num_local_experts": 2, **FULL}, "attention sinks"),
    ("MambaConfig", {"state_size": 4}, "linear_attention|linear attention"),
    ("JambaConfig", {"num_experts": 2}, "linear_attention|linear attention"),
    ("BloomConfig", {"n_head": 4, "n_layer": 2}, "attention interface"),
    ("FalconConfig", {"alibi": True}, "attention interface"),
    ("BertConfig", {}, "not causal"),
    ("T5Config", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}, "encoder-decoder"),
    (
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
        "rope scaling 'longrope'",
    ),
    ("DiffLlamaConfig", {}, "DiffLlamaForCausalLM"),
]


@pytest.mark.parametrize(
    ("name", "fields", "reason"), REFUSED, ids=[f"{n}-{r}" for n, _, r in REFUSED]
)
def test_refused(tmp_path: Path, name: str, fields: dict[str, Any], reason: str) -> None:
    config = getattr(transformers, name)(**{**SMALL, **fields})
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelNotSupported, match=reason):
        CpuModelRunner(str(tmp_path), EngineConfig(num_pages=8))


def test_other_heads_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "olmo2")
    edit_json(tmp_path / "config.json", architectures=["Olmo2ForSequenceClassification"])
    with pytest.raises(ModelNotSupported, match="not a causal language model"):
        CpuModelRunner(str(tmp_path), EngineConfig(num_pages=8))


def test_comparison_finds_what_rules_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "olmo2")
    sound = hf._attention

    def without_scale(module: Any, *tensors: torch.Tensor, **kwargs: Any) -> Any:
        return sound(module, *tensors, **{**kwargs, "scaling": 1.0})

    monkeypatch.setattr(hf, "_attention", without_scale)
    with pytest.raises(ModelNotSupported, match=r"differ by [\d.]+ of their norm"):
        CpuModelRunner(str(tmp_path), EngineConfig(num_pages=8))


def test_two_models_do_not_mix(tmp_path: Path) -> None:
    """The registered attention function is shared; nothing that belongs to a model may be."""
    runners = []
    for name, family in (("a", "granite"), ("b", "granite"), ("c", "stablelm")):
        make_checkpoint(tmp_path / name, family, seed=ord(name))
        runners.append(CpuModelRunner(str(tmp_path / name), EngineConfig(num_pages=64)))
    alone = []
    for runner in runners:
        driver = Driver(runner, 1)
        alone.append(driver.add(list(range(20))))
        driver.run()
    drivers = [Driver(runner, 1, seed=3) for runner in runners]
    streams = [driver.add(list(range(20))) for driver in drivers]
    while not streams[0].is_done:
        for driver, stream in zip(drivers, streams, strict=True):
            driver.step([(stream, len(stream.tokens) - stream.computed)])
    assert [s.tokens for s in streams] == [s.tokens for s in alone]


def test_bfloat16(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "phi3", dtype=torch.bfloat16)
    runner = CpuModelRunner(str(tmp_path), EngineConfig(num_pages=64))
    assert runner.info.dtype == torch.bfloat16
    driver = Driver(runner, 1)
    stream = driver.add(list(range(20)))
    driver.run()
    assert stream.is_done


def test_float16(tmp_path: Path) -> None:
    """Of a device: what it is compared by at load runs on the CPU, too."""
    make_checkpoint(tmp_path, "phi3", dtype=torch.float16)
    config = load_config(tmp_path)
    model = hf.load_transformers(tmp_path, config, torch.float16, torch.device("cpu"))
    assert model.info.dtype == torch.float16
