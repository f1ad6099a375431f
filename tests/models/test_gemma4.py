"""Gemma 4 on the compiled kernels: layers of several head sizes, shared K and V, inputs of each
layer, experts beside the MLP. test_native_hybrids.py has its parity in every case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from radixserve import Runtime, SamplingParams
from radixserve.attention.cpu import CpuBackend
from radixserve.errors import ModelNotSupported
from radixserve.models.cpu_decoder import load_cpu_decoder
from radixserve.models.decoder_shape import compiled_parts, decoder_shape, not_native_reason
from radixserve.models.decoder_tensors import describe
from radixserve.models.rope import rope_frequencies
from radixserve.models.source import checkpoint
from radixserve.replay.kv_bytes import kv_bytes_per_token
from radixserve.runner.input_batch import build_forward_batch
from radixserve.schedule import ScheduledRequest
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.checkpoints import (
    SHAPED,
    all_logprobs,
    greedy,
    load_reference,
    make_checkpoint,
    make_config,
)
from tests.cpu_kernels import cpu_level

__all__ = ["cpu_level"]
needs_kernels = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)), reason="there are no CPU kernels here"
)
RNG = np.random.default_rng(8)
PROMPT = RNG.integers(3, 250, 90).tolist()
PARAMS = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, digest=True, logprobs=0)
Find = Callable[..., Path]


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Find:
    made: dict[str, Path] = {}

    def find_folder(family: str, **fields: Any) -> Path:
        key = f"{family} {fields}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(family), family, **fields)
        return made[key]

    return find_folder


def start(folder: Path, **settings: Any) -> Runtime:
    return Runtime(str(folder), **{"num_pages": 4_000, "dtype": "float32", **settings})


def ask(rt: Runtime, prompt: list[int]) -> Any:
    return rt.generate([prompt], PARAMS)[0]


@needs_kernels
@pytest.mark.usefixtures("cpu_level")
def test_every_level_agrees(find: Find) -> None:
    for family in SHAPED:
        model = load_reference(find(family))
        with start(find(family), chunked_prefill_size=30) as rt:
            assert [*PROMPT, *ask(rt, PROMPT).token_ids] == greedy(model, PROMPT, 10)


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("gemma4", {"use_double_wide_mlp": True, "intermediate_size": 48}),
    ("gemma4", {"num_kv_shared_layers": 0, "final_logit_softcapping": 3.0}),
    ("gemma4", {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}),
    ("gemma4_moe", {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 300}),
    ("gemma4_moe", {"use_bidirectional_attention": "vision"}),
]


@needs_kernels
@pytest.mark.parametrize(("family", "fields"), SETTINGS, ids=str)
def test_settings(family: str, fields: dict[str, Any], find: Find) -> None:
    folder = find(family, **fields)
    table = all_logprobs(load_reference(folder), PROMPT)[30:-1]
    expected = table.gather(1, torch.tensor(PROMPT[31:])[:, None])[:, 0]
    with start(folder, chunked_prefill_size=17) as rt:
        assert rt.model.is_native
        score = rt.score(PROMPT[:31], [PROMPT[31:]])[0]
    assert torch.allclose(expected, torch.tensor(score.logprobs), atol=2e-5)


@needs_kernels
@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"weight_dtype": "int8"}, {"kv_dtype": "int8"}]
)
@pytest.mark.parametrize("family", SHAPED)
def test_other_forms(family: str, settings: dict[str, Any], find: Find) -> None:
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


@needs_kernels
def test_tensors_of_sharing_layers_are_skipped(tmp_path: Path) -> None:
    """Published checkpoints have K and V projections in layers that use those of others."""
    folder = make_checkpoint(tmp_path, "gemma4")
    file = folder / "model.safetensors"
    with start(folder) as rt:
        expected = ask(rt, PROMPT).digest
    tensors = load_file(file)
    for letter in "kv":
        tensors[f"model.layers.3.self_attn.{letter}_proj.weight"] = torch.ones(64, 64)
    tensors["model.layers.3.self_attn.k_norm.weight"] = torch.ones(32)
    save_file(tensors, file, {"format": "pt"})
    with start(folder) as rt:
        assert ask(rt, PROMPT).digest == expected


def test_only_layers_that_store_have_kv(find: Find) -> None:
    info = describe(checkpoint(find("gemma4")), torch.float32)
    assert (info.num_layers, info.kv_layers, info.window_layers) == (4, 2, (0,))
    assert (info.head_dim, info.num_kv_heads) == (32, 2)
    assert info.kv_shapes == ((2, 16), (2, 32))


@needs_kernels
@pytest.mark.parametrize("dtypes", [("float32", "auto"), ("float32", "int8"), ("bfloat16", "auto")])
@pytest.mark.parametrize("family", SHAPED)
def test_a_token_takes_what_its_layers_store(
    family: str, dtypes: tuple[str, str], find: Find
) -> None:
    """The sum over the layers that store K and V; so do the pool, and the same of a config.json."""
    dtype, kv_dtype = dtypes
    config = checkpoint(find(family)).config
    own_layers = range(config.num_hidden_layers - config.num_kv_shared_layers)
    layers = [config.per_layer_config[layer] for layer in own_layers]
    size, scale = {"int8": (1, 2)}.get(kv_dtype, (4 if dtype == "float32" else 2, 0))
    each = [2 * own.num_key_value_heads * (size * own.head_dim + scale) for own in layers]
    settings = {"dtype": dtype, "kv_dtype": kv_dtype, "swa_full_tokens_ratio": 1.0}
    with start(find(family), num_pages=50, page_size=4, **settings) as rt:
        assert rt.memory.kv_bytes_per_token == sum(each)
        assert rt.memory.pool_bytes == 200 * sum(each)
    widest = 2 * 2 * (size * 32 + scale)
    assert sum(each) < len(each) * widest
    if kv_dtype == "auto":
        assert kv_bytes_per_token(find(family), "bfloat16") * size == sum(each) * 2
    else:
        assert kv_bytes_per_token(find(family), kv_dtype) == sum(each)
    memory = 500 * sum(each)
    with start(find(family), num_pages=None, kv_cache_memory=memory, **settings) as rt:
        assert rt.memory.pool_tokens == 500


@needs_kernels
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", SHAPED)
def test_stored_prefixes(family: str, kv_dtype: str, find: Find, tmp_path: Path) -> None:
    """K/V of several shapes comes back from disk with the same bits."""
    settings = {
        "kv_store": str(tmp_path / "kv"),
        "kv_dtype": kv_dtype,
        "swa_full_tokens_ratio": 1.0,
    }
    answers = []
    for _ in range(2):
        with start(find(family), **settings) as rt:
            answers.append(ask(rt, PROMPT))
    cold, loaded = answers
    assert (cold.digest, cold.token_ids) == (loaded.digest, loaded.token_ids)
    assert cold.usage.cached_tokens == 0
    assert loaded.usage.cached_tokens == len(PROMPT) - 1


@needs_kernels
def test_memory_for_other_heads_is_refused(find: Find) -> None:
    model = load_cpu_decoder(checkpoint(find("gemma4")), torch.float32)
    kv = torch.zeros(2, 2, 8, 1, 2, 32)  # as wide as the widest layer
    backend = CpuBackend(kv, model.info.num_heads)
    prompt = ScheduledRequest("", np.arange(3, 8), 0, np.arange(5), None)
    batch = build_forward_batch([prompt], 1, torch.device("cpu"))
    backend.plan(batch)
    with pytest.raises(ValueError, match=r"layer 0 are of \(2, 16\), not of \(2, 32\)"):
        model.forward(batch, backend)


def test_proportional_rope() -> None:
    rope = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    inv_freq, scaling = rope_frequencies(make_config("gemma4"), 32, rope)
    assert scaling == 1.0
    assert inv_freq.tolist()[4:] == [0.0] * 12
    assert torch.allclose(inv_freq[:4], 1e4 ** (-torch.arange(0, 8, 2) / 32))


def test_what_it_does_not_run(find: Find) -> None:
    config = checkpoint(find("gemma4")).config
    assert compiled_parts(decoder_shape(config), has_ranks=False) == "layers of several shapes"
    config.use_bidirectional_attention = "all"
    assert not_native_reason(config) == "its attention is not causal"
    with pytest.raises(ModelNotSupported, match="no layers of several shapes on the torch"):
        start(find("gemma4"), attention_backend="torch", model_impl="native")
