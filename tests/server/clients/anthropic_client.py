"""Anthropic's own client, unchanged. See run.py."""

from __future__ import annotations

import asyncio
import base64
import os
import struct
import zlib
from typing import Any, Literal

import anthropic
import pydantic

URL, TOOLS_URL = os.environ["RADIXSERVE_URL"], os.environ["RADIXSERVE_TOOLS_URL"]
ASK: Any = [{"role": "user", "content": "How do I sort a list?"}]
TOOL: Any = {
    "name": "add",
    "description": "Adds two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def plain(client: anthropic.Anthropic) -> None:
    system: Any = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    count = client.messages.count_tokens(model="demo", messages=ASK, system=system).input_tokens
    first = client.messages.create(model="demo", max_tokens=200, messages=ASK, system=system)
    assert first.content[0].type == "text"
    assert first.stop_reason == "end_turn"
    assert first._request_id
    usage = first.usage
    assert usage.cache_creation_input_tokens + usage.cache_read_input_tokens == count
    assert usage.input_tokens == 0  # all of it is retained
    again: Any = [*ASK, first.to_param(), {"role": "user", "content": "And a dict?"}]
    second = client.messages.create(model="demo", max_tokens=5, messages=again, system=system)
    # All but the end token: nothing came after it.
    assert second.usage.cache_read_input_tokens == count + usage.output_tokens - 1
    print("create, count_tokens:", second.usage.cache_read_input_tokens, "tokens cached")


def diagnosed(client: anthropic.Anthropic) -> None:
    """Why a prompt was not cached, in the client's own types."""
    fields: Any = {"model": "demo", "max_tokens": 5, "system": "Be kind."}
    first = client.messages.create(
        **fields, messages=ASK, diagnostics={"previous_message_id": None}
    )
    assert first.diagnostics is None
    asked: Any = {"diagnostics": {"previous_message_id": first.id}}
    again: Any = [*ASK, first.to_param(), {"role": "user", "content": "And a dict?"}]
    assert client.messages.create(**fields, messages=again, **asked).diagnostics is None
    edited: Any = [{"role": "user", "content": "How do I sort a tuple?"}]
    second = client.messages.create(**fields, messages=edited, **asked)
    assert second.diagnostics is not None
    reason = second.diagnostics.cache_miss_reason
    assert isinstance(reason, anthropic.types.CacheMissMessagesChanged)
    assert reason.cache_missed_input_tokens > 0
    with client.messages.stream(**fields, messages=[*edited, *edited], **asked) as stream:
        final = stream.get_final_message()
    assert final.diagnostics is not None
    assert isinstance(final.diagnostics.cache_miss_reason, anthropic.types.CacheMissMessagesChanged)
    asked = {"diagnostics": {"previous_message_id": "msg_unknown"}}
    unknown = client.messages.create(**fields, messages=ASK, **asked).diagnostics
    assert unknown is not None
    assert isinstance(unknown.cache_miss_reason, anthropic.types.CacheMissPreviousMessageNotFound)
    print("diagnostics:", reason.type, reason.cache_missed_input_tokens, "tokens lost")


def streams(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(
        model="demo", max_tokens=60, messages=ASK, extra_body={"temperature": 0}
    )
    with client.messages.stream(
        model="demo", max_tokens=60, messages=ASK, extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.input_tokens == 1
    assert final.usage.output_tokens == whole.usage.output_tokens
    events = client.messages.create(model="demo", max_tokens=3, messages=ASK, stream=True)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    print("stream:", len(text), "characters")


def parsed(client: anthropic.Anthropic) -> None:
    class City(pydantic.BaseModel):
        name: Literal["Rome", "Oslo"]
        is_big: bool

    answer = client.messages.parse(model="demo", max_tokens=400, messages=ASK, output_format=City)
    assert isinstance(answer.parsed_output, City)
    forced = client.messages.create(
        model="demo", max_tokens=400, messages=ASK,
        tools=[{"name": "city", "input_schema": City.model_json_schema()}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )  # fmt: skip
    (use,) = forced.content
    assert use.type == forced.stop_reason == "tool_use"
    City.model_validate(use.input)
    assert [model.id for model in client.models.list()] == ["demo"]
    print("parse:", answer.parsed_output)


def agent(client: anthropic.Anthropic, *, by_stream: bool) -> None:
    """30 turns: each computes the tool's result and the end of the turn before it."""
    messages: Any = [{"role": "user", "content": f"Add these. {by_stream}"}]
    new, known = [], 0
    for turn in range(30):
        fields: Any = {"model": "demo", "max_tokens": 100, "messages": messages, "tools": [TOOL]}
        if by_stream:
            with client.messages.stream(**fields) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**fields)
        assert answer.stop_reason == "tool_use"
        thinking, text, use = answer.content
        assert thinking.thinking == "The sum is asked for."
        assert text.text == "Let me add them."
        assert use.input == {"a": 2, "b": 3}
        usage = answer.usage
        if turn:
            assert usage.cache_read_input_tokens == known - 1
            new.append(usage.input_tokens)
        known = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
        result = {"type": "tool_result", "tool_use_id": use.id, "content": f"{turn:3}"}
        messages += [answer.to_param(), {"role": "user", "content": [result]}]
    assert len(set(new)) == 1
    print(f"an agent of 30 turns, streams {by_stream}: {new[0]} tokens computed in each,", known)


def runner(client: anthropic.Anthropic) -> None:
    """The client's own loop over tools; a history kept by the server is refused by name."""
    calls = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        calls.append((a, b))
        return str(a + b)

    done = client.beta.messages.tool_runner(
        model="demo", max_tokens=100, messages=ASK, tools=[add], max_iterations=3, thread=False
    ).until_done()
    assert done.stop_reason == "tool_use"
    assert set(calls) == {(2, 3)}
    print("tool_runner:", len(calls), "calls")


def picture(client: anthropic.Anthropic) -> None:
    """As in Anthropic's own example, and in the result of a tool; a second turn reuses it."""
    data = base64.b64encode(png(60, 40)).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    ask: Any = [
        {"role": "user", "content": [image, {"type": "text", "text": "Describe this image."}]}
    ]
    first = client.messages.create(model="demo", max_tokens=4, messages=ask)
    count = client.messages.count_tokens(model="demo", messages=ask).input_tokens
    usage = first.usage
    assert (usage.cache_creation_input_tokens or 0) + usage.input_tokens == count > 16
    again: Any = [*ask, first.to_param(), {"role": "user", "content": "And now?"}]
    second = client.messages.create(model="demo", max_tokens=4, messages=again)
    assert (second.usage.cache_read_input_tokens or 0) >= count
    print("pictures:", second.usage.cache_read_input_tokens, "tokens cached")


def png(width: int, height: int) -> bytes:
    """A picture with a gradient, as a file."""
    rows = b"".join(
        b"\0" + bytes(value for x in range(width) for value in (4 * x, 5 * y, 99))
        for y in range(height)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def errors(client: anthropic.Anthropic) -> None:
    for kind, fields in (
        (anthropic.NotFoundError, {"model": "other"}),
        (anthropic.BadRequestError, {"max_tokens": 0}),
        (anthropic.BadRequestError, {"messages": []}),
        (anthropic.BadRequestError, {"container": "c"}),
    ):
        body: Any = {"model": "demo", "max_tokens": 4, "messages": ASK, **fields}
        found: anthropic.APIStatusError | None = None
        try:
            client.messages.create(**body)
        except kind as error:
            found = error
        assert found is not None, fields
        assert found.type in ("not_found_error", "invalid_request_error"), found
        assert found.request_id
    print("errors have their types")


async def asynchronous() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key="none") as client:

        async def one(number: int) -> str:
            ask: Any = [{"role": "user", "content": f"What is {number}?"}]
            async with client.messages.stream(model="demo", max_tokens=6, messages=ask) as stream:
                return "".join([text async for text in stream.text_stream])

        texts = await asyncio.gather(*map(one, range(8)))
    assert all(texts)
    print("asyncio:", len(texts), "streams")


def main() -> None:
    with anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0) as client:
        plain(client)
        diagnosed(client)
        streams(client)
        parsed(client)
        errors(client)
    with anthropic.Anthropic(base_url=TOOLS_URL, api_key="none", max_retries=0) as client:
        agent(client, by_stream=False)
        agent(client, by_stream=True)
        runner(client)
    url = os.environ["RADIXSERVE_PICTURES_URL"]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        picture(client)
    asyncio.run(asynchronous())


if __name__ == "__main__":
    main()
