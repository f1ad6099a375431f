"""Thoughts as reasoning_content: out, and back in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
pytest.importorskip("llguidance", reason="answers are forced by the extra [grammar]")

from radixserve import Runtime
from tests.server.local_server import LocalServer
from tests.server.tool_models import make_model

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Now?"}
NOW = {"type": "function", "function": {"name": "now"}}
THOUGHT = "<think>\nLet me  see.\n</think>\n\n"
CALL = '<tool_call>\n{"name":"now","arguments":{}}</tool_call>'
SOON = "It is late."


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: Any) -> Iterator[Runtime]:
    """Its template tells thoughts again after the last question only."""
    folder = make_model(tmp_path_factory.mktemp("qwen3"), "qwen3")
    with Runtime(str(folder), num_pages=2048) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def thinking(thinker: Runtime) -> Iterator[LocalServer]:
    with LocalServer(thinker) as served:
        yield served


def ask(served: LocalServer, messages: list[Any], text: str | None = None, **fields: Any) -> Any:
    """`text`: what the model has to say."""
    body = {"messages": messages, "tools": [NOW], "max_tokens": 200, "return_token_ids": True,
            "cache_salt": "think", **fields}  # fmt: skip
    if text is not None:
        body["structured_outputs"] = {"grammar": f"start: {json.dumps(text)}"}
    return served.post(CHAT, body)


def said(answer: Any) -> dict[str, Any]:
    message: dict[str, Any] = answer["choices"][0]["message"]
    return message


def test_a_thought_and_a_call(thinking: LocalServer, thinker: Runtime) -> None:
    answer = ask(thinking, [USER], THOUGHT + CALL)
    message = said(answer)
    assert message["reasoning_content"] == "Let me  see."
    assert message["content"] is None
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    ids = answer["choices"][0]["token_ids"]
    known = [*answer["prompt_token_ids"], *ids[: -1 if ids[-1] in (2, 6) else None]]
    # With the thought the history is what was generated.
    follow = ask(thinking, [USER, message, result], THOUGHT + SOON)
    assert follow["prompt_token_ids"][: len(known)] == known
    cached = follow["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == len(answer["prompt_token_ids"]) + len(ids) - 1
    thought = {"reasoning": "Let me  see.", "reasoning_content": "Let me  see."}
    assert said(follow) == {"role": "assistant", "content": SOON, "refusal": None, **thought}
    # Without it, and after another question, the template tells it without the thought.
    without = {name: value for name, value in message.items() if "reasoning" not in name}
    for messages in (
        [USER, without, result],
        [USER, message, result, said(follow), {"role": "user", "content": "And?"}],
    ):
        found = ask(thinking, messages, max_tokens=1)
        assert found["prompt_token_ids"] == as_it_is(thinker, messages)


def as_it_is(runtime: Runtime, messages: list[Any]) -> list[int]:
    """The ids of the template's own text."""
    assert runtime.tokenizer is not None
    plain = json.loads(json.dumps(messages))
    for message in plain:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return runtime.tokenizer.encode_more(runtime.tokenizer.render_chat(plain, tools=[NOW]))


def test_a_streamed_thought(thinking: LocalServer) -> None:
    grammar = {"grammar": f"start: {json.dumps(THOUGHT + SOON)}"}
    events = thinking.stream(CHAT, {"messages": [USER], "structured_outputs": grammar})
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Let me  see."
    assert "".join(delta.get("content") or "" for delta in deltas) == SOON
    assert len([delta for delta in deltas if delta.get("reasoning_content")]) > 1


