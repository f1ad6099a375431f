"""Checkpoints of models that take images too: their text model is served, images are refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from radixserve import InvalidRequest, ModelNotSupported, Runtime, SamplingParams
from tests.checkpoints import edit_json, make_config, make_tokenizer

PROMPT = list(range(3, 60))
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=0)
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 64}
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # family of the text model, vision model
    "Gemma3": ("gemma3", {"model_type": "siglip_vision_model", **VISION}),
    "Idefics3": ("llama", {"model_type": "idefics3_vision", **VISION}),
    "Llava": ("qwen2", {"model_type": "clip_vision_model", **VISION}),
    "Mistral3": ("mistral", {"model_type": "pixtral", **VISION}),
    "Qwen2VL": ("qwen2", {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 64}),
    "Qwen2_5_VL": ("qwen2", QWEN_VISION),
    "Qwen3VL": ("qwen3", {**QWEN_VISION, "deepstack_visual_indexes": [0]}),
}


def make(folder: Path, wrapper: str) -> Any:
    """A tiny seeded wrapper in float32, saved in `folder`."""
    family, vision = CASES[wrapper]
    text = make_config(family).to_dict()
    if wrapper.startswith("Qwen"):  # its config knows its text model's type
        del text["model_type"]
        text["rope_parameters"]["mrope_section"] = [2, 3, 3]
    config = getattr(transformers, f"{wrapper}Config")(
        text_config=text,
        vision_config=vision,
        image_token_index=287,
        image_token_id=287,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    kind = getattr(transformers, f"{wrapper}ForConditionalGeneration")
    model = kind._from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def check(model: Any, answer: Any) -> None:
    ids = torch.tensor([[*PROMPT, *answer.token_ids]])
    table = model(input_ids=ids).logits[0].log_softmax(-1)[len(PROMPT) - 1 : -1]
    own = table.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    assert float((table.max(-1).values - own).max()) <= 1e-4
    assert torch.allclose(own, torch.tensor(answer.logprobs), atol=1e-4)


@pytest.mark.parametrize("wrapper", CASES)
def test_text_alone(tmp_path: Path, wrapper: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make(tmp_path, wrapper)
    with caplog.at_level(logging.INFO, "radixserve"), Runtime(tmp_path, num_pages=200) as rt:
        assert rt.model.is_native
        assert rt.model.architecture.endswith("ForCausalLM")
        (line,) = [one for one in caplog.messages if "beside the text model" in one]
        assert "tensors of parts beside the text model: not read" in line
        cold, warm = rt.generate(PROMPT, PARAMS), rt.generate(PROMPT, PARAMS)
        check(model, cold)
        assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)
        assert warm.usage.cached_tokens == len(PROMPT) - 1


def test_the_other_layout_of_names(tmp_path: Path) -> None:
    model = make(tmp_path, "Gemma3")
    tensors = load_file(tmp_path / "model.safetensors")
    old, new = "language_model.model.", "model.language_model."
    swapped = {old: new, new: old}
    prefix = next(one for one in swapped if any(name.startswith(one) for name in tensors))
    tensors = {
        swapped[prefix] + name.removeprefix(prefix) if name.startswith(prefix) else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with Runtime(tmp_path, num_pages=200) as rt:
        check(model, rt.generate(PROMPT, PARAMS))


def test_refusals(tmp_path: Path) -> None:
    make(tmp_path, "Gemma3")
    make_tokenizer(tmp_path)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with Runtime(tmp_path, num_pages=200) as rt, rt.chat() as chat:  # noqa: SIM117
        with pytest.raises(InvalidRequest, match="image_url"):
            chat.send({"role": "user", "content": [image]})
    edit_json(tmp_path / "config.json", architectures=["PaliGemmaForConditionalGeneration"])
    with pytest.raises(ModelNotSupported):
        Runtime(tmp_path, num_pages=200)
