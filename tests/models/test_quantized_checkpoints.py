"""Quantised safetensors: read as their formats store them, answered as the widened model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixserve import ModelNotSupported, Runtime, SamplingParams
from radixserve.models.source import checkpoint
from radixserve_kernels.quantized import form_of
from tests.checkpoints import all_logprobs, edit_json, load_reference, make_checkpoint
from tests.models.quantized_checkpoints import CASES, quantize

PROMPT = list(range(3, 60))
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
CPU = torch.device("cpu")
WEIGHT = "model.layers.1.self_attn.q_proj.weight"


def make(folder: Path, name: str, family: str = "llama", **fields: Any) -> dict[str, Tensor]:
    return quantize(make_checkpoint(folder, family, **fields), name)


def reference(folder: Path, widened: dict[str, Tensor]) -> Any:
    """transformers' model of the widened weights."""
    save_file(widened, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config=None)
    return load_reference(folder)


@torch.inference_mode()
def check(model: Any, answer: Any) -> None:
    table = all_logprobs(model, [*PROMPT, *answer.token_ids])[len(PROMPT) - 1 : -1]
    own = table.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert float((table.max(-1).values - own).max()) <= 1e-4
    assert torch.allclose(own, torch.tensor(answer.logprobs), atol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_every_number(tmp_path: Path, name: str) -> None:
    """Widened or in a form, a weight has the numbers that its parts stand for, all of them."""
    widened, form = make(tmp_path, name), CASES[name][2]
    kept = checkpoint(tmp_path).tensors(torch.float32, CPU, keeps_forms=True)
    plain = checkpoint(tmp_path).tensors(torch.float32, CPU)
    for key, tensor in widened.items():
        weight = kept.take_weight(key, tuple(tensor.shape))
        own = weight if isinstance(weight, Tensor) else weight.dequantize()
        assert torch.equal(own, tensor), key
        assert torch.equal(plain.take(key, tuple(tensor.shape)), tensor), key
        if key == WEIGHT:
            assert form_of(weight) == (form or "float32")
    kept.finish()
    plain.finish()


@pytest.mark.parametrize(
    ("name", "family", "fields"),
    [
        ("fp8, blocks", "qwen3", {}),
        ("fp8, tensors", "mixtral", {}),
        ("float-quantized", "qwen3_5", {}),
        ("int-quantized", "llama", {"attention_bias": True}),
        ("pack-quantized", "qwen3_moe", {}),
        ("pack-quantized, order", "phi3", {"pad_token_id": 0}),
        ("awq", "qwen2", {}),
        ("gptq, desc_act", "llama", {}),
        ("gptq", "glm4", {"pad_token_id": 0}),
    ],
)
def test_the_logits_of_the_widened_model(
    tmp_path: Path, name: str, family: str, fields: dict[str, Any]
) -> None:
    widened = make(tmp_path, name, family, **fields)
    with Runtime(tmp_path, num_pages=200, attention_backend="torch") as rt:
        answers = [rt.generate(PROMPT, PARAMS)]
    with Runtime(tmp_path, num_pages=200, model_impl="transformers") as rt:
        assert not rt.model.is_native
        answers.append(rt.generate(PROMPT, PARAMS))
    with Runtime(tmp_path, num_pages=200) as rt:
        packed = rt.generate(PROMPT, PARAMS)
        assert rt.generate(PROMPT, PARAMS).logprobs == packed.logprobs  # warm
        assert rt.model.is_native
        if rt.attention_backend == "cpu":
            assert rt.model.is_quantized == (CASES[name][2] is not None)
        if not rt.model.is_quantized:
            answers.append(packed)
        rt.check()
    model = reference(tmp_path, widened)
    for answer in answers:
        check(model, answer)


@pytest.mark.parametrize("name", ["fp8, blocks", "pack-quantized"])
def test_a_model_that_transformers_runs(tmp_path: Path, name: str) -> None:
    widened = make(tmp_path, name, "olmo")
    with Runtime(tmp_path, num_pages=200) as rt:
        assert not rt.model.is_native
        answer = rt.generate(PROMPT, PARAMS)
    check(reference(tmp_path, widened), answer)


@pytest.mark.parametrize("name", ["fp8, blocks", "float-quantized", "int-quantized"])
def test_other_dtypes_and_forms(tmp_path: Path, name: str) -> None:
    make(tmp_path, name)
    edit_json(tmp_path / "config.json", dtype="bfloat16")
    with Runtime(tmp_path, num_pages=200) as rt:
        assert rt.model.dtype == torch.bfloat16
        rt.generate(PROMPT, PARAMS)
    with Runtime(tmp_path, num_pages=200, dtype="float32") as rt:
        assert rt.model.dtype == torch.float32
    if rt.attention_backend == "cpu":
        with Runtime(tmp_path, num_pages=200, weight_dtype="int8") as rt:
            assert dict(rt.model.weight_forms).keys() == {"int8"}


COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
INT3 = {"config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 3}}}}


@pytest.mark.parametrize("impl", ["auto", "transformers"])
@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with version 'gemv'"),
        ({"quant_method": "gptq", "bits": 3}, "gptq with bits 3"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ({**COMPRESSED, **INT3}, "int 3 bits"),
        ({**COMPRESSED, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_other_schemes_are_refused_by_name(
    tmp_path: Path, fields: dict[str, Any], what: str, impl: str
) -> None:
    make_checkpoint(tmp_path, "llama")
    edit_json(tmp_path / "config.json", quantization_config=fields)
    with pytest.raises(ModelNotSupported, match=rf"{what}.* possible are awq \(4 bits, gemm\), co"):
        Runtime(tmp_path, num_pages=200, model_impl=impl)


@pytest.mark.parametrize(
    ("name", "part", "value"),
    [
        ("fp8, blocks", "weight_scale_inv", torch.ones(1, 2)),
        ("pack-quantized", "weight_scale", torch.ones(64, 3)),
        ("gptq", "qweight", torch.ones(8, 64, dtype=torch.int64)),
    ],
)
def test_broken_parts_are_named(tmp_path: Path, name: str, part: str, value: Tensor) -> None:
    make(tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    assert f"model.layers.1.self_attn.q_proj.{part}" in tensors
    tensors[f"model.layers.1.self_attn.q_proj.{part}"] = value
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotSupported, match=r"layers\.1\.self_attn\.q_proj\.weight is not st"):
        Runtime(tmp_path, num_pages=200)


def test_a_part_without_its_weight_is_named(tmp_path: Path) -> None:
    make(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_proj.qweight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelNotSupported, match=r"missing tensors: .*1\.self_attn\.q_proj\.weight"):
        Runtime(tmp_path, num_pages=200)


def test_as_compressed_tensors_reads_them() -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    for number, (name, (config, store, _)) in enumerate(CASES.items()):
        if config["quant_method"] != "compressed-tensors" or "order" in name:
            continue
        torch.manual_seed(number)
        parts, widened = store(torch.randn(48, 64))
        weights = dict(config["config_groups"]["group_0"]["weights"])
        weights["symmetric"] = "zero points" not in name
        if "whole rows" in name:
            weights |= {"strategy": "channel", "group_size": None}
        scheme = QuantizationScheme(targets=["Linear"], weights=weights)
        compressor = BaseCompressor.load_from_registry(config["format"])
        theirs = compressor.decompress(parts, scheme)["weight"]
        assert torch.equal(theirs.float(), widened.to(theirs.dtype).float()), name
