"""Anthropic's protocol: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from radixserve.server.gate.tenants import Tenants
from radixserve.server.routes.anthropic_messages.schema import MessagesRequest
from radixserve.server.routes.anthropic_messages.translate import chat_messages
from tests.pacing import held, wait_until
from tests.server.local_server import LocalServer

M, N = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "How do I sort a list?"}
TOOL = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}


def ask(served: LocalServer, messages: list[Any], **fields: Any) -> Any:
    body = {"model": "demo", "max_tokens": 100, "temperature": 0, "messages": messages, **fields}
    return served.post(M, {name: value for name, value in body.items() if value is not None})


def events_of(served: LocalServer, messages: list[Any], **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "demo", "max_tokens": 100, "temperature": 0, "messages": messages, **fields}
    with served.client.stream("POST", M, json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["request-id"]
        lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200, lines
    names = [line.removeprefix("event: ") for line in lines[::2]]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [one["type"] for one in found]
    return found


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to; each block is opened, grown and closed in turn."""
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "message_stop"
    message = events[0]["message"]
    texts: list[str] = []
    open_block: int | None = None
    for event in events[1:-1]:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_block is None
            open_block = event["index"]
            assert open_block == len(message["content"])
            message["content"].append(event["content_block"])
            texts.append("")
        elif kind == "content_block_delta":
            assert event["index"] == open_block
            (delta,) = [text for name, text in event["delta"].items() if name != "type"]
            texts[-1] += delta
        elif kind == "content_block_stop":
            assert event["index"] == open_block
            open_block = None
        elif kind == "message_delta":
            assert open_block is None
            message |= event["delta"]
            message["usage"] |= event["usage"]
        else:
            assert kind == "ping"
    for block, text in zip(message["content"], texts, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
        else:
            block[block["type"]] = text
    return message


def test_an_answer_and_its_usage(served: LocalServer) -> None:
    first = ask(served, [USER], system="Be short.", cache_salt="usage", max_tokens=10)
    assert first["type"] == "message"
    assert first["role"] == "assistant"
    (block,) = first["content"]
    assert block["type"] == "text"
    assert first["stop_reason"] == "max_tokens"
    usage = first["usage"]
    assert usage["cache_read_input_tokens"] == usage["cache_creation_input_tokens"] == 0
    assert usage["output_tokens"] == 10
    again = ask(served, [USER], system="Be short.", cache_salt="usage", max_tokens=10)
    assert again["content"] == first["content"]
    assert again["usage"]["input_tokens"] == 1
    assert again["usage"]["cache_read_input_tokens"] == usage["input_tokens"] - 1
    blocks = [{"type": "text", "text": "Be short."}]
    user = {"role": "user", "content": [{"type": "text", "text": USER["content"]}]}
    same = ask(served, [user], system=blocks, cache_salt="usage", max_tokens=10)
    assert same["usage"] == again["usage"]


def test_a_stream_adds_up_to_the_whole_answer(served: LocalServer, calling: LocalServer) -> None:
    for server, fields in ((served, {"stop_sequences": ["("]}), (calling, {"tools": [TOOL]})):
        whole = ask(server, [USER], **fields)
        found = message_of(events_of(server, [USER], **fields))
        for name in ("content", "stop_reason", "stop_sequence", "role", "model", "type"):
            if name == "content":
                for block in (*whole[name], *found[name]):
                    block.pop("id", None)
            assert found[name] == whole[name]
        assert found["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
        assert found["usage"]["input_tokens"] == 1


def test_what_a_mark_keeps_counts_as_created(served: LocalServer) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [{"type": "text", "text": "Be short, and say what you mean.", **mark}]
    for streams in (False, True):
        fields = {"system": system, "cache_salt": f"mark {streams}", "max_tokens": 4}
        for is_new in (True, False):
            if streams:
                usage = message_of(events_of(served, [USER], **fields))["usage"]
            else:
                usage = ask(served, [USER], **fields)["usage"]
            created, cached = (usage[f"cache_{name}_input_tokens"] for name in ("creation", "read"))
            assert usage["input_tokens"] == 0
            assert (created > 10) == is_new == (cached == 0)


def test_the_reason_of_the_end(served: LocalServer, calling: LocalServer) -> None:
    assert ask(calling, [USER])["stop_reason"] == "end_turn"
    assert ask(calling, [USER], tools=[TOOL])["stop_reason"] == "tool_use"
    none = ask(calling, [USER], tools=[TOOL], tool_choice={"type": "none"})
    assert [block["type"] for block in none["content"]] == ["thinking", "text"]
    assert none["stop_reason"] == "end_turn"
    assert ask(calling, [USER], tools=[TOOL], max_tokens=6)["stop_reason"] == "max_tokens"
    stopped = ask(served, [USER], stop_sequences=["sort", "list"])
    assert stopped["stop_reason"] == "stop_sequence"
    assert stopped["stop_sequence"] in ("sort", "list")


def test_an_answer_that_fills_the_context() -> None:
    with Runtime("demo", num_pages=256, max_seq_len=24) as runtime, LocalServer(runtime) as served:
        answer = ask(served, [USER], max_tokens=500)
        assert answer["stop_reason"] == "model_context_window_exceeded"
        usage = answer["usage"]
        assert usage["input_tokens"] + usage["output_tokens"] == 24


def test_count_tokens_is_what_usage_says(served: LocalServer, calling: LocalServer) -> None:
    said = ask(calling, [USER], tools=[TOOL])["content"]
    result = {"type": "tool_result", "tool_use_id": said[-1]["id"], "content": "5"}
    history = [USER, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    for server, messages, fields in (
        (served, [USER], {"system": "Be short."}),
        (calling, history, {"tools": [TOOL]}),
    ):
        count = server.post(N, {"model": "demo", "messages": messages, **fields})["input_tokens"]
        usage = ask(server, messages, **fields)["usage"]
        assert count == usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_30_turns_computes_only_what_is_new(
    calling: LocalServer, streams: bool
) -> None:
    """Every answer tokenises differently the second time: its ids are gone on from."""
    salt = f"agent {streams}"
    messages: list[Any] = [USER]
    new_tokens: set[int] = set()
    known = 0
    for turn in range(30):
        fields = {"tools": [TOOL], "cache_salt": salt}
        if streams:
            answer = message_of(events_of(calling, messages, **fields))
        else:
            answer = ask(calling, messages, **fields)
        usage = answer["usage"]
        thinking, text, use = answer["content"]
        assert thinking == {
            "type": "thinking",
            "thinking": "The sum is asked for.",
            "signature": "",
        }
        assert text["text"] == "Let me add them."
        assert (use["name"], use["input"]) == ("add", {"a": 2, "b": 3})
        # All but the last token that was sampled, after which nothing came.
        assert usage["cache_read_input_tokens"] == max(0, known - 1)
        if turn:
            new_tokens.add(usage["input_tokens"])
        known = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
        result = {"type": "tool_result", "tool_use_id": use["id"],
                  "content": [{"type": "text", "text": f"{turn:3}"}]}  # fmt: skip
        messages += [{"role": "assistant", "content": answer["content"]},
                     {"role": "user", "content": [result]}]  # fmt: skip
    assert len(new_tokens) == 1  # the same in each turn: the end token and the result


def test_the_turns_of_a_chat() -> None:
    """Texts of one turn, results of tools, what was thought."""
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": "ü"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"},
                                          {"type": "text", "text": "c"},
                                          {"type": "text", "text": "d"}, use]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "no"},
            {"type": "tool_result", "tool_use_id": "t1"},
            {"type": "text", "text": "e", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ]},
        {"role": "assistant", "content": []},
    ]  # fmt: skip
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"x": "ü"}'}}
    system = [{"type": "text", "text": "s"}]
    fields = {"model": "demo", "max_tokens": 1, "system": system, "messages": messages}
    assert chat_messages(MessagesRequest.model_validate(fields)) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "cd", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "t1", "content": ""},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": ""},
    ]