def test_all_switches_of_thinking_reach_the_template(thinking: LocalServer) -> None:
    def prompt(**fields: Any) -> Any:
        return ask(thinking, [USER], max_tokens=1, tools=None, **fields)["prompt_token_ids"]

    off = prompt(chat_template_kwargs={"enable_thinking": False})
    assert off != prompt()
    for fields in (
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"reasoning_effort": "none"},
        {"enable_thinking": False, "reasoning": {"effort": "high"}},  # the nearest switch counts
    ):
        assert prompt(**fields) == off, fields
    for fields in (
        {"enable_thinking": True},
        {"thinking": {"type": "enabled", "budget_tokens": 64}},
        {"reasoning": {"effort": "high", "max_tokens": 64}},
        {"enable_thinking": True, "thinking": {"type": "disabled"}},
        {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
    ):
        assert prompt(**fields) == prompt(), fields
    for fields in ({"enable_thinking": False}, {"thinking": {"type": "disabled"}}):
        body = {"input": "Now?", "max_output_tokens": 1, **fields}
        used = thinking.post("/v1/responses", body)["usage"]["input_tokens"]
        assert used == len(off)
    body = {"messages": [USER], "reasoning_effort": "low", "reasoning": {"effort": "high"}}
    error = thinking.client.post(CHAT, json=body).json()["error"]
    assert error["message"] == "reasoning_effort and reasoning.effort differ: give one"


def test_the_parser_can_be_turned_off(thinker: Runtime) -> None:
    with LocalServer(thinker, reasoning_parser="none", tool_call_parser="llama3") as served:
        message = said(ask(served, [USER], THOUGHT + CALL))
        assert message == {"role": "assistant", "content": THOUGHT + CALL, "refusal": None}


def test_a_thought_that_the_prompt_opens(tmp_path_factory: Any) -> None:
    folder = make_model(tmp_path_factory.mktemp("thinking"), "thinking")
    with Runtime(str(folder), num_pages=512) as runtime, LocalServer(runtime) as served:
        answer = ask(served, [USER], max_tokens=6, temperature=0, ignore_eos=True)
        assert said(answer)["content"] is None
        assert said(answer)["reasoning_content"]
        # An answer of a given form begins at once.
        assert said(ask(served, [USER], SOON))["content"] == SOON
        # A forced call comes after the thought.
        forced = ask(served, [USER], max_tokens=6, tool_choice="required", temperature=0,
                     ignore_eos=True)  # fmt: skip
        assert said(forced) == said(answer)


GEMMA4_CALL = '"<|tool_call>call:now{}<tool_call|>"'
FORMS = {  # a thought as a grammar, a call after it, and the bias with which a thought ends
    "gemma4-thinking": ('<[0]> "thought\\nLet me  see.\\n" <[3]>', GEMMA4_CALL, 7),
    "ministral": ('<[0]> "Let me  see." <[3]>', '"[TOOL_CALLS]now[ARGS]{ }"', 6),
}


@pytest.mark.parametrize("family", sorted(FORMS))
def test_thoughts_between_other_marks(tmp_path_factory: Any, family: str) -> None:
    """They go out as reasoning and come back into the prompt; a forced call comes after one."""
    folder = make_model(tmp_path_factory.mktemp(family), family)
    thought, call, bias = FORMS[family]
    with Runtime(str(folder), num_pages=512) as runtime, LocalServer(runtime) as served:
        form = {"structured_outputs": {"grammar": f"start: {thought} {call}"}}
        answer = ask(served, [USER], **form)
        message = said(answer)
        assert (message["reasoning_content"], message["content"]) == ("Let me  see.", None)
        (made,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": made["id"], "content": "5"}
        follow = ask(served, [USER, message, result], max_tokens=1)
        ids = answer["choices"][0]["token_ids"]
        cached = follow["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == len(answer["prompt_token_ids"]) + len(ids) - 1
        # Rendered by the template, too, the thought stands between its marks.
        other = ask(served, [USER, message, result], max_tokens=1, cache_salt="another")
        assert runtime.tokenizer is not None
        text = runtime.tokenizer.decode(other["prompt_token_ids"], keep_special=True)
        marks = ("<|channel>thought", "<channel|>") if "gemma" in family else ("[THINK]",)
        assert all(mark in text for mark in marks)
        assert {0, 3} <= set(other["prompt_token_ids"])
        forced = ask(served, [USER], tool_choice="required", parallel_tool_calls=False, seed=1,
                     logit_bias={"0": 100, "3": bias}, max_tokens=500)  # fmt: skip
        assert said(forced)["tool_calls"][0]["function"]["name"] == "now"
        assert said(forced)["reasoning_content"]
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
        held = ask(served, [USER], response_format=schema, tools=None, seed=1,
                   logit_bias={"0": 100, "3": bias}, max_tokens=500)  # fmt: skip
        assert said(held)["content"].strip() == "1"
        assert held["choices"][0]["token_ids"][0] == 0


def test_forms_of_text_begin_after_the_thought(tmp_path_factory: Any) -> None:
    folder = make_model(tmp_path_factory.mktemp("ministral"), "ministral")
    with Runtime(str(folder), num_pages=512) as runtime, LocalServer(runtime) as served:
        for form in ({"regex": r"[0-9]{2}/\/[a-z]"}, {"choice": ["the first", "the second"]}):
            answer = ask(served, [USER], tools=None, structured_outputs=form, seed=1,
                         logit_bias={"0": 100, "3": 12}, max_tokens=500)  # fmt: skip
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "stop"
            assert choice["token_ids"][0] == 0  # it opens a thought
            assert 3 in choice["token_ids"]  # and closes it
            content = choice["message"]["content"]
            if "choice" in form:
                assert content in form["choice"]
            else:
                assert re.fullmatch(r"[0-9]{2}//[a-z]", content)


def test_a_forced_call_that_is_cut_shows_no_mark(thinking: LocalServer) -> None:
    named = {"type": "function", "function": {"name": "now"}}
    for choice in ("required", named):
        body = {"messages": [USER], "tools": [NOW], "tool_choice": choice, "temperature": 0}
        for limit in range(1, 9):
            answer = thinking.post(CHAT, {**body, "max_tokens": limit})
            events = thinking.stream(CHAT, {**body, "max_tokens": limit})
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            assert not said(answer)["content"]
            assert not any(delta.get("content") for delta in deltas)
