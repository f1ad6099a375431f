"""Weights of 8 and 4 bits in the decoder of the CPU: read exactly, answered the same however the
work is cut up, close to the widened model."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from radixserve import InvalidRequest, ModelNotSupported, Runtime, SamplingParams
from radixserve.config import EngineConfig
from radixserve.models.gguf_forms import EXACT, exact_form, nearest_int8
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.checkpoints import make_checkpoint

gguf = pytest.importorskip("gguf", reason='pip install "radixserve[gguf]"')
from tests.models.gguf_files import stored, write_gguf  # noqa: E402

needs_kernels = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)),
    reason=unsupported_reason(torch.float32) or "they are here",
)
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
OF_256 = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0")  # a block
ROUNDED = ("Q5_1", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_XS")
MIXED = {
    "attn_v": "Q6_K",
    "attn_output": "BF16",
    "ffn_down": "Q6_K",
    "ffn_up": "Q5_0",
    "token_embd": "Q8_0",
}
TIGHT = 250  # pages: requests are preempted
FORMS = [*EXACT, *ROUNDED, "mixed", "int8"]


def make_model(
    folder: Path, form: str, family: str = "llama", **overrides: Any
) -> tuple[str, dict[str, Any]]:
    """A tiny model in the form, and the settings that it is loaded with."""
    sizes = WIDE if form in (*OF_256, "mixed") else {}
    made = make_checkpoint(folder, family, **{**sizes, **overrides})
    if form == "int8":
        return str(made), {"weight_dtype": "int8"}
    kind, kinds = ("Q4_K", MIXED) if form == "mixed" else (form, None)
    return str(write_gguf(folder / "model.gguf", made, kind, kinds=kinds)), {}


class TestReading:
    @pytest.mark.parametrize("kind", EXACT)
    def test_exact_types(self, kind: str) -> None:
        numbers = np.random.default_rng(0).normal(size=(7, 512)).astype(np.float32)
        rows = stored(numbers, kind)
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(exact_form(kind, rows).dequantize().numpy(), expected)

    @pytest.mark.parametrize("kind", ROUNDED)
    def test_rounded_types(self, kind: str) -> None:
        numbers = np.random.default_rng(0).normal(size=(7, 512)).astype(np.float32)
        rows = stored(numbers, kind)
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
        error = np.abs(nearest_int8(expected).dequantize().numpy() - expected).reshape(7, -1, 32)
        highest = np.abs(expected).reshape(7, -1, 32).max(-1, keepdims=True)
        assert (error <= 0.502 / 127 * highest).all()


def logprobs(outs: Iterable[Any]) -> list[Any]:
    return [(out.token_ids, out.logprobs) for out in outs]


@needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("form", "bits"), [("int8", 16), ("Q4_1", 16), ("mixed", 16), ("Q4_1", 8)])
def test_the_same_bits_however_the_work_is_cut_up(
    tmp_path: Path, form: str, bits: int, dtype: str
) -> None:
    """Log-probabilities are equal, not close: cold, warm, off, alone, in chunks, preempted."""
    path, settings = make_model(tmp_path, form)
    settings["activation_bits"] = bits
    rng = random.Random(0)
    head = [rng.randrange(256) for _ in range(180)]
    prompts = [
        head[: rng.randrange(180)] + [rng.randrange(256) for _ in range(rng.choice([1, 2, 5, 30]))]
        for _ in range(10)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)

    def answers(*, is_alone: bool = False, **more: Any) -> list[Any]:
        merged = {"num_pages": 9000, "max_running_requests": 8, "dtype": dtype, **settings, **more}
        with Runtime(path, **merged) as rt:
            if is_alone:
                return logprobs(rt.generate(prompt, params) for prompt in prompts)
            found = logprobs(rt.generate(prompts, params))
            assert logprobs(rt.generate(prompts[::-1], params))[::-1] == found  # warm
            assert (rt.cache_stats()["preemptions"] > 0) == (merged["num_pages"] == TIGHT)
            rt.check()
        return found

    expected = answers(is_alone=True, cache="off")
    assert answers() == expected
    assert answers(cache="off") == expected
    assert answers(chunked_prefill_size=7, page_size=4) == expected
    assert answers(chunked_prefill_size=1) == expected
    assert answers(num_pages=TIGHT) == expected


@needs_kernels
@pytest.mark.parametrize(
    ("family", "form"),
    [
        *((family, "int8") for family in ("cohere2", "gemma3", "granite", "olmo2", "qwen2_moe")),
        *(("gemma2", "Q4_0"), ("glm4", "Q5_1"), ("gpt_oss", "MXFP4"), ("phi3", "Q8_0")),
        *(("lfm2", "Q4_0"), ("qwen3_5", "Q4_1"), ("qwen3_5_moe", "Q5_0"), ("qwen3_next", "Q8_0")),
        ("nemotron_h", "Q8_0"),
    ],
)
def test_other_families(tmp_path: Path, family: str, form: str) -> None:
    """The same bits alone, together, warm and in chunks; close to the widened model."""
    tied: dict[str, Any] = {"tie_word_embeddings": True} if family == "gemma2" else {}
    if family.startswith(("qwen3_5", "qwen3_next")):  # heads of whole blocks
        tied = {"linear_value_head_dim": 32}
    if family in ("qwen3_5_moe", "qwen3_next"):
        tied |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}
        tied["num_experts_per_tok"] = 4  # all: rounding cannot choose others
    if family == "nemotron_h":
        tied = {"mamba_num_heads": 8, "mamba_head_dim": 16, "num_experts_per_tok": 4}
        tied |= {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 32}
    path, settings = make_model(tmp_path, form, family, **tied)
    rng = random.Random(0)
    head = [rng.randrange(256) for _ in range(60)]
    prompts = [[*head[:at], *head[:7]] for at in (60, 33, 20)]
    params = SamplingParams(
        temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )

    def answers(**more: Any) -> list[Any]:
        with Runtime(path, num_pages=500, dtype="float32", **{**settings, **more}) as rt:
            outs = [rt.generate(prompt, params) for prompt in prompts]
            found = [(out.token_ids, out.logprobs, out.prompt_logprobs) for out in outs]
            if not more:
                rt.flush_cache()
                together = rt.generate(prompts, params)
                assert logprobs(together) == logprobs(outs)
                assert logprobs(rt.generate(prompts, params)) == logprobs(outs)
                assert rt.model.is_quantized
            rt.check()
        return found

    expected = answers()
    assert answers(cache="off", chunked_prefill_size=7) == expected
    widened = {} if form != "int8" else {"weight_dtype": "auto"}
    exact = answers(attention_backend="torch", **widened)
    errors = np.abs(np.array(exact[0][2][1:]) - np.array(expected[0][2][1:]))
    assert 0 < errors.mean() < 0.1


@needs_kernels
@pytest.mark.parametrize("form", FORMS)
def test_close_to_the_widened_model(tmp_path: Path, form: str) -> None:
    """Of what the prompt's tokens are given, only the activations' 8 bits are lost."""
    path, settings = make_model(tmp_path, form, tie_word_embeddings=form in ("Q4_0", "Q4_K"))
    rng = random.Random(1)
    prompt = [rng.randrange(256) for _ in range(100)]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def scored(**more: Any) -> np.ndarray:
        with Runtime(path, num_pages=300, dtype="float32", **more) as rt:
            assert rt.model.is_quantized == (rt.attention_backend == "cpu")
            (out,) = rt.generate([prompt], params)
            return np.array(out.prompt_logprobs[1:], np.float64)

    packed, widened = scored(**settings), scored(attention_backend="torch")
    assert np.abs(packed - widened).max() < 0.8
    assert np.abs(packed - widened).mean() < 0.08
    assert widened.std() > 0.5


@needs_kernels
def test_forms_are_counted(tmp_path: Path) -> None:
    path, _ = make_model(tmp_path, "mixed")
    with Runtime(path, num_pages=300) as rt:
        forms = dict(rt.model.weight_forms)
        assert set(forms) == {"int8", "int4 (float scales)"}
        dense = 2 * 256 * 256 + 256 * 5  # o in bfloat16, and norms
        assert sum(forms.values()) + dense == rt.model.num_parameters
        assert rt.memory.weight_bytes - 2 * dense < sum(forms.values()) * 1.1


@needs_kernels
@pytest.mark.parametrize("is_tied", [False, True])
def test_float16_stays_16_bits_beside_float32(tmp_path: Path, is_tied: bool) -> None:
    """A checkpoint and a GGUF file; the answers of the same numbers in float32, to the bit."""
    half = make_checkpoint(
        tmp_path / "half", "llama", dtype=torch.float16, tie_word_embeddings=is_tied
    )
    tensors = {name: x.float() for name, x in load_file(half / "model.safetensors").items()}
    full = make_checkpoint(tmp_path / "full", "llama", tie_word_embeddings=is_tied)
    save_file(tensors, full / "model.safetensors", {"format": "pt"})
    file = write_gguf(tmp_path / "model.gguf", half, "F16")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)

    def answer(path: Path) -> tuple[Any, set[str]]:
        with Runtime(path, num_pages=300) as rt:
            assert rt.model.dtype == torch.float32
            (out,) = rt.generate([list(range(3, 60))], params)
            return (out.token_ids, out.logprobs), {form for form, _ in rt.model.weight_forms}

    expected, forms = answer(full)
    assert not forms
    assert answer(half) == (expected, {"float16"})
    assert answer(file) == (expected, {"float16"})


class TestRefusals:
    def test_an_unknown_form(self) -> None:
        with pytest.raises(InvalidRequest, match="weight_dtype must be one of auto, int8, got"):
            EngineConfig(weight_dtype="int3")

    def test_a_cuda_device(self) -> None:
        with pytest.raises(InvalidRequest, match="computed on the CPU only"):
            EngineConfig(weight_dtype="int8", device="cuda:1")

    def test_another_backend(self, tmp_path: Path) -> None:
        make_checkpoint(tmp_path, "llama")
        with pytest.raises(ModelNotSupported, match="runs on the torch attention backend"):
            Runtime(tmp_path, weight_dtype="int8", attention_backend="torch")

    def test_a_model_that_transformers_runs(self, tmp_path: Path) -> None:
        make_checkpoint(tmp_path, "gpt_neox")
        with pytest.raises(ModelNotSupported, match="runs on transformers' code"):
            Runtime(tmp_path, weight_dtype="int8")
