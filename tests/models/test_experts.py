"""Native mixtures of experts against transformers: layouts of checkpoints, settings, forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig

from radixserve.config import EngineConfig
from radixserve.errors import InvalidRequest, ModelNotSupported
from radixserve.models.cpu_decoder import load_cpu_decoder
from radixserve.models.decoder import load_decoder
from radixserve.models.decoder_shape import decoder_shape
from radixserve.models.parallel import check_split
from radixserve.models.source import checkpoint
from radixserve.runner.cpu_runner import CpuModelRunner
from radixserve_kernels.cpu_ops import unsupported_reason
from tests.checkpoints import EXPERTS, edit_json, make_checkpoint, make_config, make_model
from tests.models.forward_steps import SAMPLED, forward_steps
from tests.models.test_cpu_decoder import CPU, ODD, World, worlds
from tests.models.test_decoder import check

needs_kernels = pytest.mark.skipif(
    bool(unsupported_reason(torch.float32)),
    reason=unsupported_reason(torch.float32) or "they are here",
)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("qwen3_moe", {"norm_topk_prob": True, "num_experts": 12, "num_experts_per_tok": 5}),
        ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 21}),
        ("qwen2_moe", {"decoder_sparse_step": 2, "qkv_bias": False, "norm_topk_prob": True}),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}),
        ("mixtral", {"sliding_window": 21, "num_local_experts": 3, "num_experts_per_tok": 1}),
        ("gpt_oss", {"swiglu_alpha": 0.9, "swiglu_limit": 0.4, "attention_bias": False}),
    ],
    ids=str,
)
def test_settings(tmp_path: Path, family: str, fields: dict[str, Any]) -> None:
    if "swiglu_alpha" in fields and not hasattr(GptOssConfig(), "swiglu_alpha"):
        pytest.skip("this transformers has one activation for all of gpt-oss")
    check(make_checkpoint(tmp_path, family, seed=8, **fields))


@pytest.mark.parametrize("family", EXPERTS)
def test_several_files(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(tmp_path)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_in_one_tensor(tmp_path: Path, family: str) -> None:
    """As transformers has them in memory."""
    model = make_model(make_config(family, architectures=None), seed=2)
    model.save_pretrained(tmp_path, save_original_format=False)
    names = checkpoint(tmp_path).tensors(torch.float32, CPU)
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    check(tmp_path)


@pytest.mark.parametrize("family", EXPERTS)
def test_missing_experts_are_named(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path / "own", family)
    types = {"layer_types": ["full_attention"]} if family == "gpt_oss" else {}
    make_checkpoint(tmp_path / "other", family, num_hidden_layers=1, **types)
    (tmp_path / "other" / "config.json").write_bytes(
        (tmp_path / "own" / "config.json").read_bytes()
    )
    with pytest.raises(ModelNotSupported, match=r"missing tensors: .*layers\.1"):
        CpuModelRunner(str(tmp_path / "other"), EngineConfig(num_pages=9))


def test_other_activations_and_ranks_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a", "qwen3_moe", hidden_act="gelu_pytorch_tanh")
    runner = CpuModelRunner(str(tmp_path / "a"), EngineConfig(num_pages=9))
    assert not runner.info.is_native
    shape = decoder_shape(make_config("qwen3_moe", architectures=["Qwen3MoeForCausalLM"]))
    with pytest.raises(InvalidRequest, match="its experts are not split"):
        check_split(shape, 2)


def write_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """A gpt-oss checkpoint with experts in MXFP4; also the same, widened by transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    make_checkpoint(folder, "gpt_oss", dtype=torch.bfloat16)
    widened, stored = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in list(widened.items()):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = tensor
            continue
        count, depth, size = tensor.shape
        shape = (count, size, depth // 32, 16)
        blocks = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 126, shape[:3], dtype=torch.uint8, generator=generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        widened[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    edit_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    return widened


def test_mxfp4_is_widened(tmp_path: Path) -> None:
    widened = write_mxfp4(tmp_path / "packed")
    make_checkpoint(tmp_path / "dense", "gpt_oss", dtype=torch.bfloat16)
    save_file(widened, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    models = [
        load_decoder(checkpoint(tmp_path / name), torch.float32, CPU)
        for name in ("packed", "dense")
    ]
    packed, dense = (World(model, 2, False) for model in models)
    assert packed.model.info == dense.model.info
    for rows in forward_steps(5, 2)[:3]:
        assert torch.equal(packed.run(rows), dense.run(rows))
    runner = CpuModelRunner(str(tmp_path / "packed"), EngineConfig(num_pages=9))
    assert runner.info.is_native
    assert runner.info.dtype == torch.bfloat16


def test_other_quantized_weights_are_refused(tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "a")
    edit_json(tmp_path / "a" / "config.json", quantization_config={"quant_method": "quark"})
    with pytest.raises(ModelNotSupported, match="quantized weights"):
        CpuModelRunner(str(tmp_path / "a"), EngineConfig(num_pages=9))
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name][..., :8].contiguous()
    save_file(tensors, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    edit_json(tmp_path / "a" / "config.json", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ModelNotSupported, match=r"wrong tensors: .*experts\.down_proj is"):
        CpuModelRunner(str(tmp_path / "a"), EngineConfig(num_pages=9))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_a_row_does_not_depend_on_others(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    fields = {"num_experts_per_tok": 3, "dtype": dtype}
    own, _ = worlds(make_checkpoint(tmp_path, family, **{**ODD, **fields}), 2, dtype)
    for rows in forward_steps(3, 2)[:6]:
        rows = [row._replace(sample=SAMPLED, logprob_targets=None) for row in rows]
        together = own.run(rows)
        for number, row in enumerate(rows):
            assert torch.equal(own.run([row])[0], together[number])


@needs_kernels
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_in_8_bits(tmp_path: Path, family: str) -> None:
    source = checkpoint(make_checkpoint(tmp_path, family, num_experts_per_tok=4, **ODD))
    models = [load_cpu_decoder(source, torch.float32, form) for form in ("int8", None)]
    packed, exact = (World(model, 2, True) for model in models)
    info = packed.model.info
    assert dict(info.weight_forms)["int8"] > 0.9 * info.num_parameters
    assert info.num_parameters == exact.model.info.num_parameters
    for rows in forward_steps(4, 2)[:4]:
        got, wanted = packed.run(rows), exact.run(rows)
        assert 0 < float((got - wanted).norm() / wanted.norm()) < 0.1
