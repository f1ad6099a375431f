"""Why a prompt was not cached, told in the words of each protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
openai = pytest.importorskip("openai", reason="pip install openai==3.54.0")

from openai.types.responses import Response  # noqa: E402
from openai.types.responses.response import PromptCacheDiagnostics  # noqa: E402
from pydantic import TypeAdapter  # noqa: E402

from radixserve import Runtime  # noqa: E402
from radixserve.server.gate.prompt_records import PromptParts, PromptRecords  # noqa: E402
from radixserve.server.gate.tenants import Tenants  # noqa: E402
from tests.server.local_server import LocalServer  # noqa: E402

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SYSTEM = "You know the standard library of Python. Your answers are short."
ASK = "How do I sort a list?"
NEXT = {"role": "user", "content": "And a dict?"}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(autouse=True)
def _clean(runtime: Runtime) -> Iterator[None]:
    runtime.flush_cache()
    yield
    runtime.flush_cache()


def chat(served: LocalServer, messages: list[Any], previous: str | None, **fields: Any) -> Any:
    """The answer, and the object of its diagnosis, which OpenAI's type takes."""
    if previous is not None:
        fields["prompt_cache_options"] = {"comparison_response_id": previous}
    body = {"messages": messages, "max_tokens": 6, "temperature": 0, **fields}
    answer = served.post(CHAT, body)
    given = answer.get("prompt_cache_diagnostics")
    assert (given is None) == (previous is None)
    if given is not None:
        TypeAdapter(PromptCacheDiagnostics).validate_python(given, strict=True)
    return answer, given


def history(answer: Any, ask: str = ASK, system: str = SYSTEM) -> list[dict[str, Any]]:
    said = answer["choices"][0]["message"]
    start = [{"role": "system", "content": system}, {"role": "user", "content": ask}]
    return [*start, {"role": "assistant", "content": said["content"]}, NEXT]


def first_turn(served: LocalServer, **fields: Any) -> Any:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ASK}]
    return chat(served, messages, None, **fields)[0]


def test_a_turn_that_goes_on_hits(served: LocalServer) -> None:
    first = first_turn(served)
    assert chat(served, history(first), first["id"])[1] == {"type": "cache_hit"}


