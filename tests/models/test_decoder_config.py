"""Configs of native families and their rotary frequencies are those of transformers, to the bit."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from radixserve.models.decoder_config import DecoderConfig, read_decoder_config
from radixserve.models.decoder_shape import decoder_shape, not_native_reason
from radixserve.models.generation_config import read_eos_ids
from radixserve.models.rope import rope_frequencies
from radixserve.models.sizes import SIZES, size_config
from radixserve.models.weights import load_config
from tests.pacing import PATIENCE_S

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
NAMES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"torch_dtype": "bfloat16", "eos_token_id": [7, 3], "tie_word_embeddings": True},
    {"dtype": "float16", "torch_dtype": "float32", "eos_token_id": None, "head_dim": 32},
    {"rope_theta": 250_000.0, "rope_scaling": None, "rms_norm_eps": 1e-5},
    {"rope_theta": 500_000, "rope_scaling": {"type": "linear", "factor": 3.0}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 777.0, "factor": 2}},
    {
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    },
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 256},
    {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 256,
            "mscale": 0.8,
            "mscale_all_dim": 1.1,
            "beta_fast": 24,
            "beta_slow": 2,
            "truncate": False,
        }
    },
    {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    {"sliding_window": None, "attention_bias": True, "mlp_bias": True},
    {"layer_types": ["full_attention"] * 3, "hidden_act": "gelu"},
]
UNUSUAL: list[dict[str, Any]] = [
    {"vocab_size": "96"},
    {"num_hidden_layers": None},
    {"rms_norm_eps": 1},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"type": "linear"}},
    {"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
    {"partial_rotary_factor": 0.5},
    {"tie_word_embeddings": 1},
    {"per_layer_config": {"0": {"hidden_size": 32}}},
    {"layer_types": ["full_attention"]},
    {"model_type": "gemma3_text"},
]


def raw_config(family: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": family, "architectures": [NAMES[family]], **SMALL, **fields}


def check_equal(ours: DecoderConfig, raw: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(raw))
    theirs = AutoConfig.from_pretrained(folder)
    for name in DecoderConfig.__slots__:
        expected = getattr(theirs, name, False if name.endswith("_bias") else None)
        found = getattr(ours, name)
        if name == "head_dim" and expected is None:  # decoder_shape has it
            continue
        if name.startswith("swiglu_") and not hasattr(theirs, name):  # an older transformers
            continue
        if name == "dtype":
            expected = None if expected is None else str(expected).removeprefix("torch.")
        elif name == "rope_parameters":
            expected, found = dict(expected), dict(found)
            expected.pop("type", None)
            if "original_max_position_embeddings" in raw:  # put there when it is first used
                expected.pop("original_max_position_embeddings", None)
                found.pop("original_max_position_embeddings", None)
        elif isinstance(expected, list):
            expected = tuple(expected)
        assert found == expected, name
    if not_native_reason(ours):
        return
    shapes = [decoder_shape(config) for config in (ours, theirs)]
    spans = [[one.span for one in shape.features] for shape in shapes]
    assert spans[0] == spans[1]
    plain = [dataclasses.replace(shape, ropes=(), features=()) for shape in shapes]
    assert plain[0] == plain[1]  # ropes are compared as rope_parameters above
    assert read_eos_ids(folder, ours) == read_eos_ids(folder, theirs)
    theirs.head_dim = ours.head_dim  # which Llama's module reads
    module = LlamaRotaryEmbedding(theirs)
    inv_freq, scaling = rope_frequencies(ours, ours.head_dim)
    assert torch.equal(inv_freq, module.inv_freq)
    assert scaling == module.attention_scaling
    again, _ = rope_frequencies(theirs, ours.head_dim)
    assert torch.equal(again, inv_freq)


@pytest.mark.parametrize("family", NAMES)
def test_equal_to_transformers(family: str, tmp_path: Path) -> None:
    for fields in VARIANTS:
        raw = raw_config(family, fields)
        ours = read_decoder_config(raw)
        if family == "mistral" and "layer_types" in fields:
            assert ours is None  # a Ministral
            continue
        has_rope = "rope_parameters" in fields or fields.get("rope_scaling")
        if (family == "gpt_oss" and not has_rope) or (
            family == "qwen2_moe" and "use_sliding_window" in fields
        ):
            assert ours is None  # rope parameters and windows of their own
            continue
        assert ours is not None, fields
        check_equal(ours, raw, tmp_path)


@pytest.mark.parametrize("name", SIZES)
def test_known_sizes(name: str, tmp_path: Path) -> None:
    check_equal(size_config(name), {**SIZES[name], "eos_token_id": None}, tmp_path)


def test_frequencies_of_many_shapes() -> None:
    thetas = (10_000.0, 500_000.0, 1_000_000, 123.5)
    factors = (1.0, 2, 7.3, 40.0)
    for dim, theta, factor in itertools.product((2, 16, 64, 96, 128), thetas, factors):
        for kind in ("linear", "llama3", "yarn"):
            rope = {"rope_type": kind, "rope_theta": theta, "factor": factor}
            if kind == "llama3":
                rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            if kind != "linear":
                rope["original_max_position_embeddings"] = 512
            fields = {**SMALL, "head_dim": dim, "rope_parameters": rope}
            ours = read_decoder_config(raw_config("llama", fields))
            assert ours is not None
            module = LlamaRotaryEmbedding(AutoConfig.for_model("llama", **fields))
            inv_freq, scaling = rope_frequencies(ours, dim)
            assert torch.equal(inv_freq, module.inv_freq), (dim, theta, factor, kind)
            assert scaling == module.attention_scaling


@pytest.mark.parametrize("fields", UNUSUAL, ids=str)
def test_what_is_unusual_is_read_by_transformers(fields: dict[str, Any]) -> None:
    assert read_decoder_config({**raw_config("llama", {}), **fields}) is None


def test_a_native_config_is_read_without_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config("qwen3", {})))
    assert isinstance(load_config(tmp_path), DecoderConfig)
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from pathlib import Path\n"
        "from radixserve.models.weights import load_config\n"
        f"load_config(Path({str(tmp_path)!r}))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
