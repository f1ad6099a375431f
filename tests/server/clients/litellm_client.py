"""LiteLLM, unchanged: chats, tools, streams with usage, responses, completions. See run.py."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks GitHub for one
import litellm

URL = os.environ["RADIXSERVE_URL"] + "/v1"
TOOLS_URL = os.environ["RADIXSERVE_TOOLS_URL"] + "/v1"  # thinks, says something and calls `add`
ASK = [{"role": "user", "content": "How do I sort a list?"}]
TO: dict[str, Any] = {"model": "openai/demo", "api_base": URL, "api_key": "none"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


def check_chats() -> None:
    """The second turn finds all of the first one but the token that ended it."""
    fields = {"temperature": 0, "max_tokens": 20, "user": "me", "seed": 1}
    first = litellm.completion(**TO, messages=ASK, **fields)
    messages = [*ASK, first.choices[0].message.model_dump(), {"role": "user", "content": "Why?"}]
    second = litellm.completion(**TO, messages=messages, **fields)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.total_tokens - 1, (cached, first.usage)
    print(f"chats: {second.usage.prompt_tokens} tokens of the second prompt, {cached} cached")


def check_streams() -> None:
    whole = litellm.completion(**TO, messages=ASK, temperature=0)
    chunks = list(
        litellm.completion(
            **TO, messages=ASK, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    built = litellm.stream_chunk_builder(chunks, messages=ASK)
    assert built is not None
    assert built.choices[0].message.content == whole.choices[0].message.content
    assert built.usage.completion_tokens == whole.usage.completion_tokens
    print(f"streams: {len(chunks)} chunks")


def check_tools() -> None:
    """A loop of calls; the model thinks before each."""
    to = {**TO, "api_base": TOOLS_URL}
    messages: list[Any] = [*ASK]
    known = 0
    for turn in range(5):
        answer = litellm.completion(
            **to, messages=messages, tools=[ADD], parallel_tool_calls=True, tool_choice="auto"
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
        assert message.reasoning_content == "The sum is asked for."
        if turn:
            assert answer.usage.prompt_tokens_details.cached_tokens >= known - 1
        known = answer.usage.total_tokens
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": f"{turn:3}"}]
    print(f"tools: 5 turns, {known} tokens")


def check_schemas() -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
              "required": ["city"], "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = litellm.completion(**TO, messages=ASK, response_format=form)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Rome", "Oslo")
    print("schemas: one")


def check_others() -> None:
    """/v1/responses and /v1/completions; and an error that clients know."""
    answer = litellm.responses(**TO, input="How do I sort a list?", max_output_tokens=20)
    assert answer.usage.output_tokens <= 20
    text = litellm.text_completion(
        model="text-completion-openai/demo", api_base=URL, api_key="none", prompt="The json",
        max_tokens=5,
    )  # fmt: skip
    assert text.usage.completion_tokens <= 5
    try:
        litellm.completion(**TO, messages=[{"role": "user", "content": "word " * 60_000}])
    except litellm.ContextWindowExceededError:
        print("others: responses, completions, an overflow")
    else:
        raise AssertionError("the overflow was not recognised")


async def check_asyncio() -> None:
    answers = await asyncio.gather(
        *(litellm.acompletion(**TO, messages=ASK, max_tokens=5) for _ in range(8))
    )
    assert all(answer.usage.completion_tokens <= 5 for answer in answers)
    print("asyncio: 8 chats")


if __name__ == "__main__":
    check_chats()
    check_streams()
    check_tools()
    check_schemas()
    check_others()
    asyncio.run(check_asyncio())
