"""Tiny random checkpoints that take pictures, as published: wrapper class, processor, template."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import ProcessorMixin

from radixserve.images.lfm2_processor import Lfm2VlProcessor
from radixserve.images.processor import load_processor
from tests.checkpoints import SIZES, make_config

_TOKENS = {  # of each family's tokenizer, by their attribute names
    "llava": {"image_token": "<image>"},
    "llava_next": {"image_token": "<image>"},
    "idefics3": {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "end_of_utterance_token": "<end_of_utterance>",
        "global_image_token": "<global-img>",
    },
    "mistral3": {
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    },
    "internvl": {
        "context_image_token": "<IMG_CONTEXT>",
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "video_token": "<video>",
    },
}
_TOKENS["smolvlm"] = _TOKENS["idefics3"]
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")  # with positions in three parts
_EXPERTS = ("qwen3_vl_moe", "qwen3_5_moe")
MORE_FAMILIES = (*_EXPERTS, "smolvlm")  # like another family but for their text model, or its class
QWEN = (*QWEN, *_EXPERTS)
_TOKENS |= {
    family: {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    }
    for family in QWEN
}
_TOKENS["gemma3"] = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
_TOKENS["gemma4"] = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
_TOKENS["gemma4_large"] = _TOKENS["gemma4"]
GEMMA4 = ("gemma4", "gemma4_large")
LOOKING_AHEAD = ("gemma3", "gemma4_large")  # the rows of a picture see each other
_TOKENS["lfm2_vl"] = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
}
_MARKERS = {"internvl": "<IMG_CONTEXT>", "mistral3": "[IMG]"}  # of the others "<image>"
_MARKERS |= dict.fromkeys(GEMMA4, "<|image|>")
_MARKERS["gemma3"] = "<start_of_image>"
_MARKERS |= dict.fromkeys(QWEN, "<|image_pad|>")
_TILES = [f"<row_{row}_col_{col}>" for row in (1, 2) for col in (1, 2)]
FAMILIES = tuple(family for family in _TOKENS if family not in MORE_FAMILIES)
_CLIP = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16}
_CLIP |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
_GRID = [[56, 112], [112, 56], [112, 112]]


def make_vision_checkpoint(folder: Path, family: str) -> Path:
    """A seeded wrapper in float32 under its published class, with its processor's files."""
    tokenizer = _make_tokenizer(folder, family)
    marker = _MARKERS.get(family, "<image>")
    image_id = tokenizer.convert_tokens_to_ids(_TOKENS[family].get("image_token", marker))
    _make_model(folder, family, image_id)
    write_processor_files(folder, family)
    return folder


