"""Tools over chat, in the form of each family of models: calls, streams, and what is cached."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
pytest.importorskip("llguidance", reason="calls are forced by the extra [grammar]")

from radixserve import Runtime
from tests.server.local_server import LocalServer
from tests.server.tool_models import make_model

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "What is the weather in Rome?"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ENDS = (2, 6)  # tokens
BIAS: dict[str, float] = {}  # of the style that is tested
ONE_CALL = ("llama3", "harmony")  # styles whose turns hold one call
STYLES = ["hermes", "llama3", "mistral", "mistral-args", "granite", "granite33", "deepseek-v3",
          "deepseek-v3.1", "deepseek-v3.2", "kimi", "qwen3-coder", "minimax", "glm", "gemma4",
          "function-gemma", "lfm2", "olmo3", "nemotron", "hunyuan", "command-r", "command-r7b",
          "harmony", "generic"]  # fmt: skip


@pytest.fixture(scope="module", params=STYLES)
def model(request: Any, tmp_path_factory: Any) -> Iterator[tuple[str, Runtime]]:
    style = request.param
    folder = make_model(tmp_path_factory.mktemp(style), style)
    with Runtime(str(folder), num_pages=4096, max_running_requests=8) as runtime:
        yield style, runtime


@pytest.fixture(scope="module")
def style(model: Any) -> str:
    return str(model[0])


@pytest.fixture(scope="module")
def served(model: Any) -> Iterator[LocalServer]:
    with LocalServer(model[1]) as served:
        BIAS.clear()
        if model[0] == "harmony":
            BIAS["5"] = 12.0  # the end of a thought, which nothing else bounds
        yield served


def ask(served: LocalServer, messages: list[Any], **fields: Any) -> Any:
    body = {"messages": messages, "tools": [WEATHER, NOW], "max_tokens": 400,
            "return_token_ids": True, "logit_bias": BIAS, **fields}  # fmt: skip
    return served.post(CHAT, body)


def calls_of(answer: Any) -> list[Any]:
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "tool_calls", choice
    message = choice["message"]
    assert message["content"] is None
    calls: list[Any] = message["tool_calls"]
    for call in calls:
        check_arguments(call["function"])
    return calls


def check_arguments(function: Any) -> None:
    found = json.loads(function["arguments"])
    if function["name"] == "now":
        assert found == {}
    else:
        assert function["name"] == "get_weather"
        assert found["city"] in ("Rome", "Oslo")
        assert found["days"] in (1, 2)
        assert len(found) == 2


def results(calls: list[Any]) -> list[Any]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in calls]


def test_required(served: LocalServer, style: str) -> None:
    calls = calls_of(ask(served, [USER], tool_choice="required", parallel_tool_calls=False, seed=1))
    assert len(calls) == 1
    if style == "kimi":  # as the model wrote it
        assert calls[0]["id"].startswith(f"functions.{calls[0]['function']['name']}:")
    else:
        assert len(calls[0]["id"]) == (9 if "mistral" in style else 29)


def test_named(served: LocalServer) -> None:
    for name in ("now", "get_weather"):
        choice = {"type": "function", "function": {"name": name}}
        (call,) = calls_of(ask(served, [USER], tool_choice=choice, temperature=2.0, seed=3))
        assert call["function"]["name"] == name


def test_none_and_auto_leave_the_prompt_as_it_is(served: LocalServer) -> None:
    """So that both find the same in the cache."""
    first = ask(served, [USER], max_tokens=2, temperature=0)
    second = ask(served, [USER], tool_choice="none", max_tokens=2, temperature=0)
    assert first["prompt_token_ids"] == second["prompt_token_ids"]
    assert first["choices"][0]["message"] == second["choices"][0]["message"]


def test_results_meet_the_cache_where_the_call_ended(served: LocalServer, style: str) -> None:
    """A loop of an agent: each turn finds all that was computed before it, and computes only what
    is new: the end of the turn, the results, and where the answer begins."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, USER]
    known: list[int] = []
    computed = 0
    for number in range(30 if style == "hermes" else 4):
        answer = ask(
            served, messages, tool_choice="required", seed=number, cache_salt="loop",
            parallel_tool_calls=number == 1 and style not in ONE_CALL, max_tokens=2_500,
            temperature=1.2, stream=False,
        )  # fmt: skip
        assert answer["prompt_token_ids"][: len(known)] == known
        assert cached_of(answer) == computed
        ids = answer["choices"][0]["token_ids"]
        known = [*answer["prompt_token_ids"], *(ids[:-1] if ids[-1] in ENDS else ids)]
        computed = len(answer["prompt_token_ids"]) + len(ids) - 1  # all but the last one sampled
        calls = calls_of(answer)
        assert len(calls) == 1 or number == 1
        messages += [answer["choices"][0]["message"], *results(calls)]


