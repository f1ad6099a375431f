"""Fields that other servers know and this one does not: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

_UNSUPPORTED = frozenset(
    """
    audio audio_data beam_width chat_template custom_logit_processor
    documents ebnf function_call functions guided_choice guided_decoding_backend guided_grammar
    guided_json guided_regex guided_whitespace_pattern image_data include_reasoning
    input_embeds json_schema kv_transfer_params length_penalty
    logits_processors logprob_start_len lora_path max_tool_calls metadata
    mm_processor_kwargs modalities parallel_tool_calls prediction prompt_cache_key
    prompt_cache_retention prompt_embeds reasoning reasoning_effort regex
    return_hidden_states return_text_in_logprobs safety_identifier service_tier session_params
    spaces_between_special_tokens store structural_tag
    suffix thinking_token_budget token_ids_logprob tool_choice tools
    use_beam_search verbosity video_data vllm_xargs web_search_options
    """.split()
)
# Of Anthropic's messages and OpenAI's responses.
_UNSUPPORTED |= frozenset(
    """
    access_programs background background_options budget_tokens container context_management
    conversation diagnostics display effort encrypted_content image include inference_geo
    input_examples mcp_servers moderation output_config output_schema prompt_cache_options speed
    stream_options summary thread top_logprobs truncation user_profile_id workspace_id
    """.split()
)
# Values that ask for what is done anyway.
_NO_OPS: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "include_reasoning": (True,),
    "length_penalty": (1.0,),
    "logprob_start_len": (-1,),
    "modalities": (["text"],),
    "return_hidden_states": (False,),
    "return_text_in_logprobs": (False,),
    "service_tier": ("auto", "default", "standard_only"),
    "spaces_between_special_tokens": (True,),
    "speed": ("standard",),
    "store": (False,),
    "stream_options": ({"include_obfuscation": False},),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "use_beam_search": (False,),
}


def without_no_ops(fields: Any, known: Container[str]) -> Any:
    """`fields` without those that are not done but are null, or ask for what is done anyway."""
    if not isinstance(fields, dict):
        return fields
    return {
        name: value
        for name, value in fields.items()
        if name in known or name not in _UNSUPPORTED or not _asks_nothing(name, value)
    }


def unsupported_reason(name: str) -> str:
    if name.rpartition(".")[2] in _UNSUPPORTED:
        return f"{name} is not supported by this server"
    return f"unknown field {name}"


def _asks_nothing(name: str, value: Any) -> bool:
    return value is None or any(value == one for one in _NO_OPS.get(name, ()))
