"""What transformers' code can and cannot run through the cache, refused by name at load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, masking_utils

from radixserve.attention.choice import BACKENDS
from radixserve.config import EngineConfig
from radixserve.errors import ModelNotSupported
from radixserve.models import attention_probe, hf
from radixserve.models.attention_probe import ProbedLayers, span_of_mask
from radixserve.models.source import checkpoint
from radixserve.runner.cpu_runner import CpuModelRunner
from tests.checkpoints import edit_json, make_checkpoint
from tests.runner.driver import Driver

CPU = torch.device("cpu")

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
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Llama4TextConfig", {"head_dim": 8, "num_local_experts": 2}, "by their place in the batch"),
    (
        "DeepseekV3Config",  # fewer key heads than its code can have
        {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
        r"failed in the check of its first steps: RuntimeError\('The size of tensor",
    ),
    ("CamembertConfig", {}, "not causal"),
    ("MambaConfig", {"state_size": 4}, "recurrent layers only"),
    ("JambaConfig", {"num_experts": 2}, "recurrent layers only"),
    ("BloomConfig", {"n_head": 4, "n_layer": 2}, "attention interface"),
    ("FalconConfig", {"alibi": True}, "attention interface"),
    ("BertConfig", {}, "not causal"),
    ("T5Config", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2}, "encoder-decoder"),
    (
        "Starcoder2Config",
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


def test_heads_of_all_layers_fit_into_one_pool() -> None:
    layers = ProbedLayers("Some", max_positions=64)
    layers.shapes = {0: (8, 4, 16), 1: (8, 2, 32), 2: (8, 1, 16)}
    assert layers.largest_shape() == (8, 4, 32)
    for other in ((4, 4, 16), (8, 3, 16)):  # other query heads; key heads that cannot be copied
        layers.shapes[3] = other
        with pytest.raises(ModelNotSupported, match="Some has layers of different head shapes"):
            layers.largest_shape()


def test_layers_that_use_the_keys_of_others_store_none(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gemma4")
    info = CpuModelRunner(str(tmp_path), EngineConfig(num_pages=8)).info
    assert (info.num_layers, info.kv_layers, info.window_layers) == (4, 2, (0,))
    assert (info.num_kv_heads, info.head_dim) == (2, 32)


def test_other_heads_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "stablelm")
    edit_json(tmp_path / "config.json", architectures=["StableLmForSequenceClassification"])
    with pytest.raises(ModelNotSupported, match="not a causal language model"):
        CpuModelRunner(str(tmp_path), EngineConfig(num_pages=8))


def test_comparison_finds_what_rules_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "stablelm")
    sound = hf.attention_forward

    def without_scale(module: Any, *tensors: torch.Tensor, **kwargs: Any) -> Any:
        return sound(module, *tensors, **{**kwargs, "scaling": 1.0})

    monkeypatch.setattr(hf, "attention_forward", without_scale)
    with pytest.raises(ModelNotSupported, match=r"differ by [\d.]+ of their norm"):
        CpuModelRunner(str(tmp_path), EngineConfig(num_pages=8))


def test_two_models_do_not_mix(tmp_path: Path) -> None:
    """The registered attention function is shared; nothing that belongs to a model may be."""
    runners = []
    for name, family in (("a", "gpt_neox"), ("b", "gpt_neox"), ("c", "stablelm")):
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


def test_the_probe_reads_masks() -> None:
    """Which positions a mask lets a query see, of those that transformers makes."""
    zeros = torch.zeros(1, dtype=torch.int64)
    causal = masking_utils.causal_mask_function
    window = masking_utils.sliding_window_causal_mask_function
    assert span_of_mask(causal, None) == (0, 0)
    assert span_of_mask(causal, 4) == (0, 0)
    for size in (1, 2, 7, 4096):
        assert span_of_mask(window(size), size) == (size, 0)
        chunks = masking_utils.chunked_causal_mask_function(size, zeros)
        assert span_of_mask(chunks, size) == ((0, size) if size > 1 else (1, 0))
    assert span_of_mask(window(5), 6) == "an attention mask of its own"
    both_ways = masking_utils.bidirectional_mask_function
    either = masking_utils.or_masks(causal, lambda _b, _h, q, k: (q < 2) & (k < 2))
    for mask in (both_ways, either):
        assert span_of_mask(mask, None) == "attention that is not causal"


@pytest.mark.parametrize(
    ("family", "features", "variants"),
    [
        ("gemma2", ("logits_soft_cap", "sliding_window"), ((21, 2.0), (0, 2.0))),
        ("gpt_oss", ("sinks", "sliding_window"), ((21, 0.0), (0, 0.0))),
        ("llama4", ("attention_chunk_size",), ((0, 0.0),)),
        ("starcoder2_window", ("sliding_window",), ((21, 0.0),)),
    ],
)
def test_features_are_found(
    family: str,
    features: tuple[str, ...],
    variants: tuple[tuple[int, float], ...],
    tmp_path: Path,
) -> None:
    make_checkpoint(tmp_path, family)
    model = hf.load_transformers(checkpoint(tmp_path), torch.float32, CPU)
    assert model.info.attention_features == features
    assert model.info.attention_variants == variants
    assert not model.info.is_native
    others = BACKENDS["flashinfer"].features
    missing = ", ".join(one for one in features if one not in others)
    reason = f"it has no {missing};" if missing else "the device is cpu;"
    with pytest.raises(ModelNotSupported, match=f'"flashinfer" cannot be used: {reason}'):
        CpuModelRunner(str(tmp_path), EngineConfig(num_pages=8, attention_backend="flashinfer"))


def test_a_window_of_all_positions_is_none(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "starcoder2", sliding_window=512)
    runner = CpuModelRunner(str(tmp_path), EngineConfig(num_pages=8))
    assert not runner.info.is_native
    assert not runner.info.attention_features


def test_a_window_that_is_not_kept_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the comparison with eager attention."""
    make_checkpoint(tmp_path, "starcoder2", sliding_window=5)
    monkeypatch.setattr(attention_probe, "span_of_mask", lambda *_: (0, 0))
    with pytest.raises(ModelNotSupported, match=r"differ by [\d.]+ of their norm"):
        CpuModelRunner(str(tmp_path), EngineConfig(num_pages=8))


def test_bfloat16(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "stablelm", dtype=torch.bfloat16)
    runner = CpuModelRunner(str(tmp_path), EngineConfig(num_pages=64))
    assert runner.info.dtype == torch.bfloat16
    driver = Driver(runner, 1)
    stream = driver.add(list(range(20)))
    driver.run()
    assert stream.is_done


def test_float16(tmp_path: Path) -> None:
    """Of a device: what it is compared by at load runs on the CPU, too."""
    make_checkpoint(tmp_path, "stablelm", dtype=torch.float16)
    model = hf.load_transformers(checkpoint(tmp_path), torch.float16, CPU)
    assert model.info.dtype == torch.float16
