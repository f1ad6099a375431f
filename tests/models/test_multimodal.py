"""Checkpoints of models that take images too: their text model is served, images are refused."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from radixserve import InvalidRequest, ModelNotSupported, Runtime, SamplingParams
from radixserve.models.multimodal import picture_refusal
from tests.checkpoints import MOE, SIZES, edit_json, make_config, make_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
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
QWEN3_VISION = {**QWEN_VISION, "intermediate_size": 16}
LFM2_VISION = {"model_type": "siglip2_vision_model", **VISION}
MROPE = {"mrope_section": [2, 3, 3]}
LINEAR = {  # layers with a recurrent state beside one that attends
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 4),
}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True)
class Case:
    wrapper: str  # the published class is this and "ForConditionalGeneration"
    family: str | None  # of tests/checkpoints.py; None: the wrapper's own text model
    vision: dict[str, Any]
    text: dict[str, Any] = field(default_factory=dict)  # further fields of the text model
    is_native: bool = True

    @property
    def text_model(self) -> str:
        own = getattr(transformers, f"{self.wrapper}Config").sub_configs["text_config"]
        return str(self.text.get("model_type") or self.family or own.model_type)


CASES = {
    "gemma3": Case("Gemma3", "gemma3", {"model_type": "siglip_vision_model", **VISION}),
    "idefics3": Case("Idefics3", "llama", {"model_type": "idefics3_vision", **VISION}),
    "llava": Case("Llava", "qwen2", {"model_type": "clip_vision_model", **VISION}),
    "mistral3": Case("Mistral3", "mistral", {"model_type": "pixtral", **VISION}),
    "qwen2_vl": Case("Qwen2VL", None, {**QWEN_VISION, "embed_dim": 16, "hidden_size": 64}),
    "qwen2_5_vl": Case("Qwen2_5_VL", None, QWEN_VISION),
    "qwen3_vl": Case("Qwen3VL", None, {**QWEN3_VISION, "deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": Case(
        "Qwen3VLMoe", None, {**QWEN3_VISION, "deepstack_visual_indexes": [0]}, {**MOE}
    ),
    "ministral3": Case(
        "Mistral3",
        None,
        {"model_type": "pixtral", **VISION},
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": MINISTRAL_ROPE},
        is_native=False,
    ),
    "lfm2_vl": Case(
        "Lfm2Vl",
        None,
        LFM2_VISION,
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    ),
    "lfm2_vl_moe": Case(
        "Lfm2Vl",
        None,
        LFM2_VISION,
        {
            "model_type": "lfm2_moe",
            "layer_types": ["conv", "full_attention"],
            **MOE,
            "num_dense_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen3_5": Case("Qwen3_5", None, QWEN3_VISION, LINEAR),
    "qwen3_5_moe": Case(
        "Qwen3_5Moe",
        None,
        QWEN3_VISION,
        {**LINEAR, **MOE, "shared_expert_intermediate_size": 48},
    ),
    "gemma4": Case(
        "Gemma4",
        "gemma4",
        {"model_type": "gemma4_vision", **VISION},
        {"pad_token_id": 0},
    ),
    "lighton_ocr": Case("LightOnOcr", "qwen3", {"model_type": "pixtral", **VISION}),
    "exaone4_5": Case("Exaone4_5_", "exaone4", QWEN_VISION),
    "llama4": Case(
        "Llama4",
        "llama4",
        {"model_type": "llama4_vision_model", **VISION, "vision_output_dim": 16},
        is_native=False,
    ),
}


def text_fields(case: Case) -> dict[str, Any]:
    if case.family is not None:
        return {**make_config(case.family).to_dict(), **case.text}
    fields = {**SIZES, **case.text}
    if case.wrapper.startswith("Qwen"):  # its config knows its text model's type
        fields.setdefault("head_dim", 16)
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, **MROPE}
    return fields


def make(folder: Path, name: str) -> Any:
    """A tiny seeded wrapper in float32, saved in `folder` under its published class."""
    case = CASES[name]
    config = getattr(transformers, f"{case.wrapper}Config")(
        text_config=text_fields(case),
        vision_config=case.vision,
        image_token_index=287,
        image_token_id=287,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    kind = getattr(transformers, f"{case.wrapper}ForConditionalGeneration")
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


@pytest.mark.parametrize("name", CASES)
def test_text_alone(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make(tmp_path, name)
    if name == "llama4":  # the wrapper's own forward fails without images in transformers 5.24
        model = model.language_model
    published = json.loads((tmp_path / "config.json").read_text())["architectures"]
    assert published == [f"{CASES[name].wrapper}ForConditionalGeneration"]
    with caplog.at_level(logging.INFO, "radixserve"), Runtime(tmp_path, num_pages=200) as rt:
        assert rt.model.is_native == CASES[name].is_native
        assert rt.model.architecture.endswith("ForCausalLM")
        (line,) = [text for text in caplog.messages if "beside the text model" in text]
        assert "tensors of parts beside the text model: not read" in line
        cold, warm = rt.generate(PROMPT, PARAMS), rt.generate(PROMPT, PARAMS)
        check(model, cold)
        assert warm.token_ids == cold.token_ids
        if rt.model.is_native:
            assert warm.logprobs == cold.logprobs
        if not rt.model.states:
            assert warm.usage.cached_tokens == len(PROMPT) - 1


def test_the_other_layout_of_names(tmp_path: Path) -> None:
    model = make(tmp_path, "gemma3")
    tensors = load_file(tmp_path / "model.safetensors")
    old, new = "language_model.model.", "model.language_model."
    swapped = {old: new, new: old}
    prefix = next(start for start in swapped if any(name.startswith(start) for name in tensors))
    tensors = {
        swapped[prefix] + name.removeprefix(prefix) if name.startswith(prefix) else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with Runtime(tmp_path, num_pages=200) as rt:
        check(model, rt.generate(PROMPT, PARAMS))


def test_the_page_lists_the_cases() -> None:
    page = PAGE.read_text(encoding="utf-8")
    table = page.split("<!-- wrappers -->\n")[1].split("<!-- end of wrappers -->")[0]
    assert table.splitlines()[2:] == [
        f"| {case.wrapper}ForConditionalGeneration | {case.text_model} "
        f"| {'natively' if case.is_native else 'wrapped'} |"
        for case in CASES.values()
    ]


def test_transposed_experts(tmp_path: Path) -> None:
    """As the published checkpoints of Qwen3-VL-MoE have them."""
    model = make(tmp_path, "qwen3_vl_moe")
    file = tmp_path / "model.safetensors"
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".mlp.experts." in name else tensor
        for name, tensor in load_file(file).items()
    }
    assert any(".mlp.experts.gate_up_proj" in name for name in tensors)
    save_file(tensors, file, {"format": "pt"})
    with Runtime(tmp_path, num_pages=200) as rt:
        check(model, rt.generate(PROMPT, PARAMS))


def test_quantized_wrapper(tmp_path: Path) -> None:
    """The field of quantization stands beside the text model's config, not in it."""
    make(tmp_path, "mistral3")
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "quark"})
    with pytest.raises(ModelNotSupported, match="quantized weights"):
        Runtime(tmp_path, num_pages=200)


