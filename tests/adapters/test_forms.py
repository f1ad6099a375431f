"""Adapters beside weights of 8 and 4 bits, which are rounded while the adapters are not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve import Runtime
from radixserve_kernels.quantized import to_int8
from tests.adapters.peft_adapters import applied, greedy, make_adapter
from tests.adapters.test_adapters import COUNT, params, prompt_of
from tests.checkpoints import load_reference, make_checkpoint

FORMS: dict[str, tuple[str, Mapping[str, str]]] = {  # of matrices, and of some of them
    "Q8_0": ("Q8_0", {}),
    "Q4_0": ("Q4_0", {}),
    "Q4_1": ("Q4_1", {}),
    "F16": ("F16", {}),
    "q and k in 4 bits, v in 8": ("Q4_0", {"attn_v": "Q8_0"}),
    "q in 8 bits, k in 4, v in 16": ("Q4_0", {"attn_q": "Q8_0", "attn_v": "F16"}),
}


def check(model: str, reference: Any, folder: Path, **settings: Any) -> None:
    """Answers of an adapter, of another one and of none are the reference's and do not depend on
    neighbours."""
    adapters = {
        "all": make_adapter(folder / "all", reference, 1, rank=5),
        "some": make_adapter(folder / "some", reference, 2, targets=("k_proj", "up_proj")),
    }
    names = ["", *adapters]
    prompts = [prompt_of(seed, 11 + 6 * seed) for seed in range(3)]
    pairs = [(prompt, name) for name in names for prompt in prompts]
    with Runtime(model, num_pages=1024, adapters=adapters, **settings) as rt:
        alone = [rt.generate(prompt, params(name)) for prompt, name in pairs]
        rt.flush_cache()
        mixed = rt.generate([prompt for prompt, _ in pairs], [params(name) for _, name in pairs])
    assert [out.logprobs for out in mixed] == [out.logprobs for out in alone]
    for (prompt, name), out in zip(pairs, alone, strict=True):
        if name:
            with applied(reference, Path(adapters[name])):
                tokens, logprobs = greedy(reference, prompt, COUNT)
        else:
            tokens, logprobs = greedy(reference, prompt, COUNT)
        assert out.token_ids == tokens
        assert out.logprobs == pytest.approx(logprobs, abs=5e-3)


@pytest.mark.parametrize("form", FORMS)
def test_files_in_gguf(form: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason='pip install "radixserve[gguf]"')
    from tests.models.gguf_files import write_gguf

    kind, others = FORMS[form]
    checkpoint = make_checkpoint(tmp_path / "model", "llama")
    path = write_gguf(tmp_path / "model.gguf", checkpoint, kind, kinds=others)
    reference = load_reference(checkpoint)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.ndim > 1:
                own = next((k for key, k in others.items() if f"{key[-1]}_proj" in name), kind)
                quantised = gguf.GGMLQuantizationType[own]
                stored = gguf.quants.quantize(parameter.numpy(), quantised)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, quantised)))
    check(str(path), reference, tmp_path, dtype="float32")


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_int8(family: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", family)
    reference = load_reference(checkpoint)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim > 1:
                parameter.copy_(to_int8(parameter).dequantize())
    check(str(checkpoint), reference, tmp_path, dtype="float32", weight_dtype="int8")