def load_vision_reference(folder: Path) -> Any:
    """The whole model in transformers' code."""
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def reference_inputs(folder: Path, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """What transformers' own processor makes of a chat."""
    processor = load_processor(folder)
    pictures = [
        part["image"]
        for message in messages
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image"
    ]
    chat = [
        {**message, "content": [_without_image(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else {**message, "content": [{"type": "text", "text": message["content"]}]}
        for message in messages
    ]
    text = processor.tokenizer.apply_chat_template(
        chat, chat_template=_template(folder), tokenize=False, add_generation_prompt=True
    )
    if not pictures:
        return dict(processor.tokenizer([text], add_special_tokens=False, return_tensors="pt"))
    if isinstance(processor, Lfm2VlProcessor):
        return _one_by_one(processor, text, pictures)
    if not isinstance(processor, ProcessorMixin):
        return _by_hand(processor, text, pictures)
    made = processor(images=pictures, text=[text], return_tensors="pt", add_special_tokens=False)
    left_out = () if processor.image_token == "<start_of_image>" else ("token_type_ids",)
    return {name: made[name] for name in made if name not in left_out}


def _by_hand(processor: Any, text: str, pictures: list[Any]) -> dict[str, Any]:
    """Mistral 3, whose processor in transformers needs torchvision."""
    images = processor.image_processor(pictures, patch_size=28, return_tensors="pt")
    for height, width in images["image_sizes"].tolist():
        rows = ["[I]" * (width // 28)] * (height // 28)
        text = text.replace("[IMG]", "[IMG_BREAK]".join(rows) + "[IMG_END]", 1)
    ids = processor.tokenizer(
        [text.replace("[I]", "[IMG]")], add_special_tokens=False, return_tensors="pt"
    )
    return {**ids, "pixel_values": images["pixel_values"], "image_sizes": images["image_sizes"]}


def _one_by_one(processor: Any, text: str, pictures: list[Any]) -> dict[str, Any]:
    """LFM2-VL, likewise. Its own processor gave the same bits for 300 pictures."""
    made = [processor(images=[image], text=None) for image in pictures]
    before, *after = text.split(processor.image_token)
    ids = processor.tokenizer.encode(before)
    for part, one in zip(after, made, strict=True):
        ids += [*one.pop("input_ids")[0], *processor.tokenizer.encode(part)]
    arrays = {name: np.concatenate([one[name] for one in made]) for name in made[0]}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    ids = torch.tensor([ids])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **tensors}


@torch.inference_mode()
def reference_answer(
    model: Any, inputs: dict[str, Any], num_tokens: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens, and the log-probability of each."""
    model.generation_config.eos_token_id = None
    made = model.generate(
        **inputs,
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = made.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    tables = [logits[0].float().log_softmax(-1) for logits in made.logits]
    return tokens, [float(table[token]) for table, token in zip(tables, tokens, strict=True)]


def picture(seed: int, width: int = 64, height: int = 48) -> Image.Image:
    """Coarse random colours."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8))
    return coarse.resize((width, height), Image.Resampling.NEAREST)


def as_file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def said(*parts: str | Image.Image, role: str = "user") -> dict[str, Any]:
    """A message of texts and pictures."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": role, "content": content}


def _without_image(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image"} if part["type"] == "image" else part


def _template(folder: Path) -> str:
    return (folder / "chat_template.jinja").read_text()


def _make_tokenizer(folder: Path, family: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = {c: i for i, c in enumerate(alphabet)}, []
    if family == "gemma3":  # lines, which its processor writes around a picture, are joined
        merges = [("\u010a", "\u010a"), ("\u010a\u010a", "\u010a")]
        vocab |= {"".join(pair): len(vocab) + place for place, pair in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tiles = _TILES if family in ("idefics3", "smolvlm") else []
    if family == "lfm2_vl":
        tiles = [
            f"<|img_row_{row}_col_{column}|>" for row in (1, 2, 3, 4) for column in (1, 2, 3, 4)
        ]
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool")]
    backend.add_special_tokens(["<|bos|>", "<|eos|>", *roles, *tiles])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|eos|>" if family in GEMMA4 else None,
        extra_special_tokens=_TOKENS[family],
    )
    marker = _MARKERS.get(family, "<image>")
    if family in QWEN:
        marker = f"<|vision_start|>{marker}<|vision_end|>"
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %}{{ '<|' + message.role + '|>' }}"
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{% if part.type == 'image' %}{{ '" + marker + "' }}"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def _make_model(folder: Path, family: str, image_id: int) -> None:
    kind, parts = _qwen_parts(family) if family in QWEN else _parts(family)
    config = getattr(transformers, f"{kind}Config")(
        **parts,
        image_token_index=image_id,
        image_token_id=image_id,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wrapper = getattr(transformers, f"{kind}ForConditionalGeneration")
        model = wrapper._from_config(config, attn_implementation="eager").eval().float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                elif "language_model" not in name and "text_model.layers" not in name:
                    parameter.mul_(8)  # so that pictures matter
    assert SIZES["vocab_size"] == model.config.get_text_config().vocab_size
    model.save_pretrained(folder)


def _qwen_parts(family: str) -> tuple[str, dict[str, Any]]:
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2}
    vision |= {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 64}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 64}
    if family == "qwen2_5_vl":
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    if family in ("qwen3_vl", "qwen3_vl_moe"):
        vision |= {"deepstack_visual_indexes": [0, 1]}
    kind, base, sections = {
        "qwen2_vl": ("Qwen2VL", "qwen2", [2, 3, 3]),
        "qwen2_5_vl": ("Qwen2_5_VL", "qwen2", [2, 3, 3]),
        "qwen3_vl": ("Qwen3VL", "qwen3", [6, 5, 5]),
        "qwen3_vl_moe": ("Qwen3VLMoe", "qwen3_moe", [6, 5, 5]),
        "qwen3_5": ("Qwen3_5", "qwen3_5", [1, 1, 0]),
        "qwen3_5_moe": ("Qwen3_5Moe", "qwen3_5_moe", [1, 1, 0]),
    }[family]
    text = make_config(base, num_hidden_layers=3).to_dict()
    rope = {"rope_type": "default", "rope_theta": 1e4, **text["rope_parameters"]}
    fields = {name: value for name, value in text.items() if name != "model_type"}
    fields |= {"rope_parameters": {**rope, "mrope_section": sections}}
    fields["max_position_embeddings"] = 1024
    return kind, {"text_config": fields, "vision_config": vision}


def _parts(family: str) -> tuple[str, dict[str, Any]]:
    kind, text = {
        "llava": ("Llava", "qwen2"),
        "llava_next": ("LlavaNext", "llama"),
        "idefics3": ("Idefics3", "llama"),
        "smolvlm": ("SmolVLM", "llama"),
        "mistral3": ("Mistral3", "mistral"),
        "internvl": ("InternVL", "qwen2"),
        "gemma3": ("Gemma3", "gemma3"),
        "gemma4": ("Gemma4", "gemma4"),
        "gemma4_large": ("Gemma4", "gemma4_moe"),
        "lfm2_vl": ("Lfm2Vl", "lfm2"),
    }[family]
    vision: dict[str, Any] = _CLIP
    more: dict[str, Any] = {}
    if family in ("llava", "llava_next"):
        more = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
        more["image_grid_pinpoints"] = _GRID
    if family in ("idefics3", "smolvlm"):
        vision, more = {**_CLIP, "model_type": f"{family}_vision"}, {"scale_factor": 2}
    if family == "mistral3":
        vision = {**_CLIP, "model_type": "pixtral", "image_size": 112}
        more = {"spatial_merge_size": 2, "vision_feature_layer": -1}
    if family == "internvl":
        sizes = {"image_size": [56, 56], "patch_size": [14, 14]}
        vision, more = {**_CLIP, **sizes, "model_type": "internvl_vision"}, {"image_seq_length": 4}
    if family == "gemma3":
        sizes = {"image_size": 56, "patch_size": 7}
        vision, more = {**_CLIP, **sizes, "model_type": "siglip_vision_model"}, {}
        more["mm_tokens_per_image"] = 16
    if family in GEMMA4:
        vision = {**_CLIP, "model_type": "gemma4_vision", "patch_size": 4, "head_dim": 8}
        vision |= {"num_key_value_heads": 2, "position_embedding_size": 128}
    if family == "lfm2_vl":
        vision = {**_CLIP, "model_type": "siglip2_vision_model", "patch_size": 7, "num_patches": 64}
        more = {"downsample_factor": 2, "projector_hidden_size": 32}
    text_config = {**make_config(text).to_dict(), "max_position_embeddings": 1024}
    if family in GEMMA4:
        text_config["pad_token_id"] = 0
    if family == "gemma4_large":
        text_config["use_bidirectional_attention"] = "vision"
    return kind, {"text_config": text_config, "vision_config": vision, **more}


def write_processor_files(folder: Path, family: str) -> None:
    square = {"height": 56, "width": 56}
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
        "llava": (
            {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 56}},
            {"patch_size": 14, "num_additional_image_tokens": 1},
            "LlavaProcessor",
        ),
        "llava_next": (
            {
                "image_processor_type": "LlavaNextImageProcessor",
                "size": {"shortest_edge": 56},
                "image_grid_pinpoints": _GRID,
            },
            {"patch_size": 14, "num_additional_image_tokens": 1},
            "LlavaNextProcessor",
        ),
        "idefics3": (
            {
                "image_processor_type": "Idefics3ImageProcessor",
                "size": {"longest_edge": 112},
                "max_image_size": {"longest_edge": 56},
                "do_image_splitting": True,
            },
            {"image_seq_len": 4},
            "Idefics3Processor",
        ),
        "mistral3": (
            {
                "image_processor_type": "PixtralImageProcessor",
                "size": {"longest_edge": 112},
                "patch_size": {"height": 14, "width": 14},
            },
            {"patch_size": 14, "spatial_merge_size": 2},
            "PixtralProcessor",
        ),
        "internvl": (
            {
                "image_processor_type": "GotOcr2ImageProcessor",
                "size": square,
                "crop_to_patches": True,
                "min_patches": 1,
                "max_patches": 4,
            },
            {"image_seq_length": 4},
            "InternVLProcessor",
        ),
    }
    sizes = {"encoder_patch_size": 7, "tile_size": 56, "max_tiles": 4}
    sizes |= {"min_image_tokens": 4, "max_image_tokens": 8}
    images = {"image_processor_type": "Lfm2VlImageProcessor", **sizes}
    kinds["lfm2_vl"] = images, {}, "Lfm2VlProcessor"
    images = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4}
    for name in GEMMA4:
        kinds[name] = {**images, "max_soft_tokens": 70}, {}, "Gemma4Processor"
    images = {"image_processor_type": "Gemma3ImageProcessor", "size": square}
    kinds["gemma3"] = images, {"image_seq_length": 16}, "Gemma3Processor"
    for name in QWEN:
        kind = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}.get(name, "Qwen3VL")
        sizes = {"shortest_edge": 28 * 28 * 9, "longest_edge": 28 * 28 * 20}
        patches = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
        images = {"image_processor_type": "Qwen2VLImageProcessor", "size": sizes, **patches}
        kinds[name] = images, {}, f"{kind}Processor"
    kinds["smolvlm"] = ({**kinds["idefics3"][0]}, {**kinds["idefics3"][1]}, "SmolVLMProcessor")
    kinds["smolvlm"][0]["image_processor_type"] = "SmolVLMImageProcessor"
    images, own, kind = kinds[family]
    if family in ("llava", "llava_next"):
        images |= {"crop_size": square, "do_center_crop": True}
        own |= {"vision_feature_select_strategy": "default"}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": kind, **own}))
