"""What of an adapter is not computed is refused by name, and loading it changes nothing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from radixserve import InvalidRequest, ModelNotSupported, Runtime
from radixserve.models.source import checkpoint
from tests.adapters.peft_adapters import make_adapter
from tests.checkpoints import load_reference, make_checkpoint
from tests.models.test_parallel import split

EXPERTS = "adapters of experts are not built; those of attention are"
UNGATED = "adapters of an MLP without a gate are not built"
MIXER = "adapters of layers with a recurrence or a convolution are not built"
ATTENTION = "adapters of attention with an output gate or with shared K and V are not built"
MODULES = [  # family, a module of its layers, the message
    ("mixtral", "mlp.gate_proj", EXPERTS),
    ("mixtral", "mlp.experts.1.w1", r"layers\.0\.mlp\.experts\.1\.w1: possible are self_attn"),
    ("qwen3_moe", "mlp.up_proj", EXPERTS),
    ("qwen3_moe", "mlp.experts.0.down_proj", r"layers\.0\.mlp\.experts\.0\.down_proj: possible"),
    ("qwen2_moe", "mlp.shared_expert.up_proj", r"mlp\.shared_expert\.up_proj: possible are"),
    ("nemotron_h", "mixer.up_proj", UNGATED),
    ("qwen3_next", "self_attn.q_proj", MIXER),
    ("qwen3_next", "linear_attn.in_proj_qkvz", r"linear_attn\.in_proj_qkvz: possible are"),
    ("lfm2", "conv.in_proj", r"conv\.in_proj: possible are"),
    ("falcon_h1", "mamba.in_proj", r"mamba\.in_proj: possible are"),
    ("falcon_h1", "self_attn.q_proj", MIXER),
    ("gemma4", "per_layer_input_gate", r"per_layer_input_gate: possible are"),
    ("llama", "9" * 5000, "tensors that are not built"),
    ("llama", "input_layernorm", r"input_layernorm: possible are mlp\.down_proj, mlp\.gate_proj"),
]


def write(folder: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> Path:
    """An adapter of these tensors, by their names after `base_model.model.`."""
    folder.mkdir()
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def pair(module: str, inputs: int = 64, outputs: int = 64) -> dict[str, torch.Tensor]:
    return {
        f"{module}.lora_A.weight": torch.ones(2, inputs),
        f"{module}.lora_B.weight": torch.ones(outputs, 2),
    }


@pytest.fixture(scope="module")
def runtimes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Runtime]]:
    """One of each family, made when it is first asked for."""

    class Made(dict[str, Runtime]):
        def __missing__(self, family: str) -> Runtime:
            folder = make_checkpoint(tmp_path_factory.mktemp(family) / "model", family)
            self[family] = runtime = Runtime(str(folder), num_pages=64)
            return runtime

    made = Made()
    yield made
    for runtime in made.values():
        runtime.close()


@pytest.mark.parametrize(("family", "module", "message"), MODULES)
def test_modules(
    runtimes: dict[str, Runtime], tmp_path: Path, family: str, module: str, message: str
) -> None:
    folder = write(tmp_path / "a", pair(f"model.layers.0.{module}"))
    with pytest.raises(ModelNotSupported, match=message):
        runtimes[family].load_adapter("a", folder)
    assert runtimes[family].adapters == {}


@pytest.mark.parametrize(("family", "layer"), [("qwen3_next", 1), ("gemma4", 3)])
def test_attention_that_is_not_plain(
    runtimes: dict[str, Runtime], tmp_path: Path, family: str, layer: int
) -> None:
    folder = write(tmp_path / "a", pair(f"model.layers.{layer}.self_attn.q_proj"))
    with pytest.raises(ModelNotSupported, match=ATTENTION):
        runtimes[family].load_adapter("a", folder)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("layers.0.self_attn.q_proj.lora_magnitude_vector", "tensors that are not built: .*magni"),
        ("layers.0.self_attn.q_proj.lora_B.bias", r"lora_B\.bias; possible are lora_A and lora_B"),
        ("layers.0.self_attn.q_proj.bias", r"q_proj\.bias; possible are"),
        ("embed_tokens.lora_embedding_A", "lora_embedding_A; possible are"),
        ("lm_head.weight", r"lm_head\.weight; possible are"),
        ("layers.0.self_attn.k_proj.lora_A.weight", "k_proj: lora_A or lora_B is missing"),
    ],
)
def test_tensors(runtimes: dict[str, Runtime], tmp_path: Path, extra: str, message: str) -> None:
    """Also where the config does not tell."""
    tensors = pair("model.layers.0.self_attn.q_proj") | {f"model.{extra}": torch.ones(2, 64)}
    folder = write(tmp_path / "a", tensors)
    with pytest.raises((ModelNotSupported, InvalidRequest), match=message):
        runtimes["llama"].load_adapter("a", folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "adapters with use_dora=True are not built"),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights='corda'"),
        ({"peft_type": "IA3"}, "is of type 'IA3'; LORA alone can be computed"),
    ],
)
def test_kinds(
    runtimes: dict[str, Runtime], tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path / "a", pair("model.layers.0.self_attn.q_proj"), **fields)
    with pytest.raises(ModelNotSupported, match=message):
        runtimes["llama"].load_adapter("a", folder)


@pytest.mark.parametrize(
    ("inputs", "outputs", "value", "message"),
    [
        (64, 32, 1.0, r"lora_A and lora_B of \(\(2, 64\), \(32, 2\)\), not of"),
        (32, 64, 1.0, r"not of \(\(2, 64\), \(64, 2\)\)"),
        (64, 64, math.inf, "some of its numbers are not finite"),
        (64, 64, 1j, "must be tensors of floats"),
    ],
)
def test_numbers(
    runtimes: dict[str, Runtime],
    tmp_path: Path,
    inputs: int,
    outputs: int,
    value: complex,
    message: str,
) -> None:
    tensors = pair("model.layers.0.self_attn.q_proj", inputs, outputs)
    folder = write(tmp_path / "a", {name: value * tensor for name, tensor in tensors.items()})
    with pytest.raises((ModelNotSupported, InvalidRequest), match=message):
        runtimes["llama"].load_adapter("a", folder)


@pytest.mark.parametrize("pattern", ["(.*)*x", ".*.*.*.*x", "x" * 257, "(", "x{99999999999}"])
def test_patterns(runtimes: dict[str, Runtime], tmp_path: Path, pattern: str) -> None:
    """Matching one keeps Python's lock, and may take for ever."""
    tensors = pair("model.layers.0.self_attn.q_proj")
    folder = write(tmp_path / "a", tensors, alpha_pattern={pattern: 2})
    with pytest.raises(InvalidRequest, match=r"alpha_pattern: .* (repeated group|not a pattern)"):
        runtimes["llama"].load_adapter("a", folder)


def test_a_damaged_file(runtimes: dict[str, Runtime], tmp_path: Path) -> None:
    folder = write(tmp_path / "a", pair("model.layers.0.self_attn.q_proj"))
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(InvalidRequest, match="is not a safetensors file"):
        runtimes["llama"].load_adapter("a", folder)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InvalidRequest, match="not a file"):
        runtimes["llama"].load_adapter("a", folder)


def test_models_in_the_code_of_transformers(tmp_path: Path) -> None:
    checkpoint_folder = make_checkpoint(tmp_path / "model", "llama")
    adapter = make_adapter(tmp_path / "a", load_reference(checkpoint_folder), 0)
    settings: dict[str, Any] = {"num_pages": 64, "model_impl": "transformers"}
    with (
        Runtime(str(checkpoint_folder), **settings) as rt,
        pytest.raises(ModelNotSupported, match="LlamaForCausalLM runs in transformers' code here"),
    ):
        rt.load_adapter("a", adapter)


def test_several_ranks(tmp_path: Path) -> None:
    source = checkpoint(make_checkpoint(tmp_path / "model", "llama"))
    for part in split(source, 2):
        with pytest.raises(ModelNotSupported, match="adapters over several ranks are not built"):
            part.pack_adapter({})
