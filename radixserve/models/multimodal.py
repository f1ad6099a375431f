"""The text model in a checkpoint of a model that takes images too: its config, its tensors' names.

Covers the wrappers that compute text tokens exactly as the text model alone does.
"""

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple

TRANSPOSABLE = r"model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj"  # see WeightReader
WRAPPERS = (
    *("AyaVision", "Cohere2Vision", "Exaone4_5_", "Gemma3", "Gemma4", "Idefics3", "InternVL"),
    *("Lfm2Vl", "LightOnOcr", "Llama4", "Llava", "LlavaNext", "LlavaOnevision", "Mistral3"),
    *("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "SmolVLM"),
)
# Wrappers whose text model computes the rows of a picture as it computes text, but for positions
# (`MRope`) and for what a row sees (`_BIDIRECTIONAL`).
WITH_PICTURES = (
    *("Gemma3", "Gemma4", "Idefics3", "InternVL", "Lfm2Vl", "Llava", "LlavaNext", "Mistral3"),
    *("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "SmolVLM"),
)
# Text models with layers in which the rows of a picture see each other: the types of these layers.
# Gemma 4's small models, without use_bidirectional_attention, have none.
_BIDIRECTIONAL = {
    "gemma3_text": ("full_attention", "sliding_attention"),
    "gemma4_text": ("sliding_attention",),
}
_MOST_ROWS = 1_120  # of a picture, where the config does not say: of Gemma 4
# Text models that scale all embeddings in their forward pass, those of pictures too.
_SCALING = ("granite",)
# These text models rotate queries and keys by time, height and width. For text all three are the
# position in the sequence, so that the model computes what the model_type on the right computes.
_FAMILIES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
_SECTIONS = {  # pairs of a head by time, height and width where a config does not say
    "qwen2_vl_text": (16, 24, 24),
    "qwen2_5_vl_text": (16, 24, 24),
    "qwen3_vl_text": (24, 20, 20),
    "qwen3_vl_moe_text": (24, 20, 20),
    "qwen3_5_text": (11, 11, 10),
    "qwen3_5_moe_text": (11, 11, 10),
}
_SPLIT = ("qwen2_vl_text", "qwen2_5_vl_text")  # whose sections follow each other; others alternate
_NAMES = {  # prefixes of the text model's tensors in the layouts that transformers has had
    r"^(?:language_model\.model|model\.language_model|model\.text_model)\.": "model.",
    r"^model\.(?=(?:embed_tokens|layers|norm)\.)": "model.",
    r"^(?:language_model\.)?lm_head\.": "lm_head.",
}


class MRope(NamedTuple):
    """How the rows of pictures are placed by time, height and width (M-RoPE)."""

    axes: tuple[int, ...]  # which of the three turns each pair of a head
    merge_size: int  # patches of a side that make a row
    num_deepstack: int = 0  # first layers after which features are added to the rows


def text_config(config: Any) -> Any | None:
    """The text model's part of transformers' config of a wrapper; None for any other config."""
    names = getattr(config, "architectures", None) or ("",)
    if names[0].removesuffix("ForConditionalGeneration") not in WRAPPERS:
        return None
    from transformers import AutoConfig  # seconds: only where it is needed
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = copy.deepcopy(config.get_text_config())
    if (family := _FAMILIES.get(text.model_type)) is not None:
        fields = text.to_dict() | {"model_type": family}
        for name in ("mrope_section", "mrope_interleaved"):
            fields["rope_parameters"].pop(name, None)
        if family == "qwen3_moe":  # its router always renormalises
            fields |= {"norm_topk_prob": True, "may_transpose_experts": True}
        text = AutoConfig.for_model(**fields)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(text.model_type)
    if text.model_type == config.model_type or architecture is None:
        return None
    text.architectures = [str(architecture)]
    text.tie_word_embeddings = any(
        getattr(part, "tie_word_embeddings", False) for part in (text, config)
    )
    text.dtype = config.dtype if text.dtype is None else text.dtype
    if layers := _bidirectional_layers(text):
        text.bidirectional_layers = layers
        text.uncut_rows = getattr(config, "mm_tokens_per_image", None) or _MOST_ROWS
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    return text


def picture_refusal(config: Any) -> str:
    """Returns why a checkpoint, by transformers' config of it, takes no pictures here; "" if it
    does."""
    names = getattr(config, "architectures", None) or ("",)
    family = str(names[0]).removesuffix("ForConditionalGeneration")
    if family not in WITH_PICTURES:
        return f"pictures of {names[0]} are not built; built are {', '.join(WITH_PICTURES)}"
    text = config.get_text_config()
    if text.model_type in _SCALING:
        return f"pictures beside a text model of the family {text.model_type} are not built"
    if getattr(text, "hidden_size_per_layer_input", 0) and text.pad_token_id != 0:
        return "pictures beside layers with inputs of their own need the pad token 0"
    mrope, layers = mrope_of(config), text.num_hidden_layers
    if mrope is not None and mrope.num_deepstack >= layers:
        return f"{mrope.num_deepstack} deepstack features need more than {layers} layers"
    return ""


def _bidirectional_layers(text: Any) -> tuple[str, ...]:
    if text.model_type == "gemma4_text" and text.use_bidirectional_attention != "vision":
        return ()
    return _BIDIRECTIONAL.get(text.model_type, ())


def mrope_of(config: Any) -> MRope | None:
    """The M-RoPE of transformers' config of a wrapper; None where positions have one part."""
    text = config.get_text_config()
    if text.model_type not in _SECTIONS:
        return None
    sections = text.rope_parameters.get("mrope_section", _SECTIONS[text.model_type])
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    axes = [0] * (head_dim // 2)
    if text.model_type in _SPLIT:
        axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
    else:
        for axis in (1, 2):
            places = range(axis, min(3 * sections[axis], len(axes)), 3)
            for place in places:
                axes[place] = axis
    deep = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
    return MRope(tuple(axes), config.vision_config.spatial_merge_size, len(deep))


def text_name(name: str) -> str | None:
    """A tensor's name in the text model alone; None for a tensor of another part."""
    for pattern, prefix in _NAMES.items():
        if match := re.match(pattern, name):
            return prefix + name[match.end() :]
    return None


def text_key_mapping() -> dict[str, str]:
    """`text_name` as the `key_mapping` of transformers' `from_pretrained`."""
    return dict(_NAMES)
