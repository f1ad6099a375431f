"""OpenAI's /v1/responses through its own client, and the store that it goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
openai = pytest.importorskip("openai", reason="pip install openai==3.54.0")

from radixserve import Runtime  # noqa: E402
from radixserve.server.answer.content_blocks import ContentBlocks  # noqa: E402
from radixserve.server.answer.output_parser import Delta, ToolCallDelta  # noqa: E402
from radixserve.server.answer.tool_parsers.base import Thought  # noqa: E402
from radixserve.server.gate.response_store import ResponseStore, StoredResponse  # noqa: E402
from radixserve.server.gate.tenants import Tenants  # noqa: E402
from tests.server.local_server import LocalServer  # noqa: E402

R = "/v1/responses"
ASK = "How do I sort a list?"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


def client_of(served: LocalServer, key: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


def test_an_answer(served: LocalServer) -> None:
    with client_of(served) as client:
        answer = client.responses.create(
            model="demo", input=ASK, instructions="Be short.", max_output_tokens=300, temperature=0,
            metadata={"a": "b"}, user="me", extra_body={"cache_salt": "an answer"},
        )  # fmt: skip
    assert answer.output_text.startswith("Call the")
    assert answer.status == "completed"
    assert answer.error is answer.incomplete_details is None
    assert answer.metadata == {"a": "b"}
    usage = answer.usage
    assert usage.input_tokens_details.cached_tokens == 0
    assert usage.output_tokens_details.reasoning_tokens == 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": ASK}]
    chat = served.post("/v1/chat/completions", {"messages": messages, "temperature": 0})
    assert chat["choices"][0]["message"]["content"] == answer.output_text


def test_sampling_fields_mean_what_they_mean_in_a_chat(served: LocalServer) -> None:
    fields = {
        "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "seed": 7, "min_tokens": 4,
        "logit_bias": {"300": -5}, "bad_words": ["list"], "stop": ["\n\n"], "ignore_eos": True,
    }  # fmt: skip
    response = served.post(R, {"input": ASK, "max_output_tokens": 30, **fields})
    messages = [{"role": "user", "content": ASK}]
    chat = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 30, **fields})
    (item,) = response["output"]
    assert item["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert response["usage"]["output_tokens"] == chat["usage"]["completion_tokens"] >= 4
    plain = served.post(R, {"input": ASK, "max_output_tokens": 30, "temperature": 0})
    assert plain["output"][0]["content"][0]["text"] != item["content"][0]["text"]


def test_the_events_of_a_stream(calling: LocalServer) -> None:
    """Each in its place, numbered; what they add up to is the whole answer."""
    kinds = []
    with client_of(calling) as client:
        with client.responses.stream(model="demo", input=ASK, tools=[TOOL]) as stream:
            for number, event in enumerate(stream):
                kinds.append(event.type.removeprefix("response."))
                assert event.sequence_number == number
            final = stream.get_final_response()
        whole = client.responses.create(model="demo", input=ASK, tools=[TOOL])
        stored = client.responses.retrieve(final.id)
    text, reasoning = "output_text", "reasoning_text"
    assert [kind for at, kind in enumerate(kinds) if not at or kinds[at - 1] != kind] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", f"{reasoning}.delta", f"{reasoning}.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", f"{text}.delta", f"{text}.done",
        "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert [item.id for item in stored.output] == [item.id for item in final.output]
    assert final.output_text == whole.output_text == "Let me add them."
    assert json.loads(final.output[2].arguments) == {"a": 2, "b": 3}
    assert final.output[2].arguments == whole.output[2].arguments
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.usage.output_tokens_details.reasoning_tokens == 3


def test_an_answer_that_is_cut(served: LocalServer) -> None:
    with client_of(served) as client:
        stream = client.responses.create(model="demo", input=ASK, max_output_tokens=3, stream=True)
        events = list(stream)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    assert events[-2].item.status == events[-1].response.status == "incomplete"


def test_a_form_and_forced_calls(served: LocalServer) -> None:
    pytest.importorskip("llguidance", reason="forms need the extra [grammar]")
    pydantic = pytest.importorskip("pydantic")

    class City(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        name: Literal["Rome", "Oslo"]
        is_big: bool

    schema = openai.pydantic_function_tool(City)["function"]["parameters"]
    tool = {"type": "function", "name": "city", "parameters": schema, "strict": True}
    fields: dict[str, Any] = {"model": "demo", "input": ASK, "max_output_tokens": 400}
    with client_of(served) as client:
        answer = client.responses.parse(text_format=City, **fields)
        assert isinstance(answer.output_parsed, City)
        with client.responses.stream(text_format=City, **fields) as stream:
            assert isinstance(stream.get_final_response().output_parsed, City)
        as_json = client.responses.create(text={"format": {"type": "json_object"}}, **fields)
        assert as_json.text.format.type == "json_object"
        assert as_json.status == "incomplete" or isinstance(json.loads(as_json.output_text), dict)
        for choice in ("required", {"type": "function", "name": "city"}):
            fields |= {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
            found = client.responses.create(**fields)
            (call,) = found.output
            City.model_validate_json(call.arguments, strict=True)
            assert (call.name, call.status) == ("city", "completed")


def test_a_stream_that_fails(talking: LocalServer) -> None:
    """Its last event is a response that has failed."""
    lines = talking.break_stream(R, {"input": ASK})
    assert lines[-2] == "event: response.failed"
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["sequence_number"] == len(lines) / 2 - 1
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "it broke"}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("stores", [False, True])
def test_an_agent_of_30_turns_computes_only_what_is_new(
    calling: LocalServer, streams: bool, stores: bool
) -> None:
    """By previous_response_id, and by sending all items back."""
    items: list[Any] = [{"role": "user", "content": ASK}]
    previous: str | None = None
    known, new_tokens = 0, set()
    for turn in range(30):
        body = {"input": items, "tools": [TOOL], "store": stores, "temperature": 0,
                "cache_salt": f"agent {streams} {stores}"}  # fmt: skip
        if previous is not None:
            body["previous_response_id"] = previous
        answer = last_of(calling, body) if streams else calling.post(R, body)
        usage, output = answer["usage"], answer["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        # All but the last token that was sampled, after which nothing came.
        assert cached == max(0, known - 1)
        if turn:
            new_tokens.add(usage["input_tokens"] - cached)
        known = usage["total_tokens"]
        result = {"type": "function_call_output", "call_id": output[-1]["call_id"],
                  "output": f"{turn:3}"}  # fmt: skip
        if stores:
            items, previous = [result], answer["id"]
        else:
            items = [*items, *output, result]
    assert len(new_tokens) == 1  # the same in each turn: the end token and the result


def last_of(served: LocalServer, body: dict[str, Any]) -> Any:
    """The response in the last event of a stream."""
    with served.client.stream("POST", R, json={**body, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    return json.loads(lines[-1].removeprefix("data: "))["response"]


def test_stored_responses_are_read_and_deleted(served: LocalServer) -> None:
    with client_of(served) as client:
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                {"role": "user", "content": [{"type": "input_text", "text": "c"}]}]  # fmt: skip
        answer = client.responses.create(model="demo", input=said, max_output_tokens=2)
        assert client.responses.retrieve(answer.id).output_text == answer.output_text
        listed = list(client.responses.input_items.list(answer.id, order="asc", limit=2))
        assert [item.content[0].text for item in listed] == ["a", "b", "c"]  # two pages
        newest = client.responses.input_items.list(answer.id, limit=1)
        assert newest.has_more
        assert newest.data[0].content[0].text == "c"
        more = {"model": "demo", "input": "d", "max_output_tokens": 2}
        second = client.responses.create(previous_response_id=answer.id, **more)
        client.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError, match="no response"):
            client.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError, match="is not stored here"):
            client.responses.create(previous_response_id=answer.id, **more)
        # What goes on from it keeps what was said.
        client.responses.create(previous_response_id=second.id, **more)
        kept = client.responses.create(store=False, **more)
        assert kept.store is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(kept.id)


def test_instructions_are_of_one_response_alone(served: LocalServer) -> None:
    first = served.post(R, {"input": "a", "instructions": "Be short.", "max_output_tokens": 2})
    more = {"input": "b", "max_output_tokens": 1, "previous_response_id": first["id"]}
    without = served.post(R, more)["usage"]["input_tokens"]
    with_them = served.post(R, {**more, "instructions": "Be short."})["usage"]["input_tokens"]
    assert with_them > without


def test_the_store_is_bounded_and_each_tenants_own() -> None:
    store = ResponseStore(3, 1_000)

    def put(tenant: str, name: str, num_bytes: int = 10) -> None:
        store.put(tenant, StoredResponse(name, tenant, "{}", (), (), 0, num_bytes))

    for name in "abc":
        put("ann", name)
        put("bob", name + name)
    assert store.find("ann", "ann", "a") is not None  # b is the least recently used one now
    put("ann", "d")
    assert store.find("ann", "ann", "b") is None
    assert all(store.find("ann", "ann", name) is not None for name in "acd")
    assert all(store.find("bob", "bob", name) is not None for name in ("aa", "bb", "cc"))
    put("ann", "large", 985)
    assert [store.find("ann", "ann", name) is not None for name in "acd"] == [False, False, True]
    put("ann", "too large", 1_001)
    assert store.find("ann", "ann", "too large") is None
    assert store.find("ann", "ann", "large") is not None
    assert store.find("bob", "bob", "large") is None
    assert store.find("ann", "ann/salt", "large") is None
    assert not store.delete("bob", "bob", "large")
    assert store.delete("ann", "ann", "large")
    assert (len(store), store.num_bytes) == (4, 40)
    assert not ResponseStore(0, 10).keeps


def test_tenants_share_nothing(runtime: Runtime, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ann key-of-ann-0123456789\nbob key-of-bob-0123456789\n")
    path.chmod(0o600)
    with LocalServer(runtime, Tenants.load(str(path))) as served:
        clients = {name: client_of(served, f"key-of-{name}-0123456789") for name in ("ann", "bob")}
        body: dict[str, Any] = {"model": "demo", "input": "A secret", "max_output_tokens": 2}
        for mine, other in (("ann", "bob"), ("bob", "ann")):
            answer = clients[mine].responses.create(**body)
            theirs = clients[other].responses
            with pytest.raises(openai.BadRequestError, match="is not stored here"):
                theirs.create(previous_response_id=answer.id, **body)
            for call in (theirs.retrieve, theirs.delete, theirs.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    call(answer.id)
            assert clients[mine].responses.retrieve(answer.id).id == answer.id
            salted = {"extra_body": {"cache_salt": "s"}}
            with pytest.raises(openai.BadRequestError, match="is not stored here"):
                clients[mine].responses.create(previous_response_id=answer.id, **body, **salted)
        assert served.client.get(f"{R}/{answer.id}").status_code == 401
        assert served.client.delete(f"{R}/{answer.id}").status_code == 401
        for client in clients.values():
            client.close()


def test_the_parts_of_an_answer() -> None:
    """Text may go on after a call: it is a part of its own then."""
    call = ToolCallDelta(0, "c", "f", "{}")
    parts = ContentBlocks()
    events = []
    for delta in (Delta((Thought("r"),)), Delta(("a",)), Delta(("b", call, "c")), Delta(("d",))):
        events += [(kind, part.index, piece) for kind, part, piece in parts.push(delta)]
    events += [(kind, part.index, piece) for kind, part, piece in parts.finish()]
    assert events == [
        ("start", 0, ""), ("delta", 0, "r"), ("stop", 0, ""),
        ("start", 1, ""), ("delta", 1, "a"), ("delta", 1, "b"), ("stop", 1, ""),
        ("start", 2, ""), ("delta", 2, "{}"), ("stop", 2, ""),
        ("start", 3, ""), ("delta", 3, "c"), ("delta", 3, "d"), ("stop", 3, ""),
    ]  # fmt: skip
    assert [part.text for part in parts.blocks] == ["r", "ab", "{}", "cd"]