def test_forced_calls_and_a_form(served: LocalServer) -> None:
    pytest.importorskip("llguidance", reason="forms need the extra [grammar]")
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"name": "weather", "input_schema": schema}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        answer = ask(served, [USER], tools=[tool],
                     tool_choice={**choice, "disable_parallel_tool_use": True})  # fmt: skip
        (block,) = answer["content"]
        assert block["type"] == answer["stop_reason"] == "tool_use"
        assert block["name"] == "weather"
        assert block["input"]["city"] in ("Rome", "Oslo")
    config = {"format": {"type": "json_schema", "schema": schema}}
    answer = ask(served, [USER], output_config=config, max_tokens=400)
    assert json.loads(answer["content"][0]["text"])["city"] in ("Rome", "Oslo")


def test_a_stream_that_fails(talking: LocalServer) -> None:
    """Its last event is the error."""
    lines = talking.break_stream(M, {"model": "demo", "max_tokens": 4_000, "messages": [USER]})
    assert lines[-2] == "event: error"
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["error"] == {"type": "api_error", "message": "it broke"}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", [M, "/v1/responses"])
def test_a_client_that_leaves_is_aborted(talking: LocalServer, path: str, streams: bool) -> None:
    before = talking.server.counters.clients_gone
    fields = {"input": "a"} if path != M else {"max_tokens": 4_000, "messages": [USER]}
    body = {"model": "demo", "stream": streams, **fields}
    with held(talking.server.runtime), talking.connect(path, body):
        wait_until(lambda: talking.server.runtime.status().running == 1)
    wait_until(lambda: talking.server.counters.clients_gone == before + 1)
    wait_until(lambda: not talking.server.in_flight)


def test_an_answer_goes_on_from_its_beginning(served: LocalServer) -> None:
    whole = ask(served, [USER])["content"][0]["text"]
    begun = whole[: whole.index(" of")]
    rest = ask(served, [USER, {"role": "assistant", "content": begun}])["content"][0]["text"]
    assert begun + rest == whole


def test_fields_without_effect_here(served: LocalServer) -> None:
    answer = ask(
        served, [USER], metadata={"user_id": "me"}, service_tier="auto", top_p=0.9, top_k=5, seed=1,
        temperature=0.5, cache_control={"type": "ephemeral"}, thinking={"type": "disabled"},
        container=None, tools=[], max_tokens=2, session_id="s",
    )  # fmt: skip
    assert answer["usage"]["output_tokens"] <= 2
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "tools-2024-05-16"}
    body = {"model": "demo", "max_tokens": 1, "messages": [USER]}
    assert served.client.post(M, json=body, headers=headers).status_code == 200
    assert served.client.delete("/v1/sessions/s").status_code == 200


def test_tenants_share_nothing(runtime: Runtime, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ann key-of-ann-0123456789\nbob key-of-bob-0123456789\n")
    path.chmod(0o600)
    with LocalServer(runtime, Tenants.load(str(path))) as served:
        user = {"role": "user", "content": "What does the bisect module do, in short?"}
        body = {"model": "demo", "max_tokens": 20, "messages": [user]}

        def cached(name: str) -> int:
            headers = {"x-api-key": f"key-of-{name}-0123456789"}
            usage = served.post(M, body, headers=headers)["usage"]
            return int(usage["cache_read_input_tokens"])

        for first, second in (("ann", "bob"), ("bob", "ann")):
            runtime.flush_cache()
            assert cached(first) == cached(second) == 0
            assert cached(first) == cached(second) > 5
