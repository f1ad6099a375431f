"""Native recurrent layers: settings, forms of weights, published sizes, what is refused, the plain
forms of the kernels. test_native_hybrids.py has their parity in every case."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from radixserve import Runtime, SamplingParams
from radixserve.config import EngineConfig
from radixserve.models.decoder import Decoder
from radixserve.models.decoder_shape import decoder_shape, not_native_reason
from radixserve.models.decoder_tensors import LayerTensors, describe, read_decoder
from radixserve.models.families import DeltaNetParts, StateSpaceParts
from radixserve.models.source import checkpoint
from radixserve_kernels.cpu_ops import unsupported_reason
from radixserve_kernels.delta_net import DeltaNet, run_delta_net
from radixserve_kernels.quantized import dense
from radixserve_kernels.state_space import StateSpace, run_state_space
from tests.checkpoints import (
    all_logprobs,
    edit_json,
    greedy,
    load_reference,
    make_checkpoint,
    make_config,
    make_model,
)
from tests.cpu_kernels import cpu_level
from tests.models.quantized_checkpoints import quantize

__all__ = ["cpu_level"]
needs_kernels = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)), reason="there are no CPU kernels here"
)
RNG = np.random.default_rng(8)
PROMPT = RNG.integers(3, 250, 90).tolist()
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, digest=True, logprobs=0)
PLAIN_STACK = ["linear_attention", "full_attention", "linear_attention", "mlp", "linear_attention"]
Find = Callable[[str], Path]


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    made: dict[str, Path] = {}

    def find_folder(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family), family)
        return made[family]

    return find_folder


def start(folder: Path, **settings: Any) -> Runtime:
    options = {"num_pages": 4_000, "dtype": "float32", "checkpoint_interval": 16}
    return Runtime(str(folder), **{**options, **settings})


def ask(rt: Runtime, prompt: list[int]) -> Any:
    return rt.generate([prompt], PARAMS)[0]


@needs_kernels
@pytest.mark.usefixtures("cpu_level")
def test_every_level_agrees(find: Find) -> None:
    for family in ("qwen3_5", "nemotron_h"):
        model = load_reference(find(family))
        with start(find(family), chunked_prefill_size=30) as rt:
            assert [*PROMPT, *ask(rt, PROMPT).token_ids] == greedy(model, PROMPT, 10)


@needs_kernels
@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"weight_dtype": "int8"}])
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "falcon_h1"])
def test_other_forms_of_weights(family: str, settings: dict[str, Any], find: Find) -> None:
    """Close to float32; equal bits cold and warm, in chunks and whole."""
    folder = find(family)
    table = all_logprobs(load_reference(folder), PROMPT)[30:-1]
    exact = table.gather(1, torch.tensor(PROMPT[31:])[:, None])[:, 0]
    digests = []
    for chunk in (17, 512):
        with start(folder, chunked_prefill_size=chunk, **settings) as rt:
            score = rt.score(PROMPT[:31], [PROMPT[31:]])[0]
            digests += [ask(rt, PROMPT).digest, ask(rt, PROMPT).digest]
        assert float((exact - torch.tensor(score.logprobs)).abs().mean()) < 0.12
    assert len(set(digests)) == 1


def test_the_reference_is_transformers(find: Find) -> None:
    """A layer over 20 tokens, whole and token by token."""
    model = load_reference(find("qwen3_5"))
    mixer = model.model.layers[0].linear_attn
    net = DeltaNet(
        *(mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim),
        conv=mixer.conv1d.weight[:, 0].T,
        decay=-mixer.A_log.exp(),
        dt_bias=mixer.dt_bias,
        norm=mixer.norm.weight,
    )
    x = torch.randn(20, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        projections = mixer.in_proj_qkv, mixer.in_proj_z, mixer.in_proj_b, mixer.in_proj_a
        rows = torch.cat([projection(x) for projection in projections], -1)
        inputs, matrices = (torch.zeros(shape) for shape in net.state_shapes)
        eps = mixer.layer_norm_epsilon
        whole, _, _ = run_delta_net(net, rows, inputs, matrices, eps)
        parts = []
        for row in rows:
            out, inputs, matrices = run_delta_net(net, row[None], inputs, matrices, eps)
            parts.append(out)
        expected = mixer(x[None])[0]
        assert torch.allclose(mixer.out_proj(whole), expected, atol=1e-5)
        assert torch.allclose(mixer.out_proj(torch.cat(parts)), expected, atol=1e-5)


@needs_kernels
def test_state_spaces_in_4_bits(tmp_path: Path) -> None:
    """Close to the widened model; equal bits cold and warm, in chunks and whole."""
    folder = make_checkpoint(tmp_path, "granite_hybrid_dense", shared_intermediate_size=64)
    widened = quantize(folder, "pack-quantized")
    digests, scores = [], []
    for chunk in (17, 512):
        with start(folder, chunked_prefill_size=chunk) as rt:
            assert "int4" in dict(rt.model.weight_forms)
            scores.append(rt.score(PROMPT[:31], [PROMPT[31:]])[0].logprobs)
            digests += [ask(rt, PROMPT).digest, ask(rt, PROMPT).digest]
    assert len(set(digests)) == 1
    assert scores[0] == scores[1]
    save_file(widened, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=None)
    table = all_logprobs(load_reference(folder), PROMPT)[30:-1]
    exact = table.gather(1, torch.tensor(PROMPT[31:])[:, None])[:, 0]
    assert float((exact - torch.tensor(scores[0])).abs().mean()) < 0.12


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("granite_hybrid_dense", {"mamba_n_groups": 1, "time_step_limit": [0.3, 0.9]}),
    ("granite_hybrid_dense", {"mamba_proj_bias": True, "mamba_conv_bias": False}),
    ("nemotron_h", {"norm_topk_prob": False, "mlp_bias": True, "layers_block_type": PLAIN_STACK}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
]


@needs_kernels
@pytest.mark.parametrize(("family", "fields"), SETTINGS, ids=str)
def test_settings_of_state_spaces(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, **fields)
    model = load_reference(folder)
    table = all_logprobs(model, PROMPT)[30:-1]
    expected = table.gather(1, torch.tensor(PROMPT[31:])[:, None])[:, 0]
    with start(folder, chunked_prefill_size=17) as rt:
        assert rt.model.is_native
        score = rt.score(PROMPT[:31], [PROMPT[31:]])[0]
    assert torch.allclose(expected, torch.tensor(score.logprobs), atol=2e-5)


def spread(length: int, period: int, first: int, plain: str, other: str) -> list[str]:
    return [other if i % period == first else plain for i in range(length)]


PUBLISHED: dict[str, dict[str, Any]] = {  # fields of config.json
    "LFM2-8B-A1B": {
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "layer_types": spread(24, 4, 2, "conv", "full_attention"),
        "num_hidden_layers": 24,
        "rope_theta": 1_000_000.0,
    },
    "Granite 4.0 H Tiny": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 1536,
        "intermediate_size": 512,
        "shared_intermediate_size": 1024,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_hidden_layers": 40,
        "num_local_experts": 64,
        "num_experts_per_tok": 6,
        "position_embedding_type": "nope",
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "logits_scaling": 6,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-5,
        "vocab_size": 100_352,
        "tie_word_embeddings": True,
        "rope_scaling": None,
        "rope_theta": 10_000,
        "layer_types": spread(40, 10, 5, "mamba", "attention"),
        "max_position_embeddings": 131_072,
    },
    "Nemotron 3 Nano 30B-A3B": {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": 2688,
        "intermediate_size": 1856,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "max_position_embeddings": 262_144,
    },
    "Falcon-H1-0.5B": {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 32_784,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_n_groups": 1,
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": False,
        "key_multiplier": 0.39062499999999994,
        "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "rope_theta": 100_000_000_000.0,
        "max_position_embeddings": 16_384,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name: str, tmp_path: Path) -> None:
    """They are native, and their parameters are transformers', which makes no tensor of them."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    source = checkpoint(tmp_path)
    assert not_native_reason(source.config) == ""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(source.config)
    biases = [value for name, value in model.named_buffers() if name.endswith("bias")]
    expected = sum(value.numel() for value in (*model.parameters(), *biases))
    assert describe(source, torch.bfloat16).num_parameters == expected


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("nemotron_h", {"n_group": 2, "topk_group": 1}, "chosen in groups"),
    ("nemotron_h", {"moe_latent_size": 32}, "latent space"),
    ("nemotron_h", {"mamba_hidden_act": "gelu"}, "state spaces have activation 'gelu'"),
    ("falcon_h1", {"projectors_bias": True}, "projectors_bias"),
]


