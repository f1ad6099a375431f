"""Much used models of 2026 by their published config.json: tiny random weights, answers as in
transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from radixserve import Runtime, SamplingParams
from radixserve.replay.kv_bytes import kv_bytes_per_token
from tests.models.published_configs import PUBLISHED, WRAPPED

PROMPT = list(range(3, 50))
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)


def make(folder: Path, fields: dict[str, Any]) -> Any:
    """The model of a config.json with random weights, stored as it is published."""
    plain = {name: value for name, value in fields.items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(plain))
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    kind = getattr(transformers, fields["architectures"][0])
    model = kind._from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and "norm" in name
            parameter.copy_(
                parameter + 0.2 * torch.randn_like(parameter)
                if is_norm
                else 0.15 * torch.randn_like(parameter)
            )
    if (quantization := fields.get("quantization_config")) is not None:
        stored = _quantize(model, quantization["quant_method"])
    model.save_pretrained(folder)
    if quantization is not None:
        file = folder / "model.safetensors"
        tensors = {name: x for name, x in load_file(file).items() if name not in stored}
        parts = {part: x for parts in stored.values() for part, x in parts.items()}
        save_file({**tensors, **parts}, file, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields))
    return model


def _quantize(model: Any, method: str) -> dict[str, dict[str, Tensor]]:
    """Round a model's weights to what a scheme holds; name in its file -> the parts stored."""
    stored = {}
    for name, weight in model.named_parameters():
        if method == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            count, depth, size = weight.shape
            blocks = torch.randint(256, (count, size, depth // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 124, blocks.shape[:3], dtype=torch.uint8)
            from transformers.integrations.mxfp4 import convert_moe_packed_tensors

            weight.data.copy_(convert_moe_packed_tensors(blocks, scales).float())
            stored[name] = {f"{name}_blocks": blocks, f"{name}_scales": scales}
        is_linear = "language_model" in name and name.endswith("_proj.weight")
        if method == "fp8" and is_linear:
            scale = (weight.data.abs().max() / 448).bfloat16()
            numbers = (weight.data / scale.float()).to(torch.float8_e4m3fn)
            weight.data.copy_(numbers.float() * scale.float())
            file_name = name.replace("model.language_model.", "language_model.model.")
            module = file_name.removesuffix("weight")
            stored[file_name] = {
                file_name: numbers,
                f"{module}weight_scale_inv": scale,
                f"{module}activation_scale": torch.tensor(0.5, dtype=torch.bfloat16),
            }
    return stored


@pytest.mark.parametrize("name", PUBLISHED)
@torch.inference_mode()
def test_published(tmp_path: Path, name: str) -> None:
    model = make(tmp_path, PUBLISHED[name])
    with Runtime(tmp_path, num_pages=100, dtype="float32", max_seq_len=256) as rt:
        assert rt.model.is_native == (name not in WRAPPED)
        if rt.model.is_native:  # whose K and V are not widened
            assert 2 * kv_bytes_per_token(tmp_path, "bfloat16") == rt.memory.kv_bytes_per_token
        answer = rt.generate(PROMPT, PARAMS)
        assert rt.generate(PROMPT, PARAMS).token_ids == answer.token_ids
    ids = torch.tensor([[*PROMPT, *answer.token_ids]])
    table = model(input_ids=ids).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
    own = table.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert float((table.max(-1).values - own).max()) <= 1e-4
    assert torch.allclose(own, torch.tensor(answer.logprobs), atol=1e-4)