def test_an_edited_message(served: LocalServer) -> None:
    first = first_turn(served)
    edited = history(first, ask="How do I sort a tuple?")
    second, given = chat(served, edited, first["id"])
    usage = second["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    left = first["usage"]["total_tokens"] - 1
    lost = min(left, usage["prompt_tokens"] - 1) - cached
    detail = given.pop("detail")
    assert given == {
        "type": "cache_miss",
        "reason": "input_changed",
        "cache_missed_tokens": lost,
        "comparison_reusable_tokens": left,
    }
    assert detail["part"] == "messages"
    assert detail["position"] == detail["shared_tokens"] == detail["cached_tokens"] == cached
    assert detail["tokens_lost"] == lost
    said = first["choices"][0]["message"]["content"]
    assert detail["expected"].lstrip().startswith("list?")
    assert said[:10] in detail["expected"]
    assert detail["found"].lstrip().startswith("tuple?")


@pytest.mark.parametrize("n", [1, 3])
def test_an_edited_answer(served: LocalServer, n: int) -> None:
    first = first_turn(served, n=n, temperature=1.0, seed=3)
    said = history(first)
    said[2] = {"role": "assistant", "content": "Not what was said."}
    _, given = chat(served, said, first["id"])
    assert given["reason"] == "input_changed"
    assert given["detail"]["part"] == "answer"
    assert given["detail"]["position"] >= first["usage"]["prompt_tokens"]
    assert "Not what" in given["detail"]["found"]


def test_each_part_has_its_reason(served: LocalServer) -> None:
    tools = [{"type": "function", "function": TOOL}]
    first = first_turn(served, tools=tools)
    cases: list[tuple[str, str, str, dict[str, Any]]] = [
        ("tools_changed", "tools", SYSTEM, {}),
        ("tools_changed", "tools", SYSTEM,
         {"tools": [{"type": "function", "function": {**TOOL, "name": "sum"}}]}),
        ("input_changed", "system", SYSTEM.replace("short", "long"), {"tools": tools}),
    ]  # fmt: skip
    for reason, part, system, fields in cases:
        _, given = chat(served, history(first, system=system), first["id"], **fields)
        assert (given["reason"], given["detail"]["part"]) == (reason, part)
        assert given["detail"]["expected"] != given["detail"]["found"]


def test_a_date_of_the_template_is_told_apart(
    served: LocalServer, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has forgotten when the conversation began."""
    assert runtime.tokenizer is not None
    template = runtime.tokenizer.chat_template

    def print_date(date: str) -> None:
        tokenizer = runtime.tokenizer._tokenizer  # type: ignore[union-attr]
        monkeypatch.setattr(tokenizer, "chat_template", f"{date} 2026\n{template}")

    print_date("31 March")
    first = first_turn(served)
    print_date("1 April")
    _, given = chat(served, history(first), first["id"])
    assert given["detail"]["part"] == "date"
    assert given["detail"]["found"].startswith("1 April")


def test_parts_are_told_apart() -> None:
    system, ask = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    said = {"role": "assistant", "content": "a"}
    before = PromptParts.of([TOOL], [system, ask], {"reasoning_effort": "low"})

    def changed(tools: Any, messages: Any, variables: Any) -> str:
        return PromptParts.of(tools, messages, variables).changed_since(before)

    low = {"reasoning_effort": "low"}
    assert changed([TOOL], [system, ask, said, ask], {"reasoning_effort": "high"}) == "reasoning"
    assert changed([TOOL], [system, ask, said], {**low, "verbosity": "low"}) == "verbosity"
    assert changed([TOOL], [system, ask, said], {**low, "enable_thinking": True}) == "reasoning"
    assert changed([TOOL], [system, said], low) == "messages"
    assert changed([TOOL], [system, ask, said], low) == "messages"
    assert changed([], [system, ask], low) == "tools"
    assert changed([TOOL], [ask], low) == "system"


def test_what_was_dropped_is_no_change(served: LocalServer, runtime: Runtime) -> None:
    first = first_turn(served)
    runtime.flush_cache()
    second, given = chat(served, history(first), first["id"])
    assert given["type"] == "unavailable"
    detail = given["detail"]
    assert (detail["part"], detail["reason"], detail["position"]) == (None, "never_seen", 0)
    assert detail["tokens_lost"] == first["usage"]["total_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_unknown_answers_and_other_namespaces_are_not_found(
    served: LocalServer, runtime: Runtime, tmp_path: Path
) -> None:
    first = first_turn(served)
    unknown = {"type": "comparison_response_not_found"}
    assert chat(served, history(first), "chatcmpl-unknown")[1] == unknown
    assert chat(served, history(first), first["id"], cache_salt="x")[1] == unknown
    keys = tmp_path / "keys"
    keys.write_text("ann key-of-ann-0123456789\nbob key-of-bob-0123456789\n")
    keys.chmod(0o600)
    with LocalServer(runtime, Tenants.load(str(keys))) as guarded:
        ids = {}
        for name, previous in (("ann", "x"), ("bob", "ann"), ("ann", "ann")):
            guarded.client.headers["authorization"] = f"Bearer key-of-{name}-0123456789"
            start = [{"role": "user", "content": ASK}]
            answer, given = chat(guarded, start, ids.get(previous, "x"))
            ids[name] = answer["id"]
            expected = {"type": "cache_hit"} if name == previous else unknown
            assert given == expected


def test_a_streamed_chat_says_it_at_the_end(served: LocalServer) -> None:
    first = first_turn(served)
    body = {
        "messages": history(first, ask="How do I sort a tuple?"),
        "max_tokens": 3,
        "prompt_cache_options": {"comparison_response_id": first["id"]},
    }
    last = served.stream(CHAT, body)[-1]
    assert last["choices"] == []
    assert last["prompt_cache_diagnostics"]["reason"] == "input_changed"


@pytest.fixture
def client(served: LocalServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_parses_it_of_responses(client: Any) -> None:
    fields = {"model": "demo", "instructions": SYSTEM, "max_output_tokens": 4}
    first = client.responses.create(**fields, input=ASK)
    options = {"comparison_response_id": first.id}
    second = client.responses.create(
        **fields, input="And a dict?", previous_response_id=first.id, prompt_cache_options=options
    )
    assert second.prompt_cache_diagnostics.type == "cache_hit"
    assert second.prompt_cache_options.comparison_response_id == first.id
    other = {**fields, "instructions": SYSTEM + " And kind."}
    third = client.responses.create(**other, input=ASK, prompt_cache_options=options)
    miss = third.prompt_cache_diagnostics
    assert (miss.type, miss.reason) == ("cache_miss", "input_changed")
    assert miss.comparison_reusable_tokens == first.usage.total_tokens - 1
    assert miss.cache_missed_tokens == third.usage.input_tokens - 1 - miss.detail["position"]
    Response.model_validate(third.to_dict(), strict=False)
    kind = {**other, "instructions": SYSTEM + " And patient."}
    stream = client.responses.create(**kind, input=ASK, prompt_cache_options=options, stream=True)
    *_, last = stream
    assert last.response.prompt_cache_diagnostics.reason == "input_changed"


def events_of(served: LocalServer, body: dict[str, Any]) -> list[dict[str, Any]]:
    with served.client.stream("POST", MESSAGES, json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_anthropic_words(served: LocalServer, runtime: Runtime) -> None:
    body = {"model": "demo", "max_tokens": 4, "system": SYSTEM, "temperature": 0,
            "messages": [{"role": "user", "content": ASK}]}  # fmt: skip
    first = served.post(MESSAGES, {**body, "diagnostics": {"previous_message_id": None}})
    assert first["diagnostics"] is None
    assert "diagnostics" not in served.post(MESSAGES, body)
    asked = {"diagnostics": {"previous_message_id": first["id"]}}
    said = [{"role": "assistant", "content": first["content"]}, NEXT]
    turn = {**body, "messages": [*body["messages"], *said], **asked}
    assert served.post(MESSAGES, turn)["diagnostics"] is None
    tool = {"name": "add", "input_schema": {"type": "object"}}
    edited = [{"role": "user", "content": "How do I sort a tuple?"}]
    size = sum(first["usage"][name] for name in ("input_tokens", "cache_read_input_tokens",
                                                 "output_tokens")) - 1  # fmt: skip
    for kind, fields in (
        ("system_changed", {"system": SYSTEM + " And kind."}),
        ("tools_changed", {"tools": [tool], "tool_choice": {"type": "none"}}),
        ("messages_changed", {"messages": edited}),
    ):
        answer = served.post(MESSAGES, {**body, **fields, **asked})
        reason = answer["diagnostics"]["cache_miss_reason"]
        detail = answer["diagnostics"]["detail"]
        assert reason["type"] == kind
        prompt = answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
        lost = min(size, prompt - 1) - answer["usage"]["cache_read_input_tokens"]
        assert reason["cache_missed_input_tokens"] == detail["tokens_lost"] == lost
    unknown = {"diagnostics": {"previous_message_id": "msg_unknown"}}
    answer = served.post(MESSAGES, {**body, **unknown})
    assert answer["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}
    runtime.flush_cache()
    answer = served.post(MESSAGES, turn)
    assert answer["diagnostics"]["cache_miss_reason"] == {"type": "unavailable"}
    assert answer["diagnostics"]["detail"]["reason"] == "never_seen"
    events = events_of(served, {**body, "messages": edited, **asked})
    begun, last = events[0]["message"], events[-2]
    assert begun["diagnostics"]["cache_miss_reason"]["type"] == "messages_changed"
    assert last["type"] == "message_delta"
    events = events_of(served, turn)
    assert events[0]["message"]["diagnostics"] == {"cache_miss_reason": None}  # not known yet
    assert events[-2]["diagnostics"] is None


def test_records_are_bounded_and_a_tenants_own(runtime: Runtime) -> None:
    completion = runtime.generate("x", progress=False)
    parts = PromptParts.of([], [], None)
    records = PromptRecords(2)
    for number in range(3):
        records.put(f"a{number}", "ann", parts, [completion])
    records.put("b0", "bob/salt", parts, [completion])
    assert len(records) == 3
    assert records.find("ann", "resp_a0") is None
    assert records.find("ann", "resp_a2") is not None
    assert records.find("bob", "msg_b0") is None
    assert records.find("bob/salt", "chatcmpl-b0") is not None
    none = PromptRecords(0)
    none.put("a", "", parts, [completion])
    assert len(none) == 0
