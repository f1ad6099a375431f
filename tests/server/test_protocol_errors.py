"""Bad requests in Anthropic's protocol and to /v1/responses: each has its status, and a message
that names the place in the terms of the protocol."""

from __future__ import annotations

from json import dumps as quote
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve.server.gate.tenants import Tenants
from tests.server.local_server import LocalServer

M, N, R = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
TOOL = {"name": "add", "input_schema": {"type": "object"}}
USE = {"type": "tool_use", "id": "t1", "name": "add", "input": {}}
FUNCTION = {"type": "function", "name": "add"}


def m(content: Any = "hi", role: str = "user", **fields: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": content}]
    return {"model": "demo", "max_tokens": 4, "messages": messages, **fields}


def after(*blocks: Any) -> dict[str, Any]:
    """A turn after one of the assistant."""
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [USE]}]
    return m(messages=[*said, {"role": "user", "content": list(blocks)}])


def r(input_: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"input": input_, "max_output_tokens": 4, **fields}


# path, body, part of the message
TABLE: list[tuple[str, Any, str]] = [
    (M, {}, "model is required"),
    (M, {"model": "demo", "max_tokens": 4}, "messages is required"),
    (M, {"model": "demo", "messages": []}, "messages must be a list"),
    (M, m(messages=[]), "messages must be a list"),
    (M, m(messages="hi"), "messages must be a list"),
    (M, m(messages=["hi"]), "messages[0] must be an object"),
    (M, m(role="tool"), "messages[0].role 'tool' is not supported"),
    (M, m(messages=[{"role": "user"}]), "messages[0].content is required"),
    (M, m(None), "messages[0].content must be text or a list"),
    (M, m([]), "messages[0].content must be a list with at least one item"),
    (M, m(["hi"]), "messages[0].content[0] must be an object"),
    (M, m([{}]), "messages[0].content[0].type is required"),
    (M, m([{"type": "text"}]), "messages[0].content[0].text is required"),
    (M, m([{"type": "text", "text": 5}]), "messages[0].content[0].text must be"),
    (M, m([{"type": "image", "source": {}}]), "type 'image' is not supported"),
    (M, m([{"type": "document", "source": {}}]), "type 'document' is not supported"),
    (M, m([{"type": "server_tool_use"}]), "type 'server_tool_use' is not supported"),
    (M, m([USE]), "messages[0].content[0].type 'tool_use' is not supported by this server here"),
    (M, m([{"type": "thinking", "thinking": ""}]), "'thinking' is not supported"),
    (M, m([{"type": "redacted_thinking", "data": ""}], "assistant"), "'redacted_thinking' is not"),
    (M, m([{**USE, "id": ""}], "assistant"), "messages[0].content[0].id must have"),
    (M, m([{**USE, "input": "{}"}], "assistant"), "messages[0].content[0].input must be"),
    (M, m([USE], "assistant"), "the last message is a tool_use"),
    (M, after({"type": "tool_result"}), "messages[2].content[0].tool_use_id is required"),
    (M, after({"type": "tool_result", "tool_use_id": "t2"}), "does not name a tool_use"),
    (M, after({"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image"}]}),
     "messages[2].content[0].type 'image' is not supported by this server here: the model takes"),
    (M, after({"type": "tool_result", "tool_use_id": "t1", "content": 5}),
     "messages[2].content[0].content must be text or a list"),
    (M, m([{"type": "text", "text": "a", "cache_control": {"type": "permanent"}}]),
     "cache_control.type must be"),
    (M, m([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "2h"}}]),
     "cache_control.ttl must be"),
    (M, m(system=5), "system must be text or a list"),
    (M, m(system=[{"type": "image"}]), "system[0].type must be 'text'"),
    (M, m(model="other"), "the model 'other' is not served here"),
    (M, m(max_tokens=0), "max_tokens must be >= 1"),
    (M, m(max_tokens="4"), "max_tokens must be"),
    (M, m(temperature=-1), "temperature must be"),
    (M, m(top_k=-2), "top_k must be"),
    (M, m(stop_sequences="a"), "stop_sequences must be"),
    (M, m(stop_sequences=[""]), "stop_sequences must be"),
    (M, m(stream="yes"), "stream must be"),
    (M, m(tools=[{"name": "add"}]), "tools[0].input_schema is required"),
    (M, m(tools=[{**TOOL, "name": "a b"}]), "tools[0].name"),
    (M, m(tools=[TOOL, TOOL]), "tools[1].name"),
    (M, m(tools=[{**TOOL, "defer_loading": True}]), "tools[0].defer_loading is not supported"),
    (M, m(tools=[TOOL], tool_choice={"type": "tool"}),
     "tool_choice.name is required for the type tool"),
    (M, m(tools=[TOOL], tool_choice={"type": "tool", "name": "sub"}), "sub"),
    (M, m(tools=[TOOL], tool_choice={"type": "some"}), "tool_choice.type must be"),
    (M, m(mcp_servers=[{}]), "mcp_servers is not supported"),
    (M, m(container="c"), "container is not supported"),
    (M, m(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}),
     "context_management.edits[0].type must"),
    (M, m(n=2), "unknown field n"),
    (M, m(session_id=""), "session_id must have"),
    (M, m(chat_template_kwargs={"tools": []}), "cannot set tools"),
    (M, [], "the body must be a JSON object"),
    (N, m(), "unknown field max_tokens"),
    (N, {"model": "demo"}, "messages is required"),
    (R, {}, "input is required"),
    (R, r(None), "input must be text or a list"),
    (R, r([]), "input must be a list"),
    (R, r(["hi"]), "input[0] must be an object"),
    (R, r([{"role": "robot", "content": ""}]), "input[0].role must be"),
    (R, r([{"role": "user", "content": 5}]), "input[0].content must be text or a list"),
    (R, r([{"role": "user", "content": [{"type": "input_image"}]}]), "'input_image' is not"),
    (R, r([{"role": "user", "content": [{"type": "input_file"}]}]), "'input_file' is not"),
    (R, r([{"type": "item_reference", "id": "a"}]), "input[0].type 'item_reference' is not"),
    (R, r([{"type": "computer_call"}]), "input[0].type 'computer_call' is not supported"),
    (R, r([{"type": "function_call", "call_id": "a", "name": "add", "arguments": "["}]),
     "input[0].arguments must be the JSON text"),
    (R, r([{"type": "function_call_output", "call_id": "a", "output": ""}]),
     "input[0].call_id 'a' does not name a function_call"),
    (R, r(previous_response_id="resp_0"), "'resp_0' is not stored here"),
    (R, r(conversation="conv_0"), "conversation is not supported"),
    (R, r(background=True, store=False), "background can only be used when `store` is true"),
    (R, r(background=True, stream=True), "background cannot be streamed"),
    (R, r(background=True, prompt_cache_options={"prewarm": True}), "used with prewarm"),
    (R, r(background=1), "background must be true or false"),
    (R, r(background_options={}), "background_options is not supported"),
    (R, r(truncation="auto"), "truncation is not supported"),
    (R, r(max_tool_calls=3), "max_tool_calls is not supported"),
    (R, r(max_output_tokens=0), "max_output_tokens must be >= 1"),
    (R, r(top_p=2), "top_p must be"),
    (R, r(text={"verbosity": "shrill"}), "text.verbosity must be"),
    (R, r(metadata={"a": "x" * 513}), "metadata.a must have"),
    (R, r(metadata={str(at): "" for at in range(17)}), "metadata must have"),
    (R, r(tools=[{"type": "function"}]), "tools[0].name is required"),
    (R, r(tools=[{**FUNCTION, "name": "a b"}]), "tools[0].name"),
    (R, r(tools=[{**FUNCTION, "parameters": 5}]), "tools[0].parameters must be"),
    (R, r(tool_choice="required"), "tool_choice needs tools"),
    (R, r(tools=[FUNCTION], tool_choice="some"), "tool_choice must be"),
    (R, r(tools=[FUNCTION], tool_choice={"type": "allowed_tools"}), "tool_choice.type must be"),
    (R, r(top_logprobs=-1), "top_logprobs must be"),
    (R, r(messages=[]), "unknown field messages"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "message"), TABLE, ids=range(len(TABLE)))
