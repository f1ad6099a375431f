"""The native decoder's variants against transformers: rope kinds, biases, tying, old configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest, ModelNotSupported
from radixserve.models.decoder_shape import check_decoder
from radixserve.models.families import FAMILIES
from radixserve.models.rope import FIRST_POSITIONS, RotaryTable
from radixserve.runner.cpu_runner import CpuModelRunner
from radixserve_kernels.torch_ops import rotations
from tests.checkpoints import (
    NATIVE,
    NATIVE_PARTS,
    RECURRENT,
    SHAPED,
    all_logprobs,
    edit_json,
    greedy,
    load_reference,
    make_checkpoint,
    make_config,
    make_model,
)
from tests.runner.driver import Driver

PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(150)]


def check(folder: Path) -> CpuModelRunner:
    """Greedy tokens and log-probabilities of one prompt, in chunks, equal transformers', in the
    decoder over the reference backend and in the machine's own; returns the runner of this one."""
    check_on(folder, "torch")
    return check_on(folder, "auto")


def check_on(folder: Path, backend: str) -> CpuModelRunner:
    runner = CpuModelRunner(str(folder), EngineConfig(num_pages=400, attention_backend=backend))
    assert runner.info.is_native
    driver = Driver(runner, 1)
    stream = driver.add(PROMPT)
    driver.run(chunk=40)
    reference = load_reference(folder)
    assert stream.tokens == greedy(reference, PROMPT, len(stream.outputs))
    logprobs = all_logprobs(reference, stream.tokens)
    for place, out in enumerate(stream.outputs, len(PROMPT) - 1):
        assert out.logprob == pytest.approx(logprobs[place, out.token_id].item(), abs=1e-4)
    return runner


ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
    },
    "yarn with its own attention factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.6,
        "beta_fast": 16,
    },
}


@pytest.mark.parametrize("kind", ROPE)
@pytest.mark.parametrize("family", NATIVE)
def test_rope_scaling(tmp_path: Path, family: str, kind: str) -> None:
    check(make_checkpoint(tmp_path, family, rope_parameters=ROPE[kind]))


def test_old_rope_fields(tmp_path: Path) -> None:
    """config.json as written before transformers 5: rope_theta and rope_scaling."""
    make_checkpoint(tmp_path / "new", "llama", rope_parameters=ROPE["llama3"])
    make_checkpoint(tmp_path / "old", "llama", rope_parameters=ROPE["llama3"])
    scaling = {k: v for k, v in ROPE["llama3"].items() if k != "rope_theta"}
    edit_json(
        tmp_path / "old" / "config.json",
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling=scaling,
        dtype=None,
        torch_dtype="float32",
    )
    assert "rope_parameters" not in json.loads((tmp_path / "old" / "config.json").read_text())
    check(tmp_path / "old")
    outputs = []
    for name in ("old", "new"):
        driver = Driver(CpuModelRunner(str(tmp_path / name), EngineConfig(num_pages=200)), 1)
        outputs.append(driver.add(PROMPT))
        driver.run()
    assert outputs[0].outputs == outputs[1].outputs


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"tie_word_embeddings": True, "head_dim": 32}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 512}),
        ("llama", {"num_hidden_layers": 1, "rms_norm_eps": 1e-3}),
    ],
)
def test_variants(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    runner = check(make_checkpoint(tmp_path, family, seed=4, **fields))
    reference = load_reference(tmp_path)
    assert runner.info.num_parameters == sum(p.numel() for p in reference.parameters())


def test_several_files(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(tmp_path)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_float16_runs_in_float32(tmp_path: Path, stored: torch.dtype) -> None:
    make_checkpoint(tmp_path, "llama", dtype=stored)
    runner = CpuModelRunner(str(tmp_path), EngineConfig(num_pages=9))
    expected = torch.float32 if stored == torch.float16 else torch.bfloat16
    assert runner.info.dtype == expected
    asked = CpuModelRunner(str(tmp_path), EngineConfig(num_pages=9, dtype="float32"))
    assert asked.info.dtype == torch.float32


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope scaling 'dynamic'",
        ),
    ],
)
def test_refused(tmp_path: Path, family: str, fields: dict[str, Any], reason: str) -> None:
    make_checkpoint(tmp_path, family, **fields)
    with pytest.raises(ModelNotSupported, match=reason):
        CpuModelRunner(str(tmp_path), EngineConfig(num_pages=10))


