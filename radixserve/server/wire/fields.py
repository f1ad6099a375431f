"""FIELD_RULES: what happens to fields of the protocols that this server does not have as such.

`Body` applies the rules to fields that are not of its class. `docs/serving.md` shows the table;
`tests/server/test_fields.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple


class Kind(StrEnum):
    """What happens to a field."""

    SKIPPED = "skipped"  # it cannot change the answer; a header and the log name it
    MAPPED = "mapped"  # it asks for something that exists here in another form
    REFUSED = "refused"  # it would change the answer: the request is answered 400


class FieldRule(NamedTuple):
    """The treatment of one field in one protocol.

    name     its path in the body: "thinking.budget_tokens"
    note     why it is skipped or refused, or what it is mapped to
    example  a value to which the rule applies; a valid one if the field is mapped or skipped
    no_ops   values that ask for what is done anyway; they are accepted, as null is
    """

    protocol: str
    name: str
    kind: Kind
    note: str
    example: Any
    no_ops: tuple[Any, ...] = ()


PROTOCOLS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "generate": "/generate",
    "decisions": "/v1/decisions",
}
_OPENAI = "completions chat responses"
_CHATS = "chat responses"
_AGENTS = "chat responses messages"
_ALL = "completions chat responses messages"


def _rules(
    protocols: str, names: str, kind: Kind, note: str, example: Any, *no_ops: Any
) -> list[FieldRule]:
    """A rule for each of the names in each of the protocols, both separated by spaces."""
    return [
        FieldRule(protocol, name, kind, note, example, no_ops)
        for name in names.split()
        for protocol in protocols.split()
    ]


_SKIP, _MAP, _REFUSE = Kind.SKIPPED, Kind.MAPPED, Kind.REFUSED
_COMPARES = "reports why that prompt missed the cache, see below"
_RETAINS = "a `retain` hint for the prompt"
_EFFORT = "the template's variables `enable_thinking` and `reasoning_effort`"
_THINKS = "the template's variable `enable_thinking`"
_NO_TEMPLATE = "prompts are not rendered by a template"
_IS_OFF = "belongs to a sampler that is off here"
FIELD_RULES: tuple[FieldRule, ...] = (
    # Names of callers and of their requests.
    *_rules("completions chat", "user", _SKIP, "names the caller's user", "u-1"),
    *_rules("completions chat", "metadata", _SKIP, "the caller's own data", {"run": "7"}),
    *_rules("messages", "metadata.user_id", _MAP, "names the session, see below", "u_session_1"),
    *_rules(_OPENAI, "client_metadata", _SKIP, "the caller's own data", {"a": "b"}),
    *_rules("completions chat", "safety_identifier", _SKIP, "names the caller's user", "u-1"),
    *_rules("messages", "user_profile_id", _SKIP, "names the caller's user", "u-1"),
    *_rules("messages", "workspace_id inference_geo", _SKIP, "names a region of the vendor", "us"),
    *_rules("completions chat", "request_id", _SKIP, "every request has an id of its own", "r-1"),
    *_rules("completions chat", "store", _SKIP, "only responses are stored", True, False),
    *_rules(_ALL, "service_tier", _SKIP, "there is one tier", "flex", "auto", "default",
            "standard_only"),
    *_rules("messages", "speed", _SKIP, "there is one speed", "fast", "standard"),
    *_rules("completions chat", "mm_processor_kwargs", _SKIP, "the model's are used", {"a": 1}),
    *_rules("responses", "include", _SKIP, "values but `message.output_text.logprobs` "
            "are always in the answer, or do not exist here",
            ["reasoning.encrypted_content"], []),
    *_rules("responses", "stream_options", _SKIP, "events are not padded",
            {"include_obfuscation": True}, {"include_obfuscation": False}),
    *_rules("messages", "thinking.display", _SKIP, "thoughts are returned in full", "omitted"),
    *_rules("messages", "tools[].input_examples", _SKIP, "templates take no examples", [{}]),
    *_rules("decisions", "safety_identifier user", _SKIP, "names the caller's user", "u-1"),
    *_rules("decisions", "metadata", _SKIP, "the caller's own data", {"run": "7"}),
    *_rules("decisions", "prompt_cache_key prompt_cache_options", _SKIP,
            "decisions open no session", {"ttl": "30m"}),
    # Fields of llama.cpp, Ollama and of proxies.
    *_rules(_OPENAI, "cache_prompt id_slot", _SKIP, "every prompt is cached, for all requests",
            True),
    *_rules(_OPENAI, "timings_per_token return_progress", _SKIP, "not reported", True, False),
    *_rules(_OPENAI, "tool_stream", _SKIP, "calls are always streamed", True, False),
    *_rules(_OPENAI, "usage", _SKIP, "usage is always in the answer", {"include": True}),
    *_rules(_OPENAI, "provider", _SKIP, "there is one provider", {"sort": "price"}),
    *_rules(_OPENAI, "keep_alive", _SKIP, "the model stays loaded", "5m"),
    *_rules(_OPENAI, "num_ctx", _SKIP, "the context is `--max-seq-len`", 4096),
    *_rules(_OPENAI, "mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base "
            "dry_allowed_length dry_penalty_last_n dry_sequence_breakers min_keep", _SKIP, _IS_OFF,
            1),
    *_rules("completions", "enable_thinking thinking reasoning reasoning_effort "
            "chat_template_kwargs", _SKIP, _NO_TEMPLATE, {}),
    # The same thing under another name.
    *_rules(_OPENAI, "repeat_penalty", _MAP, "`repetition_penalty`", 1.1),
    *_rules(_OPENAI, "random_seed", _MAP, "`seed`", 7),
    *_rules("completions chat", "n_predict", _MAP, "`max_tokens`", 4),
    *_rules("responses", "n_predict", _MAP, "`max_output_tokens`", 4),
    *_rules("chat", "reasoning.effort", _MAP, _EFFORT, "low"),
    *_rules("chat", "reasoning.enabled", _MAP, _THINKS, False),
    *_rules("chat", "reasoning.max_tokens", _MAP, "the template's variable `thinking_budget`", 64),
    *_rules("chat", "reasoning.exclude", _MAP, "`include_reasoning` false", True),
    *_rules(_CHATS, "enable_thinking", _MAP, _THINKS, False),
    *_rules(_CHATS, "thinking", _MAP, "the template's variables `enable_thinking` and "
            "`thinking_budget`", {"type": "disabled"}),
    *_rules(_OPENAI, "prompt_cache_key", _MAP, "names the session, see below", "k-1"),
    *_rules("chat responses", "prompt_cache_options.ttl", _MAP, _RETAINS, "30m"),
    *_rules("chat responses", "prompt_cache_options.mode", _MAP, "`explicit`: only breakpoints "
            "have a lifetime", "explicit"),
    *_rules("chat responses", "prompt_cache_options.prewarm", _MAP, "computes the prompt, "
            "generates nothing", True),
    *_rules("chat responses", "prompt_cache_options.comparison_response_id", _MAP, _COMPARES,
            "resp_1"),
    *_rules("messages", "diagnostics.previous_message_id", _MAP, _COMPARES, "msg_1"),
    *_rules("chat responses", "prompt_cache_retention", _MAP, f"`24h`: {_RETAINS}; `in_memory`: "
            "nothing", "24h"),
    *_rules("chat", "messages[].content[].prompt_cache_breakpoint", _MAP, _RETAINS,
            {"mode": "explicit"}),
    *_rules("responses", "input[].content[].prompt_cache_breakpoint", _MAP, _RETAINS,
            {"mode": "explicit", "ttl": "12h"}),
    *_rules("messages", "cache_control", _MAP, f"at any place: {_RETAINS}",
            {"type": "ephemeral", "ttl": "1h"}),
    *_rules("completions chat responses messages generate", "kv_hints", _MAP, "the envelope of "
            "vLLM and SGLang: its actions are [hints](hints.md)",
            {"protocol_version": "1", "message_id": "m-1", "actions": []}),
    *_rules("messages", "thinking", _MAP, "the template's variables `enable_thinking` and "
            "`thinking_budget`", {"type": "enabled", "budget_tokens": 1024}),
    *_rules("messages", "output_config.effort", _MAP, _EFFORT, "high"),
    *_rules("chat", "reasoning_effort", _MAP, _EFFORT, "low"),
    *_rules("responses", "reasoning.effort", _MAP, _EFFORT, "low"),
    *_rules("responses", "reasoning.summary", _MAP, "the full thought is the summary",
            "auto"),
    *_rules("chat", "verbosity", _MAP, "the template's variable `verbosity`", "low"),
    *_rules("responses", "text.verbosity", _MAP, "the template's variable `verbosity`", "high"),
    *_rules("messages", "context_management", _MAP, "edits of the type `clear_thinking_...`: "
            "thoughts before the last `keep` turns are left out; others are refused",
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    *_rules("chat", "max_completion_tokens", _MAP, "`max_tokens`", 4),
    *_rules("completions chat", "max_tokens", _MAP, "-1: the rest of the context", 4),
    *_rules("responses", "max_output_tokens", _MAP, "-1: the rest of the context", 4),
    *_rules(_ALL, "seed", _MAP, "-1: no seed", -1),
    *_rules(_ALL, "top_p", _MAP, "0: greedy", 0),
    # What would change the answer.
    *_rules("completions chat", "audio", _REFUSE, "answers are text", {"voice": "a"}),
    *_rules("chat", "modalities", _REFUSE, "answers are text", ["audio"], ["text"]),
    *_rules("completions chat generate", "lora_path", _REFUSE,
            "name a loaded adapter as the `model`", "a"),
    *_rules("completions chat", "functions function_call", _REFUSE, "use `tools`", [{}]),
    *_rules("completions", "tools tool_choice parallel_tool_calls", _REFUSE, "belong to chats",
            "x", [], "none"),
    *_rules("chat responses", "web_search_options", _REFUSE, "there is no web search", {}),
    *_rules("chat", "chat_template", _REFUSE, "the template is the model's", "x"),
    *_rules("chat", "documents", _REFUSE, "put them into a message", [{"text": "x"}], []),
    *_rules(_OPENAI, "reasoning_format", _REFUSE, "thoughts are in `reasoning_content`", "none",
            "auto", "deepseek", "parsed"),
    *_rules(_OPENAI, "transforms plugins", _REFUSE, "prompts are used as they are", ["x"], []),
    *_rules(_OPENAI, "options", _REFUSE, "give its members as fields of the body", {"top_k": 4},
            {}),
    *_rules(_OPENAI, "mirostat dry_multiplier xtc_probability dynatemp_range n_probs", _REFUSE,
            "not implemented", 2, 0),
    *_rules(_OPENAI, "typical_p tfs_z", _REFUSE, "not implemented", 0.5, 1),
    *_rules(_OPENAI, "top_n_sigma", _REFUSE, "not implemented", 0.5, -1),
    *_rules(_OPENAI, "n_keep", _REFUSE, "no silent truncation", 64, 0, -1),
    *_rules(_OPENAI, "repeat_last_n", _REFUSE, "penalties count the whole prompt and answer", 64,
            -1),
    *_rules("completions chat", "guided_json guided_regex guided_choice guided_grammar "
            "guided_decoding_backend guided_whitespace_pattern", _REFUSE,
            "use `structured_outputs`", "x"),
    *_rules("completions chat generate", "structural_tag custom_logit_processor", _REFUSE,
            "not implemented", "x"),
    *_rules("completions chat", "json_schema regex ebnf", _REFUSE, "use `structured_outputs`",
            "x"),
    *_rules("completions chat", "beam_width", _REFUSE, "use `use_beam_search` with `n`", 4),
    *_rules("completions chat", "thinking_token_budget", _REFUSE, "thoughts are not bounded", 9),
    *_rules("completions chat", "logits_processors kv_transfer_params prompt_embeds",
            _REFUSE, "not implemented", {"a": 1}),
    *_rules("completions chat", "vllm_xargs", _REFUSE, "not implemented", {"a": 1}, {}),
    *_rules("completions chat", "spaces_between_special_tokens", _REFUSE, "not implemented", False,
            True),
    *_rules("completions", "suffix", _REFUSE, "not implemented", "x"),
    *_rules("chat responses messages", "moderation", _REFUSE, "not implemented", {"a": 1}),
    *_rules("responses", "background_options", _REFUSE, "not implemented", True, False),
    *_rules("responses", "conversation", _REFUSE, "use `previous_response_id`", "c-1"),
    *_rules("responses", "prompt", _REFUSE, "there are no stored prompts", {"id": "p"}),
    *_rules("responses", "max_tool_calls", _REFUSE, "not implemented", 3),
    *_rules("responses", "truncation", _REFUSE, "no silent truncation", "auto", "disabled"),
    *_rules("responses", "context_management", _REFUSE, "histories are not compacted",
            [{"type": "compaction"}], []),
    *_rules("messages", "mcp_servers", _REFUSE, "the server calls no MCP servers", [{}], []),
    *_rules("messages", "container thread access_programs", _REFUSE, "not implemented", "c", False),
    *_rules("messages", "tools[].defer_loading", _REFUSE, "all tools are in the prompt", True,
            False),
    *_rules("generate", "image_data", _REFUSE, "chats take pictures", "x"),
    *_rules("generate", "audio_data video_data", _REFUSE, "it is not read", "x"),
    *_rules("generate", "return_hidden_states", _REFUSE, "not implemented", True, False),
    *_rules("generate", "return_text_in_logprobs", _REFUSE, "not implemented", True, False),
    *_rules("generate", "token_ids_logprob session_params input_embeds", _REFUSE, "not implemented",
            [1]),
)  # fmt: skip


@cache
def rules_of(protocol: str, place: str = "") -> Mapping[str, FieldRule]:
    """The rules of a protocol for the members of `place` ("thinking", "tools[]"; "" is the body
    itself), by the members' names."""
    prefix = f"{place}." if place else ""
    names = {
        rule.name.removeprefix(prefix): rule
        for rule in FIELD_RULES
        if rule.protocol == protocol and rule.name.startswith(prefix)
    }
    return MappingProxyType({name: rule for name, rule in names.items() if "." not in name})


def table() -> str:
    """FIELD_RULES as a Markdown table, with rules of the same effect in one row."""
    lines = ["| field | on | kind | |", "|---|---|---|---|"]
    rows: dict[tuple[str, Kind, str], list[str]] = {}
    for rule in FIELD_RULES:
        note = rule.note
        if rule.no_ops:
            note += f"; {', '.join(f'`{_json(value)}`' for value in rule.no_ops)} is accepted"
        rows.setdefault((rule.name, rule.kind, note), []).append(rule.protocol)
    merged: dict[tuple[str, Kind, str], list[str]] = {}
    for (name, kind, note), protocols in rows.items():
        merged.setdefault((", ".join(protocols), kind, note), []).append(f"`{name}`")
    for (on, kind, note), quoted in merged.items():
        lines.append(f"| {', '.join(quoted)} | {on} | {kind} | {note} |")
    return "\n".join(lines)


def _json(value: Any) -> str:
    import json

    return json.dumps(value)
