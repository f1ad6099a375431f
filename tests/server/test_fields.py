"""The three kinds of fields that clients send: skipped, mapped, refused."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from radixserve.server.routes.anthropic_messages.schema import MessagesRequest
from radixserve.server.routes.anthropic_messages.translate import chat_messages, template_of
from radixserve.server.wire.body import skipped_in
from radixserve.server.wire.fields import FIELD_RULES, PROTOCOLS, FieldRule, Kind, table
from radixserve.server.wire.schema import ChatRequest
from tests.server.local_server import LocalServer

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
HEADER = "x-radixserve-skipped-fields"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "x", "max_tokens": 1},
    "chat": {"messages": HI, "max_tokens": 1},
    "responses": {"input": "hi", "max_output_tokens": 1},
    "messages": {"model": "demo", "max_tokens": 1, "messages": HI},
    "generate": {"prompt": "x", "max_tokens": 1},
    "decisions": {"input": "x", "questions": [{"type": "predicate", "instructions": "y"}]},
}
TOOL = {"name": "add", "input_schema": {"type": "object"}}
# What a nested field needs beside it.
PARENTS: dict[str, dict[str, Any]] = {
    "thinking": {"type": "adaptive"},
    "tools[]": {**TOOL},
    "messages[].content[]": {"type": "text", "text": "hi"},
    "input[].content[]": {"type": "input_text", "text": "hi"},
}


@pytest.fixture(scope="module")
def strict(runtime: Runtime) -> Iterator[LocalServer]:
    with LocalServer(runtime, strict_fields=True) as served:
        yield served


def body_of(rule: FieldRule, value: Any) -> dict[str, Any]:
    """The smallest body with that value in the field."""
    parent, _, name = rule.name.rpartition(".")
    if not parent:
        body = {**BODIES[rule.protocol]}
        if name in ("max_completion_tokens", "n_predict") and value is not None:
            body = {key: kept for key, kept in body.items() if not key.startswith("max_")}
        if rule.protocol == "chat" and name == "max_tokens":  # None is the rest of the context
            body["messages"] = [{"role": "user", "content": "x " * 4_000}]
        return {**body, name: value}
    members: Any = {**PARENTS.get(parent, {}), name: value}
    if parent.endswith("[].content[]"):
        message = {"role": "user", "content": [members]}
        return {**BODIES[rule.protocol], parent.partition("[")[0]: [message]}
    body = {**BODIES[rule.protocol], parent.removesuffix("[]"): members}
    if parent.endswith("[]"):
        body |= {parent.removesuffix("[]"): [members], "tool_choice": {"type": "none"}}
    return body


def names(answer: Any) -> list[str]:
    header = answer.headers.get(HEADER)
    return header.split(", ") if header else []


@pytest.mark.parametrize("rule", FIELD_RULES, ids=lambda rule: f"{rule.protocol}:{rule.name}")
def test_each_field_of_the_table(served: LocalServer, strict: LocalServer, rule: FieldRule) -> None:
    body, path = body_of(rule, rule.example), PROTOCOLS[rule.protocol]
    param = rule.name.replace("[]", "[0]")
    loose, tight = served.client.post(path, json=body), strict.client.post(path, json=body)
    if rule.kind is Kind.REFUSED:
        assert loose.status_code == tight.status_code == 400
        assert rule.note in loose.json()["error"]["message"]
    else:
        assert loose.status_code == 200, loose.text
    if rule.kind is Kind.MAPPED:
        assert tight.status_code == 200, tight.text
        assert names(loose) == names(tight) == []
    if rule.kind is Kind.SKIPPED:
        assert names(loose) == [rule.name]
        assert tight.status_code == 400
    if tight.status_code == 400:
        error = tight.json()["error"]
        assert param in error["message"]
        assert error.get("param", param) == param  # Anthropic's errors have none
    for value in (None, *rule.no_ops):
        assert names(served.client.post(path, json=body_of(rule, value))) == []


def test_what_asks_for_nothing_is_taken(strict: LocalServer) -> None:
    for rule in FIELD_RULES:
        for value in (None, *rule.no_ops):
            body = body_of(rule, value)
            answer = strict.client.post(PROTOCOLS[rule.protocol], json=body)
            assert answer.status_code == 200, (rule.name, value, answer.text)


def test_the_table_of_the_docs_is_this_one() -> None:
    """`python -m tests.server.test_fields` writes it."""
    assert table() in DOCS.read_text(encoding="utf-8")


def test_unknown_members_of_messages_are_skipped_and_unknown_fields_refused(
    served: LocalServer,
) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "extra": 1}
    messages = [
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": "yes", "annotations": [], "audio": None, "refusal": None},
        {"role": "user", "content": "go on", "whim": {"a": [1]}},
    ]
    chat = {"messages": messages, "max_tokens": 1}
    answer = served.client.post(PROTOCOLS["chat"], json=chat)
    assert answer.status_code == 200, answer.text
    assert names(answer) == [
        "messages[].content[].cache_control",
        "messages[].content[].extra",
        "messages[].whim",
    ]
    for protocol, path in PROTOCOLS.items():
        answer = served.client.post(path, json={**BODIES[protocol], "whim": 1})
        assert answer.status_code == 400
        assert "unknown field whim" in answer.text


def test_an_unknown_field_is_told_the_known_one_near_it(served: LocalServer) -> None:
    for protocol, wrong, near in (
        ("chat", "temprature", "temperature"),
        ("chat", "max_token", "max_tokens"),
        ("completions", "cache_prompts", "cache_prompt"),  # also one that is skipped
        ("responses", "max_output_token", "max_output_tokens"),
        ("messages", "stop_sequence", "stop_sequences"),
        ("generate", "input_id", "input_ids"),
        ("decisions", "question", "questions"),
    ):
        answer = served.client.post(PROTOCOLS[protocol], json={**BODIES[protocol], wrong: 1})
        assert answer.status_code == 400
        assert f"unknown field {wrong}; did you mean {near}?" in answer.text
    body = {**BODIES["chat"], "stream": True, "stream_options": {"include_usag": True}}
    error = served.client.post(PROTOCOLS["chat"], json=body).json()["error"]
    known = "did you mean include_usage?"
    assert error["message"] == f"unknown field stream_options.include_usag; {known}"


@pytest.mark.parametrize("protocol", ["completions", "chat", "responses"])
def test_other_names_of_sampling_fields_have_their_effect(
    served: LocalServer, protocol: str
) -> None:
    limit = "max_output_tokens" if protocol == "responses" else "max_tokens"
    path, prompt = PROTOCOLS[protocol], {**BODIES[protocol]}
    prompt.pop(limit, None)

    def text(**fields: Any) -> str:
        answer = served.post(path, {**prompt, "ignore_eos": True, "seed": 1, **fields})
        if protocol == "responses":
            return str(answer["output"][0]["content"][0]["text"])
        choice = answer["choices"][0]
        return str(choice["text"] if protocol == "completions" else choice["message"]["content"])

    def error(**fields: Any) -> Any:
        answer = served.client.post(path, json={**prompt, **fields})
        assert answer.status_code == 400, fields
        return answer.json()["error"]

    plain = text(**{limit: 40}, temperature=0)
    repeated = text(**{limit: 40}, temperature=0, repetition_penalty=50.0)
    assert repeated != plain
    assert text(n_predict=40, temperature=0, repeat_penalty=50.0) == repeated
    assert text(n_predict=12, seed=None, random_seed=1) == text(**{limit: 12})
    assert text(n_predict=12, random_seed=1) == text(**{limit: 12})  # the same is no conflict
    assert error(repeat_penalty=1.2, repetition_penalty=1.1)["param"] == "repetition_penalty"
    assert error(random_seed=2, seed=1)["message"] == "seed and random_seed differ: give one"
    assert error(**{limit: 2}, n_predict=1)["param"] == limit
    for wrong, value in (("repeat_penalty", -7), ("random_seed", 2**63), ("n_predict", -7)):
        found = error(**{wrong: value})
        assert found["param"] == wrong
        assert found["message"].startswith(f"{wrong} must be ")


def test_a_limit_of_minus_one_is_the_rest_of_the_context(
    served: LocalServer, runtime: Runtime
) -> None:
    ids = [5] * (runtime.max_seq_len - 4)
    for name in ("max_tokens", "n_predict"):
        body = {"prompt": ids, name: -1, "ignore_eos": True}
        answer = served.client.post(PROTOCOLS["completions"], json=body)
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert "x-radixserve-max-tokens" not in answer.headers
    for protocol, name in (("chat", "max_tokens"), ("responses", "max_output_tokens")):
        field = {"chat": "messages", "responses": "input"}[protocol]
        content = "x " * (runtime.max_seq_len - 100)
        long = {field: [{"role": "user", "content": content}], "ignore_eos": True}
        counts = [
            served.post(PROTOCOLS[protocol], {**long, **limit})["usage"]["total_tokens"]
            for limit in ({name: -1}, {})
        ]
        assert counts == [runtime.max_seq_len] * 2


def test_tools_of_other_types_are_left_out(calling: LocalServer) -> None:
    function = {"name": "add", "parameters": {"type": "object"}}
    others = [{"type": "web_search"}, {"type": "namespace", "name": "x", "tools": []}]
    wrapped = {"type": "function", "function": function}
    chat = {"messages": HI, "max_tokens": 1}
    alone = calling.post(PROTOCOLS["chat"], {**chat, "tools": [wrapped]})
    mixed = calling.client.post(
        PROTOCOLS["chat"], json={**chat, "tools": [others[0], wrapped, others[1]]}
    )
    assert names(mixed) == ["tools[web_search]", "tools[namespace]"]
    assert mixed.json()["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    flat = [*others, {"type": "function", **function}, {"type": "custom", "name": "y"}]
    response = calling.client.post(
        PROTOCOLS["responses"], json={**BODIES["responses"], "tools": flat}
    )
    assert names(response) == ["tools[web_search]", "tools[namespace]", "tools[custom]"]
    assert [tool["name"] for tool in response.json()["tools"]] == ["add"]
    vendor = [{"type": "computer_20250124", "name": "computer"}, TOOL]
    message = calling.client.post(
        PROTOCOLS["messages"], json={**BODIES["messages"], "tools": vendor}
    )
    assert names(message) == ["tools[computer_20250124]"]
    bad = {**chat, "tools": [others[0], {**wrapped, "function": {"name": "a b"}}]}
    error = calling.client.post(PROTOCOLS["chat"], json=bad).json()["error"]
    assert error["param"] == "tools[1].function.name"  # its place in what was sent


def test_a_tool_that_is_left_out_is_an_error_where_fields_are_strict(strict: LocalServer) -> None:
    body = {**BODIES["chat"], "tools": [{"type": "web_search"}]}
    answer = strict.client.post(PROTOCOLS["chat"], json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools[0].type"


def test_the_log_says_it_once(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    with LocalServer(runtime) as served, caplog.at_level(logging.INFO, "radixserve.server"):
        for _ in range(3):
            served.post(PROTOCOLS["chat"], {**BODIES["chat"], "metadata": {"a": "b"}})
    lines = [record.getMessage() for record in caplog.records if "metadata" in record.getMessage()]
    assert lines == ["/v1/chat/completions: metadata has no effect here and is skipped"]


def test_names_of_clients_cannot_break_the_header(served: LocalServer) -> None:
    wild = {f"n\r\nset-cookie: {index}ü": 1 for index in range(100)}
    many = {f"name_{index}": 1 for index in range(100)}
    messages = [{**HI[0], **wild, **many}]
    answer = served.client.post(PROTOCOLS["chat"], json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200
    assert len(names(answer)) == 32
    assert "set-cookie" not in answer.headers
    assert all(re.fullmatch(r"messages\[\]\.\w+|\.\.\.", name) for name in names(answer))


def test_lists_fail_at_their_first_wrong_item_and_have_bounds() -> None:
    from pydantic import ValidationError

    for fields in (
        {"stop_token_ids": ["a"] * 100_000},
        {"stop": [1] * 50_000},
        {"messages": [{}] * 50_000},
        {"tools": [{}] * 50_000},
        {"messages": HI * 100_000},
        {f"field_{index}": 1 for index in range(100_000)},
        {"cache_salt": "x" * 100_000},
    ):
        with pytest.raises(ValidationError) as raised:
            ChatRequest.model_validate({"messages": HI, **fields})
        assert raised.value.error_count() == 1, next(iter(fields))


def variables(**fields: Any) -> Any:
    """What a template is given besides the messages."""
    body = MessagesRequest.model_validate({**BODIES["messages"], **fields})
    assert not list(skipped_in(body))
    return template_of(body, chat_messages(body)).chat_template_kwargs


def test_thinking_and_effort_become_variables_of_the_template() -> None:
    assert variables(thinking={"type": "adaptive"}) is None
    assert variables(thinking={"type": "disabled"}) == {"enable_thinking": False}
    enabled = {"type": "enabled", "budget_tokens": 31999}
    thinking = {"enable_thinking": True, "thinking_budget": 31999}
    assert variables(thinking=enabled) == thinking
    assert variables(output_config={"effort": "max"}) == {"reasoning_effort": "high"}
    own = {"enable_thinking": False}
    assert variables(thinking=enabled, chat_template_kwargs=own) == {**thinking, **own}


def test_no_fields_of_other_servers_are_unknown(served: LocalServer) -> None:
    """What llama.cpp's, Ollama's and routers' clients send with their defaults."""
    defaults = {
        "cache_prompt": True, "id_slot": -1, "timings_per_token": False, "return_progress": False,
        "reasoning_format": "auto", "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
        "typical_p": 1.0, "dry_multiplier": 0.0, "dry_base": 1.75, "xtc_probability": 0.0,
        "dynatemp_range": 0.0, "repeat_penalty": 1.0, "keep_alive": "5m", "options": {},
        "num_ctx": 4096, "usage": {"include": True}, "provider": {"order": ["x"]},
        "transforms": [], "plugins": [], "tool_stream": True,
    }  # fmt: skip
    for protocol in ("completions", "chat", "responses"):
        answer = served.client.post(
            PROTOCOLS[protocol], json={**BODIES[protocol], "n_predict": 1, **defaults}
        )
        assert answer.status_code == 200, answer.text
        assert {"cache_prompt", "keep_alive", "usage"} <= set(names(answer))


def test_context_management_clears_thoughts() -> None:
    def thoughts(keep: Any) -> list[bool]:
        turns = []
        for number in range(3):
            said = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": str(number)}]
            turns += [*HI, {"role": "assistant", "content": said}]
        edit = {"type": "clear_thinking_20251015", **({} if keep is None else {"keep": keep})}
        fields = {"messages": [*turns, *HI], "context_management": {"edits": [edit]}}
        body = MessagesRequest.model_validate({**BODIES["messages"], **fields})
        answers = [one for one in chat_messages(body) if one["role"] == "assistant"]
        return ["reasoning_content" in one for one in answers]

    assert thoughts("all") == [True, True, True]
    assert thoughts({"type": "thinking_turns", "value": 2}) == [False, True, True]
    assert thoughts(None) == [False, False, True]


def main() -> None:
    text = DOCS.read_text(encoding="utf-8")
    start, end = "<!-- fields -->\n", "<!-- end of fields -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    DOCS.write_text(f"{before}{start}{table()}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