def cached_of(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


CALL = '"name":"get_weather",  "%s":{"city":"Rome","days":1}'
DS = "<｜tool▁"
FRAMED = 'get_weather%s{"city":"Rome","days":1}'
IN_BLOCK = FRAMED % "\n```json\n"


def _v32(text: str) -> str:
    """A grammar of the text, with DeepSeek's token in place of each bar."""
    return " <[0]> ".join(map(json.dumps, text.split("|")))


AUTO = {  # an answer as a grammar, in ways that the templates would not write
    "hermes": json.dumps("So:<tool_call>{%s}</tool_call>" % (CALL % "arguments")),
    "llama3": json.dumps("{%s}" % (CALL % "parameters")),
    "mistral": '"So:" <[0]> ' + json.dumps("[{%s}]" % (CALL % "arguments")),
    "mistral-args": '"So:" <[0]> "get_weather" <[3]> ' + json.dumps('{"city":"Rome","days":1}'),
    "granite": json.dumps("So: <|tool_call|>  [{%s}]" % (CALL % "arguments")),
    "granite33": '"So:" <[0]> ' + json.dumps("[{%s}]" % (CALL % "arguments")),
    "deepseek-v3": json.dumps(
        f"So:{DS}calls▁begin｜>{DS}call▁begin｜>function{DS}sep｜>{IN_BLOCK}\n```"
        f"{DS}call▁end｜>{DS}calls▁end｜>"
    ),
    "deepseek-v3.1": json.dumps(f"So:{DS}calls▁begin｜>") + " <[0]> " + json.dumps(
        f"{FRAMED % (DS + 'sep｜>')}{DS}call▁end｜>{DS}calls▁end｜>"
    ),
    "kimi": '"So:" <[0]> ' + json.dumps(
        f"<|tool_call_begin|>functions.{FRAMED % ':0<|tool_call_argument_begin|>'}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "qwen3-coder": json.dumps(
        "So:<tool_call><function=get_weather><parameter=city>Rome</parameter>"
        "<parameter=days>1</parameter></function></tool_call>"
    ),
    "glm": json.dumps(
        "So:<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
        "<arg_key>days</arg_key><arg_value> 1</arg_value></tool_call>"
    ),
    "gemma4": json.dumps("So:<|tool_call>call:get_weather{days: 1, city:") + " <[0]> "
    + '"Rome" <[0]> ' + json.dumps("}<tool_call|>"),
    "function-gemma": json.dumps(
        "So:<start_function_call>call:get_weather{days: 1, city:<escape>Rome<escape>}"
        "<end_function_call>"
    ),
    "lfm2": '"So:" <[0]> ' + json.dumps('[ get_weather(days = 1,city="Rome") ]') + " <[3]>",
    "olmo3": json.dumps(
        "So:<function_calls>get_weather(days = 1, city=\"Rome\")</function_calls>"
    ),
    "deepseek-v3.2": _v32(
        'So:<|function_calls><|invoke name="get_weather"><|parameter name="city" string="true">'
        'Rome</|parameter><|parameter name="days">1</|parameter></|invoke></|function_calls>'
    ),
    "minimax": '"So:" <[0]> ' + json.dumps(
        '<invoke name="get_weather"><parameter name="city">Rome</parameter>'
        '<parameter name="days">1</parameter></invoke>'
    ) + " <[3]>",
    "nemotron": json.dumps("So: <TOOLCALL> [{%s} ] </TOOLCALL>" % (CALL % "arguments")),
    "hunyuan": json.dumps("So: <tool_calls> [{%s} ] </tool_calls>" % (CALL % "arguments")),
    "command-r": json.dumps("So: Action: ```json {%s} ```" % (CALL % "parameters")),
    "command-r7b": '"So:" <[0]> ' + json.dumps("[{%s}]" % (CALL % "parameters")) + " <[3]>",
    "harmony": '<[3]> "analysis" <[4]> "So it is" <[5]> <[0]> "assistant" <[3]> '
    '"commentary to=functions.get_weather <|constrain|>json" <[4]> '
    + json.dumps('{"city":"Rome",  "days":1}'),
    "generic": json.dumps("So:<tool_call>{%s}</tool_call>" % (CALL % "arguments")),
}  # fmt: skip


def test_auto_reads_the_form_of_the_model(served: LocalServer, style: str) -> None:
    form = {"structured_outputs": {"grammar": f"start: {AUTO[style]}"}, "cache_salt": "auto"}
    answer = ask(served, [USER], **form)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == (None if style in ONE_CALL else "So:")
    assert message.get("reasoning_content") == ("So it is" if style == "harmony" else None)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "days": 1}
    # The ids that were generated are gone on from, not what the template makes of the call.
    follow = ask(served, [USER, message, *results([call])], max_tokens=1, cache_salt="auto")
    ids = choice["token_ids"]
    known = [*answer["prompt_token_ids"], *(ids[:-1] if ids[-1] in ENDS else ids)]
    assert follow["prompt_token_ids"][: len(known)] == known
    assert cached_of(follow) == len(answer["prompt_token_ids"]) + len(ids) - 1
    # An edited call is rendered and tokenised as it is.
    edited = json.loads(json.dumps(message))
    edited["tool_calls"][0]["function"]["arguments"] = '{"city": "Oslo", "days": 1}'
    other = ask(served, [USER, edited, *results([call])], max_tokens=1, cache_salt="auto")
    assert other["prompt_token_ids"][: len(known)] != known
    events = served.stream(CHAT, {"messages": [USER], "tools": [WEATHER], **form})
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    (found,) = [one for delta in deltas for one in delta.get("tool_calls", [])]
    assert found["index"] == 0
    assert found["function"] == call["function"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_what_is_no_call_stays_text_without_the_marks(served: LocalServer, style: str) -> None:
    mark = {"hermes": '"<tool_call>"', "llama3": "<[0]>"}.get(style, "<[0]>")
    form = {"structured_outputs": {"grammar": f'start: "a " {mark} "{{ b"'}}
    shown = "a <tool_call>{ b" if style == "hermes" else "a { b"
    (choice,) = ask(served, [USER], **form)["choices"]
    assert choice["message"] == {"role": "assistant", "content": shown, "refusal": None}
    assert choice["finish_reason"] == "stop"
    events = served.stream(CHAT, {"messages": [USER], "tools": [WEATHER], **form})
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == shown
    (choice,) = ask(served, [USER], skip_special_tokens=False, **form)["choices"]
    assert ("[TOOL_CALLS]" in choice["message"]["content"]) == ("mistral" in style)


def test_one_call_of_several(served: LocalServer, style: str) -> None:
    """Further ones are left out, and are no part of the history."""
    form = {"grammar": f"start: {AUTO[style]} {AUTO[style]}"}
    fields: dict[str, Any] = {"parallel_tool_calls": False, "cache_salt": "one"}
    answer = ask(served, [USER], structured_outputs=form, **fields)
    message = answer["choices"][0]["message"]
    (call,) = message["tool_calls"]
    follow = ask(served, [USER, message, *results([call])], max_tokens=1, **fields)
    tokenizer = served.server.runtime.tokenizer
    assert tokenizer is not None
    before, text = (
        tokenizer.decode(one["prompt_token_ids"], keep_special=True) for one in (answer, follow)
    )
    assert text.count("Rome") == before.count("Rome") + 1


def test_a_call_or_an_answer_of_a_schema(served: LocalServer, style: str) -> None:
    schema = {"type": "object", "properties": {"late": {"type": "boolean"}}, "required": ["late"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reasons = set()
    is_marked = "mistral" in style or style in ("kimi", "lfm2", "minimax", "command-r7b",
                                                "granite33")  # fmt: skip
    bias = {"0": 100} if is_marked else BIAS  # its mark
    for seed in range(8):
        answer = ask(served, [USER], response_format=form, seed=seed, temperature=1.5,
                     parallel_tool_calls=False, logit_bias=bias if seed % 2 else BIAS)  # fmt: skip
        (choice,) = answer["choices"]
        reasons.add(choice["finish_reason"])
        if choice["finish_reason"] == "tool_calls":
            calls_of(answer)
        else:
            assert set(json.loads(choice["message"]["content"])) == {"late"}
    assert "tool_calls" in reasons


def test_tokenize_and_lookup_know_tools(served: LocalServer) -> None:
    answer = ask(served, [USER], max_tokens=1, cache_salt="look")
    body = {"messages": [USER], "tools": [WEATHER, NOW]}
    assert served.post("/tokenize", body)["tokens"] == answer["prompt_token_ids"]
    found = served.post("/v1/cache/lookup", {**body, "cache_salt": "look"})
    assert found["cached_tokens"] == len(answer["prompt_token_ids"]) - 1


def test_schemas_that_cannot_be_forced(served: LocalServer) -> None:
    tool = json.loads(json.dumps(WEATHER))
    tool["function"]["parameters"]["properties"]["city"] = {"not": {"type": "string"}}
    body = {"messages": [USER], "tools": [tool], "tool_choice": "required"}
    answer = served.client.post(CHAT, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert 'Unimplemented keys: ["not"]' in answer.json()["error"]["message"]
    body |= {"tools": [WEATHER], "response_format": {"type": "json_object"}}
    answer = served.client.post(CHAT, json=body)
    assert "tool_choice must be auto or none" in answer.json()["error"]["message"]