@pytest.mark.parametrize(("family", "fields", "reason"), REFUSED, ids=str)
def test_what_state_spaces_lack_is_named(family: str, fields: dict[str, Any], reason: str) -> None:
    config = make_config(family, **fields)
    config.architectures = [type(make_model(make_config(family))).__name__]
    assert reason in not_native_reason(config)


def test_the_reference_of_state_spaces_is_transformers(find: Find) -> None:
    """A layer over 20 tokens, whole and token by token."""
    config = checkpoint(find("granitemoehybrid")).config
    parts = decoder_shape(config).mixers[0]
    model = load_reference(find("granitemoehybrid"))
    mixer = model.model.layers[0].mamba
    assert isinstance(parts, StateSpaceParts)
    layers: list[LayerTensors] = []
    read_decoder(
        checkpoint(find("granitemoehybrid")), torch.float32, torch.device("cpu"), layers.append
    )
    net = layers[0].recurrence
    assert isinstance(net, StateSpace)
    weights = (layers[0].q, layers[0].k, layers[0].v, *layers[0].more)
    x = torch.randn(20, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        rows = torch.cat([x @ dense(weight).T for weight, _ in weights], -1)
        inputs, matrices = (torch.zeros(shape) for shape in net.state_shapes)
        assert net.state_shapes == parts.state_shapes
        eps = mixer.layer_norm_epsilon
        whole, _, _ = run_state_space(net, rows, inputs, matrices, eps)
        outs = []
        for row in rows:
            out, inputs, matrices = run_state_space(net, row[None], inputs, matrices, eps)
            outs.append(out)
        expected = mixer(x[None])[0]
        assert torch.allclose(mixer.out_proj(whole), expected, atol=1e-5)
        assert torch.allclose(mixer.out_proj(torch.cat(outs)), expected, atol=1e-5)


def test_grouped_rows() -> None:
    parts = DeltaNetParts(2, 4, k_dim=2, v_dim=1, kernel=4, is_grouped=True)
    q, k, v, z = (rows.tolist() for rows in parts.grouped_rows())
    assert (q, k, v, z) == ([0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15])
    b, a = (rows.tolist() for rows in parts.grouped_gate_rows())
    assert (b, a) == ([0, 1, 4, 5], [2, 3, 6, 7])


def test_other_backends_run_the_native_decoder_too(find: Find) -> None:
    from radixserve.runner.cpu_runner import CpuModelRunner

    settings = {"num_pages": 64, "attention_backend": "torch"}
    runner = CpuModelRunner(str(find("qwen3_5")), EngineConfig(**settings))
    assert isinstance(runner.model, Decoder)
    runner = CpuModelRunner(
        str(find("qwen3_5")), EngineConfig(model_impl="transformers", **settings)
    )
    assert not runner.info.is_native
