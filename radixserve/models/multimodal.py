"""The text model in a checkpoint of a model that takes images too: its config, its tensors' names.

Only wrappers whose text tokens go through the text model as through that model alone.
"""

from __future__ import annotations

import copy
import re
from typing import Any

WRAPPERS = (
    *("AyaVision", "Cohere2Vision", "Gemma3", "Idefics3", "InternVL", "Llava", "LlavaNext"),
    *("LlavaOnevision", "Mistral3", "SmolVLM"),
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
_NAMES = (  # in the two layouts that transformers has had
    (re.compile(r"(language_model\.model|model\.language_model|model\.text_model)\."), "model."),
    (re.compile(r"(language_model\.)?lm_head\."), "lm_head."),
)


def text_config(config: Any) -> Any | None:
    """The text model's part of transformers' config of a wrapper; None: it is no such wrapper."""
    names = getattr(config, "architectures", None) or ("",)
    if names[0].removesuffix("ForConditionalGeneration") not in WRAPPERS:
        return None
    text = copy.deepcopy(config.get_text_config())
    architecture = _ARCHITECTURES.get(text.model_type)
    if text is config or architecture is None:
        return None
    text.architectures = [architecture]
    text.tie_word_embeddings = text.tie_word_embeddings or config.tie_word_embeddings
    text.dtype = config.dtype if text.dtype is None else text.dtype
    return text


def text_name(name: str) -> str | None:
    """A tensor's name in the text model alone; None: it is of another part."""
    for pattern, ours in _NAMES:
        if match := pattern.match(name):
            return ours + name[match.end() :]
    return None