def test_a_bad_request_says_what_is_wrong(
    served: LocalServer, path: str, body: Any, message: str
) -> None:
    answer = served.client.post(path, json=body)
    assert answer.status_code == (404 if "is not served" in message else 400), answer.text
    found = answer.json()
    assert message in found["error"]["message"]
    kind = "not_found_error" if answer.status_code == 404 else "invalid_request_error"
    assert found["error"]["type"] == kind
    if path == R:
        assert set(found) == {"error"}
        param = found["error"]["param"]
        assert param is None or param in found["error"]["message"]
    else:
        assert set(found["error"]) == {"type", "message"}
        assert found["type"] == "error"
        assert found["request_id"] == answer.headers["request-id"]


def test_the_gate_speaks_the_protocol_of_the_route(served: LocalServer, tmp_path: Path) -> None:
    """The errors of keys, bodies and routes too."""
    path = tmp_path / "keys"
    path.write_text("ann key-of-ann-0123456789\n")
    path.chmod(0o600)
    runtime = served.server.runtime
    with LocalServer(runtime, Tenants.load(str(path)), max_body=1_000) as guarded:
        key = {"x-api-key": "key-of-ann-0123456789"}

        def ask(
            status: int, kind: str, headers: dict[str, str], body: bytes, path: str = M
        ) -> None:
            headers = {"content-type": "application/json", **headers}
            answer = guarded.client.post(path, content=body, headers=headers)
            assert answer.status_code == status, answer.text
            assert answer.json()["error"]["type"] == kind

        ask(401, "authentication_error", {}, b"{}")
        ask(401, "authentication_error", {"x-api-key": "no"}, b"{}", N)
        ask(413, "request_too_large", key, b" " * 1_001)
        ask(400, "invalid_request_error", key, b"{")
        ask(400, "invalid_request_error", {**key, "content-type": "text/plain"}, b"{}")
        ask(404, "not_found_error", key, b"{}", M + "/batches")
        assert guarded.client.get(M, headers=key).json()["error"]["type"] == "invalid_request_error"
        # OpenAI's keep their own.
        assert guarded.client.post(R, json={}).json()["error"]["code"] == "invalid_api_key"
        guarded.server.is_draining = True
        ask(529, "overloaded_error", key, b"{}")


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("GET", f"{R}/resp_0", 404, "no response 'resp_0'"),
        ("DELETE", f"{R}/resp_0", 404, "no response 'resp_0'"),
        ("GET", f"{R}/resp_0/input_items", 404, "no response 'resp_0'"),
        ("GET", f"{R}/resp_0/input_items?limit=0", 400, "limit must be 1 to 100"),
        ("GET", f"{R}/resp_0/input_items?order=up", 400, "order must be"),
        ("GET", f"{R}/resp_0?include=a", 400, "include is not supported"),
        ("GET", f"{R}/resp_0?stream=true", 400, "stream is not supported"),
    ],
)
def test_stored_responses(
    served: LocalServer, method: str, path: str, status: int, message: str
) -> None:
    answer = served.client.request(method, path)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("depth", [100, 600, 950, 20_000])