@pytest.mark.parametrize("share", [1.0, 0.75])
def test_longrope_up_to_the_original_length(
    tmp_path: Path, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    num_factors = round(16 * share) // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + at / 10 for at in range(num_factors)],
        "long_factor": [3.0 + at for at in range(num_factors)],
        "partial_rotary_factor": share,
    }
    fields = {"rope_parameters": rope, "original_max_position_embeddings": 200}
    runner = check(make_checkpoint(tmp_path, "phi3", **fields))
    assert runner.info.max_positions == 200
    assert "limited to 200 of the model's 512 positions: beyond them longrope" in caplog.text
    with pytest.raises(InvalidRequest, match="max_seq_len must be at most the model's 200"):
        CpuModelRunner(str(tmp_path), EngineConfig(num_pages=10, max_seq_len=300))


def test_what_the_native_decoder_has_not_runs_in_transformers_code(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", hidden_act="gelu")
    runner = CpuModelRunner(str(tmp_path), EngineConfig(num_pages=200))
    assert not runner.info.is_native
    driver = Driver(runner, 1)
    stream = driver.add(PROMPT)
    driver.run(chunk=40)
    assert stream.tokens == greedy(load_reference(tmp_path), PROMPT, len(stream.outputs))


def test_the_implementation_can_be_chosen(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "gemma3")
    native, wrapped = (
        CpuModelRunner(str(folder), EngineConfig(num_pages=200, model_impl=name))
        for name in ("native", "transformers")
    )
    assert native.info.is_native
    assert not wrapped.info.is_native
    assert native.info.attention_features == wrapped.info.attention_features == ("sliding_window",)
    streams = []
    for runner in (native, wrapped):
        driver = Driver(runner, 1)
        streams.append(driver.add(PROMPT))
        driver.run(chunk=40)
    assert streams[0].tokens == streams[1].tokens
    make_checkpoint(tmp_path / "other", "stablelm")
    for path, impl, reason in (
        (str(tmp_path / "other"), "native", "native decoder cannot run StableLm"),
        ("random:tiny-llama", "transformers", 'model_impl="transformers" runs checkpoints'),
    ):
        with pytest.raises(ModelNotSupported, match=reason):
            CpuModelRunner(path, EngineConfig(num_pages=8, model_impl=impl))


def test_a_gguf_file_or_ranks_need_the_native_decoder() -> None:
    config = make_config("llama", hidden_act="gelu")
    config.architectures = ["LlamaForCausalLM"]
    with pytest.raises(ModelNotSupported, match=r"cannot run Llama.*activation 'gelu'; possible"):
        check_decoder(config)


def test_every_native_family_is_tested() -> None:
    names = {
        type(make_model(make_config(family))).__name__
        for family in (*NATIVE, *NATIVE_PARTS, *RECURRENT, *SHAPED)
    }
    assert names == set(FAMILIES)


@pytest.mark.parametrize("family", NATIVE_PARTS)
def test_parts(tmp_path: Path, family: str) -> None:
    runner = check(make_checkpoint(tmp_path, family, seed=6))
    reference = load_reference(tmp_path)
    assert runner.info.num_parameters == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("phi3", {"rope_parameters": {**ROPE["default"], "partial_rotary_factor": 0.5}}),
        ("gemma", {"attention_bias": True, "tie_word_embeddings": False}),
        ("glm4", {"attention_bias": False}),
        ("granite", {"attention_bias": True, "mlp_bias": True}),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "full_attention": ROPE["linear"],
                    "sliding_attention": ROPE["default"],
                },
                "final_logit_softcapping": 3.0,
                "query_pre_attn_scalar": 40,
            },
        ),
        (
            "olmo3",
            {
                "rope_parameters": {
                    "full_attention": ROPE["yarn"],
                    "sliding_attention": ROPE["default"],
                },
                "tie_word_embeddings": True,
            },
        ),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 21, "no_rope_layers": [0, 1]}),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
        ("cohere2", {"attention_bias": True, "logit_scale": 0.7}),
    ],
)
def test_settings_of_parts(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    check(make_checkpoint(tmp_path, family, seed=7, **fields))


def test_rotary_table_grows_with_the_positions() -> None:
    inv_freq = torch.tensor([1.0, 0.1, 0.003])
    table = RotaryTable(inv_freq, 0.7)
    for end in (5, FIRST_POSITIONS, FIRST_POSITIONS + 1, 3 * FIRST_POSITIONS):
        positions = torch.tensor([0, end // 2, end - 1])
        assert torch.equal(table.up_to(end)[positions], rotations(positions, inv_freq, 0.7))
