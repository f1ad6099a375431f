"""langchain-openai, unchanged: tools, structured output, streams with usage. See run.py."""

from __future__ import annotations

import os
from typing import Any, Literal

from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = os.environ["RADIXSERVE_URL"] + "/v1"
TOOLS_URL = os.environ["RADIXSERVE_TOOLS_URL"] + "/v1"  # thinks, says something and calls `add`
QUESTION = HumanMessage("What is the weather in Rome?")


@tool
def get_weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2]) -> str:
    """Weather of a city"""
    return f"sunny for {days} days in {city}"


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Plan(BaseModel):
    """Where to go"""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


def check_tools(model: Any) -> None:
    """A call, its result, and the answer to it; several turns, each of which finds what was
    computed before it."""
    messages: list[BaseMessage] = [QUESTION]
    for choice in ("get_weather", "any", "required"):
        caller = model.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False)
        message = caller.invoke(messages)
        assert message.response_metadata["finish_reason"] == "tool_calls"
        assert not message.invalid_tool_calls
        (call,) = message.tool_calls
        result = get_weather.invoke(call)
        assert "sunny" in result.content
        messages += [message, result]
    found = model.bind_tools([get_weather], tool_choice="none").invoke(messages)
    assert not found.tool_calls
    assert found.usage_metadata["input_token_details"]["cache_read"] > 0


def check_streamed_calls(model: Any) -> None:
    caller = model.bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False)
    whole: Any = None
    for chunk in caller.stream([QUESTION]):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    assert call["args"]["city"] in ("Rome", "Oslo")
    assert whole.usage_metadata["output_tokens"] > 5


def check_calls_of_the_model(model: Any) -> None:  # noqa: ARG001
    """A model that calls of its own accord, for 10 turns, whole and streamed."""
    caller = ChatOpenAI(model="demo", base_url=TOOLS_URL, api_key="none").bind_tools([add])
    messages: list[BaseMessage] = [HumanMessage("Add these.")]
    for turn in range(10):
        message = caller.invoke(messages)
        if turn % 2:
            *chunks, last = caller.stream(messages)
            for chunk in reversed(chunks):
                last = chunk + last
            assert last.tool_calls[0]["args"] == message.tool_calls[0]["args"]
            assert last.content == message.content
        assert message.content == "Let me add them."
        (call,) = message.tool_calls
        assert (call["name"], call["args"]) == ("add", {"a": 2, "b": 3})
        messages += [message, add.invoke(call)]


def check_streamed_text(model: Any) -> None:
    """Usage comes although this client does not ask for it at an address of its own."""
    whole: Any = None
    for chunk in model.stream([QUESTION], max_tokens=20):
        whole = chunk if whole is None else whole + chunk
    plain = model.invoke([QUESTION], max_tokens=20)
    assert whole.content == plain.content
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert whole.usage_metadata[name] == plain.usage_metadata[name] > 0
    assert whole.usage_metadata["input_token_details"]["cache_read"] > 0


def check_structured_output(model: Any) -> None:
    for method in ("function_calling", "json_schema"):
        found = model.with_structured_output(Plan, method=method).invoke([QUESTION])
        assert isinstance(found, Plan), (method, found)


def main() -> None:
    model = ChatOpenAI(model="demo", base_url=URL, api_key="none", temperature=0, max_tokens=1_000)
    for check in (
        check_tools,
        check_calls_of_the_model,
        check_streamed_calls,
        check_streamed_text,
        check_structured_output,
    ):
        check(model)
        print(f"langchain-openai: {check.__name__.removeprefix('check_')}")


if __name__ == "__main__":
    main()