def test_refusals(tmp_path: Path) -> None:
    make(tmp_path, "lighton_ocr")
    make_tokenizer(tmp_path)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with Runtime(tmp_path, num_pages=200) as rt, rt.chat() as chat:  # noqa: SIM117
        with pytest.raises(InvalidRequest, match="image_url"):
            chat.send({"role": "user", "content": [image]})
    edit_json(tmp_path / "config.json", architectures=["PaliGemmaForConditionalGeneration"])
    with pytest.raises(ModelNotSupported, match=r"takes more than text.*possible are .*Gemma3, "):
        Runtime(tmp_path, num_pages=200)


def test_llama_4_as_published_is_refused_for_its_temperature(tmp_path: Path) -> None:
    make(tmp_path, "llama4")
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["attn_temperature_tuning"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelNotSupported, match="by their place in the batch, as its attn_temp"):
        Runtime(tmp_path, num_pages=200)


@pytest.mark.parametrize(
    ("wrapper", "text", "reason"),
    [
        ("AyaVision", {}, "pictures of AyaVisionForConditionalGeneration are not built"),
        ("Gemma3", {}, ""),
        ("Gemma4", {"use_bidirectional_attention": "vision"}, ""),
        ("Gemma4", {"pad_token_id": 3}, "need the pad token 0"),
        ("Gemma4", {}, ""),
        ("Qwen3VL", {"num_hidden_layers": 3}, "3 deepstack features need more than 3 layers"),
        ("Qwen3VL", {"num_hidden_layers": 4}, ""),
    ],
)
def test_why_pictures_are_refused(wrapper: str, text: dict[str, Any], reason: str) -> None:
    config = getattr(transformers, f"{wrapper}Config")(text_config=text)
    config.architectures = [f"{wrapper}ForConditionalGeneration"]
    found = picture_refusal(config)
    assert reason in found
    assert bool(reason) == bool(found)
