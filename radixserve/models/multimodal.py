"""The text model in a checkpoint of a model that takes images too: its config, its tensors' names.

Only wrappers whose text tokens go through the text model as through that model alone.
"""

from __future__ import annotations

import copy
import re
from typing import Any

WRAPPERS = (
    *("AyaVision", "Cohere2Vision", "Gemma3", "Idefics3", "InternVL", "Llava", "LlavaNext"),
    *("LlavaOnevision", "Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "SmolVLM"),
)
_ARCHITECTURES = {  # by the model_type of the text model
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Text models that turn queries and keys by time, height and width: of text all three are the place
# in the sequence, and the model is one of this model_type.
_FAMILIES = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
_NAMES = (  # in the layouts that transformers has had
    (re.compile(r"(language_model\.model|model\.language_model|model\.text_model)\."), "model."),
    (re.compile(r"model\.(?=(embed_tokens|layers|norm)\.)"), "model."),
    (re.compile(r"(language_model\.)?lm_head\."), "lm_head."),
)


def text_config(config: Any) -> Any | None:
    """The text model's part of transformers' config of a wrapper; None: it is no such wrapper."""
    names = getattr(config, "architectures", None) or ("",)
    if names[0].removesuffix("ForConditionalGeneration") not in WRAPPERS:
        return None
    text = copy.deepcopy(config.get_text_config())
    if (family := _FAMILIES.get(text.model_type)) is not None:
        from transformers import AutoConfig  # seconds: only where it is needed

        fields = text.to_dict() | {"model_type": family}
        for name in ("mrope_section", "mrope_interleaved"):
            fields["rope_parameters"].pop(name, None)
        text = AutoConfig.for_model(**fields)
    architecture = _ARCHITECTURES.get(text.model_type)
    if text is config or architecture is None:
        return None
    text.architectures = [architecture]
    ties = (getattr(one, "tie_word_embeddings", False) for one in (text, config))
    text.tie_word_embeddings = any(ties)
    text.dtype = config.dtype if text.dtype is None else text.dtype
    return text


def text_name(name: str) -> str | None:
    """A tensor's name in the text model alone; None: it is of another part."""
    for pattern, ours in _NAMES:
        if match := pattern.match(name):
            return ours + name[match.end() :]
    return None