def test_what_is_nested_deeply_is_no_error_of_the_server(served: LocalServer, depth: int) -> None:
    """It is taken, or refused."""
    deep = '{"a":' * depth + "1" + "}" * depth
    tool = f'{{"name": "add", "input_schema": {deep}}}'
    use = f'{{"type": "tool_use", "id": "t1", "name": "add", "input": {deep}}}'
    function = f'{{"type": "function", "name": "add", "parameters": {deep}}}'
    call = f'{{"type": "function_call", "call_id": "a", "name": "add", "arguments": {quote(deep)}}}'
    user = '{"role": "user", "content": "a"}'
    result = '{"type": "tool_result", "tool_use_id": "t1"}'
    head = f'"model": "demo", "max_tokens": 1, "tool_choice": {{"type": "none"}}, "tools": [{tool}]'
    for path, body in (
        (M, f'{{{head}, "messages": [{user}]}}'),
        (M, f'{{"model": "demo", "max_tokens": 1, "messages": [{user}, {{"role": "assistant", '
            f'"content": [{use}]}}, {{"role": "user", "content": [{result}]}}]}}'),
        (R, f'{{"input": "a", "max_output_tokens": 1, "tool_choice": "none", '
            f'"tools": [{function}]}}'),
        (R, f'{{"input": [{call}], "max_output_tokens": 1}}'),
    ):  # fmt: skip
        headers = {"content-type": "application/json"}
        answer = served.client.post(path, content=body, headers=headers)
        assert answer.status_code in (200, 400), answer.text
        assert answer.status_code == 200 or depth > 100, answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["type"] == "invalid_request_error"
