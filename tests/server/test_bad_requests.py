"""Requests that cannot be answered: each has its status, and a message that names what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from tests.server.local_server import LocalServer

USER = [{"role": "user", "content": "hi"}]
C, H, G, S = "/v1/completions", "/v1/chat/completions", "/generate", "/v1/score"
L, T, D, F = "/v1/cache/lookup", "/tokenize", "/detokenize", "/v1/cache/flush"


def p(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", **fields}


def m(**fields: Any) -> dict[str, Any]:
    return {"messages": USER, **fields}


def hint(**fields: Any) -> dict[str, Any]:
    return {"hints": [{"verb": "retain", "prompt": "x", **fields}]}


def own(**fields: Any) -> list[dict[str, Any]]:
    return [{"verb": "retain"}, {"verb": "pin", **fields}]


def said(role: object, content: object, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content, **fields}]}


K = "/v1/cache/hints"
RF, SO = "response_format", "structured_outputs"


def schema(value: object, **fields: Any) -> dict[str, Any]:
    """A chat whose answer has a JSON schema."""
    return m(response_format={"type": "json_schema", "json_schema": {"schema": value, **fields}})


# path, body, part of the message, param
TABLE: list[tuple[str, Any, str, str | None]] = [
    ("/pause?mode=x", {}, "mode must be 'abort', 'keep' or 'wait'", "mode"),
    # the prompt
    (C, {}, "prompt is required", "prompt"),
    (C, p(prompt=None), "prompt must be text", "prompt"),
    (C, p(prompt=5), "prompt must be text", "prompt"),
    (C, p(prompt=[]), "prompt must be text", "prompt"),
    (C, p(prompt={}), "prompt must be text", "prompt"),
    (C, p(prompt=[[]]), "prompt[0]: the prompt is empty", "prompt"),
    (C, p(prompt=""), "the prompt is empty", "prompt"),
    (C, p(prompt=["a", ""]), "prompt[1]: the prompt is empty", "prompt"),
    (C, p(prompt=["a", 5]), "prompt[1]: a prompt must be text", "prompt"),
    (C, p(prompt=[[1], "a", [2, "b"]]), "prompt[2]: a prompt must be", "prompt"),
    (C, p(prompt=[1, "a"]), "a prompt must be text or token ids", "prompt"),
    (C, p(prompt=[1, 2.5]), "a prompt must be text or token ids", "prompt"),
    (C, p(prompt=[True]), "prompt must be text", "prompt"),
    (C, p(prompt=[4096]), "token id 4096 is out of range", "prompt"),
    (C, p(prompt=[-1]), "token id -1 is out of range", "prompt"),
    (C, p(prompt=[10**30]), "out of range of any vocabulary", "prompt"),
    (C, p(prompt=[1] * 4096), "at most 4095 are allowed", "prompt"),
    (C, p(prompt=["x"] * 1025), "at most 1024 are allowed", "prompt"),
    (C, p(prompt="\ud800"), "not valid Unicode", "prompt"),
    # sampling
    (C, p(max_tokens=0), "max_tokens must be >= 1", "max_tokens"),
    (C, p(max_tokens="5"), "max_tokens must be", "max_tokens"),
    (C, p(max_tokens=1.5), "max_tokens must be", "max_tokens"),
    (C, p(max_tokens=True), "max_tokens must be", "max_tokens"),
    (C, p(min_tokens=17), "min_tokens must be", "min_tokens"),
    (C, p(temperature=-1), "temperature must be", "temperature"),
    (C, p(temperature=1e-9), "temperature must be 0", "temperature"),
    (C, p(temperature="hot"), "temperature must be", "temperature"),
    (C, p(temperature=[1]), "temperature must be", "temperature"),
    (C, p(temperature=10**400), "temperature must be", "temperature"),
    (C, p(top_p=1.5), "top_p must be", "top_p"),
    (C, p(top_k=-2), "top_k must be", "top_k"),
    (C, p(top_k=0.5), "top_k must be", "top_k"),
    (C, p(min_p=2), "min_p must be", "min_p"),
    (C, p(presence_penalty=3), "presence_penalty must be", "presence_penalty"),
    (C, p(frequency_penalty=-3), "frequency_penalty must be", "frequency_penalty"),
    (C, p(repetition_penalty=0), "repetition_penalty must be", "repetition_penalty"),
    (C, p(seed=2**63), "seed must be", "seed"),
    (C, p(n=0), "n must be", "n"),
    (C, p(n=129), "n must be at most 128 here", "n"),
    (C, p(best_of=129), "best_of must be at most 128 here", "best_of"),
    (C, p(n=3, best_of=2), "best_of must be", "best_of"),
    (C, p(logprobs=101), "logprobs must be", "logprobs"),
    (C, p(logprobs=True), "logprobs must be", "logprobs"),
    (C, p(prompt_logprobs=-1), "prompt_logprobs must be", "prompt_logprobs"),
    (C, p(stop=5), "stop must be", "stop"),
    (C, p(stop=[""]), "stop must be", "stop"),
    (C, p(stop=["a", 1]), "stop[1] must be", "stop[1]"),
    (C, p(stop=["a"] * 65), "stop takes at most 64", "stop"),
    (C, p(stop={"a": 1}), "stop must be", "stop"),
    (C, p(stop_token_ids=[-1]), "stop_token_ids must be", "stop_token_ids"),
    (C, p(stop_token_ids=["a"]), "stop_token_ids[0] must be", "stop_token_ids[0]"),
    (C, p(stop_token_ids=[5000]), "[5000] are out of range", None),
    (C, p(ignore_eos=1), "ignore_eos must be", "ignore_eos"),
    (C, p(priority=2**31), "priority must be", "priority"),
    (C, p(logit_bias={"a": 1}), "a map from token ids", "logit_bias"),
    (C, p(logit_bias={"5": 101}), "logit_bias", None),
    (C, p(logit_bias={"9999": 1}), "logit_bias", None),
    (C, p(logit_bias=[1]), "logit_bias must be", "logit_bias"),
    (C, p(allowed_token_ids=[]), "allowed_token_ids", None),
    (C, p(bad_words=[""]), "bad_words", None),
    (C, p(truncate_prompt_tokens=0), "truncate_prompt_tokens must be", "truncate_prompt_tokens"),
    (C, p(truncate_prompt_tokens=-2), "truncate_prompt_tokens must be", "truncate_prompt_tokens"),
    (C, p(skip_special_tokens="no"), "skip_special_tokens must be", "skip_special_tokens"),
    # what is not done
    (C, p(suffix="x"), "suffix is not supported", "suffix"),
    (C, p(beam_width=4), "beam_width is not supported", "beam_width"),
    (C, p(length_penalty=2.0), "length_penalty needs use_beam_search", "length_penalty"),
    (C, p(early_stopping=True), "early_stopping needs use_beam_search", "early_stopping"),
    (C, p(use_beam_search=True, top_p=0.5), "top_p cannot be given", None),
    (C, p(use_beam_search=True, n=2, best_of=3), "best_of cannot be given", None),
    (C, p(use_beam_search=True, early_stopping="x"), "early_stopping must be", "early_stopping"),
    (C, p(use_beam_search=True, length_penalty=99.0), "length_penalty must be", "length_penalty"),
    (C, p(use_beam_search=True, n=1_000), "n must be at most", "n"),
    (C, p(use_beam_search=True, prompt_logprobs=1), "prompt_logprobs cannot be given", None),
    (C, p(guided_json={}), "guided_json is not supported", "guided_json"),
    (C, p(what=1), "unknown field what", "what"),
    (C, p(max_new_tokens=1), "unknown field max_new_tokens", "max_new_tokens"),
    (C, p(tools=[{"type": "function"}]), "tools is not supported", "tools"),
    (H, m(functions=[{}]), "functions is not supported", "functions"),
    (H, m(modalities=["audio"]), "modalities is not supported", "modalities"),
    (H, m(audio={}), "audio is not supported", "audio"),
    (H, m(chat_template="{{ x }}"), "chat_template is not supported", "chat_template"),
    # combinations
    (C, p(model="other"), "the model 'other' is not served here", "model"),
    (C, p(stream_options={}), "stream_options needs stream", "stream_options"),
    (C, p(stream=True, stream_options={"x": 1}), "unknown field", "stream_options.x"),
    (C, p(stream=True, best_of=2), "best_of cannot be streamed", "best_of"),
    (C, p(stream=True, prompt_logprobs=1), "cannot be streamed", "prompt_logprobs"),
    (C, p(stream=True, echo=True, logprobs=1), "cannot be streamed", "echo"),
    (C, p(stream="yes"), "stream must be", "stream"),
    (C, p(supersede=True), "supersede needs a session_id", "supersede"),
    (C, p(session_id=""), "session_id must have", "session_id"),
    (C, p(session_id=5), "session_id must be", "session_id"),
    (C, p(cache_salt=5), "cache_salt must be", "cache_salt"),
    (C, p(echo=True, logprobs=1, prompt_logprobs=2), "must equal", "prompt_logprobs"),
    (C, [], "the body must be a JSON object", None),
    (C, "x", "the body must be a JSON object", None),
    # chats
    (H, {}, "messages is required", "messages"),
    (H, m(messages=[]), "messages must be a list", "messages"),
    (H, m(messages="hi"), "messages must be a list", "messages"),
    (H, m(messages=["hi"]), "messages[0] must be an object", "messages[0]"),
    (H, said(None, "x"), "messages[0].role must be", "messages[0].role"),
    (H, said("<|end|>", "x"), "messages[0].role must be 1 to 64 letters", "messages[0].role"),
    (H, said("pad", "x"), "messages[0].role must be system or", "messages[0].role"),
    (H, said("user", None), "messages[0].content must be text", "messages[0].content"),
    (H, said("user", []), "messages[0].content must be text", "messages[0].content"),
    (H, said("user", [{"type": "image_url"}]), "'image_url' is not supported",
     "messages[0].content[0].type"),
    (H, said("user", "x", name=5), "messages[0].name must be", "messages[0].name"),
    (H, m(max_tokens=1, max_completion_tokens=2), "differ: give one", "max_tokens"),
    (H, m(max_completion_tokens=0), "max_completion_tokens must be", "max_completion_tokens"),
    (H, m(top_logprobs=1), "top_logprobs needs logprobs", "top_logprobs"),
    (H, m(logprobs=True, top_logprobs=101), "top_logprobs must be", "top_logprobs"),
    (H, m(logprobs=5), "logprobs must be", "logprobs"),
    (H, m(continue_final_message=True), "last message of the assistant", "continue_final_message"),
    (H, m(chat_template_kwargs={"messages": []}), "cannot set messages",
     "chat_template_kwargs.messages"),
    (H, m(chat_template_kwargs=[]), "chat_template_kwargs must be", "chat_template_kwargs"),
    # structured output
    (H, m(response_format=5), "response_format must be an object", RF),
    (H, m(response_format={}), "response_format.type is required", f"{RF}.type"),
    (C, p(response_format={"type": "xml"}), "type must be 'text'", f"{RF}.type"),
    (H, m(response_format={"type": "structural_tag"}), "type must be 'text'", f"{RF}.type"),
    (H, m(response_format={"type": "json_object", "x": 1}), "unknown field", f"{RF}.x"),
    (H, m(response_format={"type": "json_schema"}), "json_schema is required",
     f"{RF}.json_schema"),
    (H, schema(None), "json_schema.schema must be an object", f"{RF}.json_schema.schema"),
    (H, schema([]), "json_schema.schema must be an object", f"{RF}.json_schema.schema"),
    (H, schema({}, strict="yes"), "strict must be true or false", f"{RF}.json_schema.strict"),
    (H, schema({}, size=1), "unknown field", f"{RF}.json_schema.size"),
    (H, schema({"type": "strin"}), "Invalid type: strin", RF),
    (H, schema({"unevaluatedItems": False}), "Unimplemented keys", RF),
    # enforced elsewhere: tests/grammar/test_closed_objects.py
    (H, schema({"anyOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}),
     'Unimplemented keys: ["unevaluatedProperties"]', RF),
    (H, schema({"$ref": "https://example.com/x"}), "json cannot be used", RF),
    (H, schema({"type": "string", "pattern": "(?=a)"}), "json cannot be used", RF),
    (H, schema({"type": "integer", "minimum": 5, "maximum": 1}), "json cannot be used", RF),
    (C, p(structured_outputs=[]), "structured_outputs must be an object", SO),
    (C, p(structured_outputs={}), "exactly one of json, regex", SO),
    (C, p(structured_outputs={"regex": "a", "choice": ["b"]}), "got regex, choice", SO),
    (C, p(structured_outputs={"regex": "(a"}), "unclosed group", SO),
    (C, p(structured_outputs={"regex": "a{1000000}"}), "more than 200,000 expressions", SO),
    (C, p(structured_outputs={"regex": 5}), "regex must be a string", f"{SO}.regex"),
    (C, p(structured_outputs={"choice": []}), "choice must be a list", SO),
    (C, p(structured_outputs={"grammar": "start: foo"}), 'unknown name: "foo"', SO),
    (C, p(structured_outputs={"grammar": "root ::= ("}), "Expected ')'", SO),
    (C, p(structured_outputs={"structural_tag": "{}"}), "unknown field", f"{SO}.structural_tag"),
    (C, p(structured_outputs={"json": "{"}), "must be a JSON schema", SO),
    (H, m(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}),
     "exclude each other", RF),
    (G, {"text": "a", "sampling_params": {"regex": "(", }}, "regex cannot be used",
     "sampling_params.regex"),
    (G, {"text": "a", "sampling_params": {"json_schema": "["}}, "must be a JSON schema",
     "sampling_params.json_schema"),
    (G, {"text": "a", "sampling_params": {"regex": "a", "ebnf": "root ::= x"}}, "exclude each",
     "sampling_params.regex"),
    # the other routes
    (G, {}, "give one of text, input_ids and prompt", "text"),
    (G, {"text": "a", "prompt": "b"}, "give one of", "text"),
    (G, {"text": "a", "max_tokens": 5}, "max_tokens goes into sampling_params", "max_tokens"),
    (G, {"text": "a", "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens must be",
     "max_new_tokens"),
    (G, {"prompt": "a", "sampling_params": {}}, "stand beside it", "sampling_params"),
    (G, {"text": ["a", "b"], "stream": True}, "stream takes one prompt", "stream"),
    (G, {"text": "a", "top_logprobs_num": 2}, "needs return_logprob", "top_logprobs_num"),
    (S, {"prompt": "a"}, "candidates is required", "candidates"),
    (S, {"prompt": "a", "candidates": []}, "candidates must be a list", "candidates"),
    (S, {"prompt": "a", "candidates": [""]}, "a candidate has no tokens", "candidates"),
    (S, {"prompt": ["a", "b"], "candidates": ["c"]}, "at most 1 are allowed", "prompt"),
    (L, {}, "give prompt or messages", "prompt"),
    (L, p(messages=USER), "give prompt or messages", "prompt"),
    (T, {}, "give prompt or messages", "prompt"),
    (T, {"prompt": ["x"]}, "prompt must be", "prompt"),
    (D, {"tokens": [1, 4096]}, "tokens[1] must be between", "tokens"),
    (D, {"tokens": "x"}, "tokens must be", "tokens"),
    (F, {"everything": True}, "unknown field everything", "everything"),
    # hints
    (K, {}, "hints is required", "hints"),
    (K, {"hints": {}}, "hints must be", "hints"),
    (K, {"hints": [5]}, "hints[0] must be", "hints[0]"),
    (K, {"hints": [{}]}, "hints[0].verb is required", "hints[0].verb"),
    (K, {"hints": [{"verb": "pin"}] * 65}, "hints takes at most 64 hints, got 65", "hints"),
    (K, {"hints": [{"verb": "pin"}]}, "give one of prompt, messages and session_id", "hints[0]"),
    (K, hint(session_id="s"), "give one of prompt, messages", "hints[0]"),
    (K, hint(verb="keep"), "verb must be one of share, prefetch", "hints[0].verb"),
    (K, hint(verb=5), "hints[0].verb must be", "hints[0].verb"),
    (K, hint(seconds=-1), "seconds must be a number >= 0", "hints[0].seconds"),
    (K, hint(seconds="long"), "hints[0].seconds must be", "hints[0].seconds"),
    (K, hint(seconds=10**400), "seconds must be", "hints[0].seconds"),
    (K, hint(verb="demote", seconds=1), "seconds belong to share, pin, retain", "hints[0]"),
    (K, hint(verb="prefetch", seconds=1), "seconds belong to", "hints[0]"),
    (K, hint(verb="demote", max_tokens=5), "max_tokens does not go with demote", "hints[0]"),
    (K, hint(max_tokens=0), "max_tokens must be >= 1", "hints[0].max_tokens"),
    (K, hint(max_tokens=1.5), "hints[0].max_tokens must be", "hints[0].max_tokens"),
    (K, hint(prompt=["a", "b"]), "hints[0]: prompt has 2 items", "hints[0].prompt"),
    (K, hint(prompt=[4096]), "token id 4096 is out of range", "hints[0].prompt"),
    (K, hint(prompt=None, messages=[]), "messages must be a list", "hints[0].messages"),
    (K, hint(prompt=None, messages=[{"role": "?"}]), "role", "hints[0].messages[0].role"),
    (K, hint(prompt=None, session_id="s" * 257), "1 to 256 characters", "hints[0].session_id"),
    (K, hint(forever=True), "unknown field hints[0].forever", "hints[0].forever"),
    (K, {**hint(), "model": "other"}, "is not served here", "model"),
    (C, p(cache_hints={}), "cache_hints must be", "cache_hints"),
    (C, p(cache_hints=own(verb="prefetch")), "computes its own prompt", "cache_hints[1].verb"),
    (C, p(cache_hints=own(seconds=-1)), "seconds must be", "cache_hints[1].seconds"),
    (C, p(cache_hints=own(prompt="x")), "unknown field", "cache_hints[1].prompt"),
    (C, p(cache_hints=[{"verb": "pin"}] * 65), "at most 64", "cache_hints"),
    (H, m(cache_hints=[{}]), "cache_hints[0].verb is required", "cache_hints[0].verb"),
    (G, p(cache_hints=[{"verb": "drop"}]), "verb must be one of", "cache_hints[0].verb"),
]  # fmt: skip


def tool(**function: Any) -> dict[str, Any]:
    """A chat with one function."""
    return m(tools=[{"type": "function", "function": {"name": "f", **function}}])


def schema(**fields: Any) -> dict[str, Any]:
    return tool(parameters=fields)


def choose(choice: Any) -> dict[str, Any]:
    return {**tool(), "tool_choice": choice}


def called(**call: Any) -> dict[str, Any]:
    """A chat whose assistant has called a function."""
    given = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}, **call}
    return said("assistant", None, tool_calls=[given])


def arguments(value: Any) -> dict[str, Any]:
    return called(function={"name": "f", "arguments": value})


_TOOL, _CALL = "tools[0].function", "messages[0].tool_calls[0]"
TOOLS: list[tuple[str, Any, str, str | None]] = [
    (H, m(tools="f"), "tools must be a list", "tools"),
    (H, m(tools={}), "tools must be a list", "tools"),
    (H, m(tools=[1]), "tools[0] must be an object", "tools[0]"),
    (H, m(tools=[{"type": "function"}]), "function is required", _TOOL),
    (H, tool(name=None), "name must be a string", f"{_TOOL}.name"),
    (H, tool(name="a b"), "name must be 1 to 128 letters", f"{_TOOL}.name"),
    (H, tool(name="f" * 129), "name must be 1 to 128 letters", f"{_TOOL}.name"),
    (H, tool(description=5), "description must be a string", f"{_TOOL}.description"),
    (H, tool(strict="yes"), "strict must be true or false", f"{_TOOL}.strict"),
    (H, tool(parameters=[]), "must be a JSON schema", f"{_TOOL}.parameters"),
    (H, schema(type="array"), "type must be 'object'", f"{_TOOL}.parameters.type"),
    (H, schema(properties=[]), "must be an object", f"{_TOOL}.parameters.properties"),
    (H, schema(properties={"a": 5}), "a must be a JSON", f"{_TOOL}.parameters.properties.a"),
    (H, schema(required="a"), "must be a list of names", f"{_TOOL}.parameters.required"),
    (H, schema(properties={"a": {}}, required=["b"]), "lacks: b", f"{_TOOL}.parameters.required"),
    (H, schema(properties={"a": json.loads('{"a":' * 200 + "1" + "}" * 200)}),
     "must be nested at most 128 deep", f"{_TOOL}.parameters"),
    (H, arguments('{"a":' * 200 + "1" + "}" * 200), "the JSON text of an object",
     f"{_CALL}.function.arguments"),
    (H, m(tools=[*tool()["tools"], *tool()["tools"]]), "'f' is given twice",
     "tools[1].function.name"),
    (H, m(tools=[], tool_choice="required"), "tool_choice needs tools", "tool_choice"),
    (H, {**tool(), "parallel_tool_calls": 1}, "must be true or false", "parallel_tool_calls"),
    (H, choose("any"), "tool_choice must be", "tool_choice"),
    (H, choose(5), "tool_choice must be", "tool_choice"),
    (H, choose({"type": "allowed_tools"}), "must be 'function'", "tool_choice.type"),
    (H, choose({"type": "function"}), "function is required", "tool_choice.function"),
    (H, choose({"type": "function", "function": {"name": "g"}}), "is not one of the tools: 'g' (f)",
     "tool_choice.function.name"),
    (H, called(id=None), "id must be a string", f"{_CALL}.id"),
    (H, called(type="custom"), "type must be 'function'", f"{_CALL}.type"),
    (H, called(function=None), "function must be an object", f"{_CALL}.function"),
    (H, called(function={"arguments": "{}"}), "name is required", f"{_CALL}.function.name"),
    (H, arguments("{"), "must be the JSON text of an object", f"{_CALL}.function.arguments"),
    (H, arguments("[]"), "must be the JSON text of an object", f"{_CALL}.function.arguments"),
    (H, arguments(5), "must be the JSON text of an object", f"{_CALL}.function.arguments"),
    (H, arguments("[" * 9999), "the JSON text of an object", f"{_CALL}.function.arguments"),
    (H, said("assistant", 5), "content must be text", "messages[0].content"),
    (H, said("assistant", "x", tool_calls=5), "must be a list", "messages[0].tool_calls"),
    (H, said("assistant", "x", tool_calls=[5]), "must be an object", _CALL),
    (H, said("assistant", "x", reasoning_content=5), "must be a string",
     "messages[0].reasoning_content"),
    (H, said("tool", "x"), "must be a string, got None", "messages[0].tool_call_id"),
    (H, said("tool", "x", tool_call_id="a"), "does not name a call of an earlier message: 'a'",
     "messages[0].tool_call_id"),
    (T, {**m(), "tools": [1]}, "tools[0] must be an object", "tools[0]"),
]  # fmt: skip
TABLE += TOOLS


@pytest.mark.parametrize(("path", "body", "message", "param"), TABLE, ids=range(len(TABLE)))
def test_a_bad_request_says_what_is_wrong(
    served: LocalServer, path: str, body: Any, message: str, param: str | None
) -> None:
    answer = served.client.post(path, content=as_json(body), headers=JSON)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    error = answer.json()["error"]
    assert message in error["message"]
    assert param is None or error["param"] == param
    assert error["type"] == ("not_found_error" if param == "model" else "invalid_request_error")
    assert answer.headers["x-request-id"]


JSON = {"content-type": "application/json"}


def as_json(body: Any) -> bytes:
    return json.dumps(body).encode()


def test_the_table_is_long_enough() -> None:
    assert len(TABLE) >= 80
    assert len(TOOLS) >= 25


RAW: list[tuple[str, str, bytes, dict[str, str], int, str]] = [
    ("POST", C, b"{", JSON, 400, "not valid JSON"),
    ("POST", C, b"", JSON, 400, "must be a JSON object"),
    ("POST", C, b"\xff\xfe", JSON, 400, ""),
    ("POST", C, b"[" * 10_000, JSON, 400, ""),
    ("POST", C, b'{"prompt": ' + b"1" * 5_000 + b"}", JSON, 400, ""),
    ("POST", C, b'{"prompt": "x", "temperature": NaN}', JSON, 400, "temperature must be"),
    ("POST", C, b'{"prompt": "x"}', {"content-type": "text/plain"}, 415, "application/json"),
    ("POST", C, b"prompt=x", {}, 415, "application/json"),
    ("GET", C, b"", {}, 405, "GET is not allowed for /v1/completions: use POST"),
    ("PUT", "/v1/models", b"{}", JSON, 405, "use GET"),
    ("PATCH", "/v1/responses/none", b"{}", JSON, 405, "use DELETE or GET"),
    ("GET", "/v1/nothing at all", b"", {}, 404, "/openapi.json lists the routes"),
    ("POST", "/chat/completions", b"{}", JSON, 404, "near: /v1/chat/completions"),
    ("POST", "/v1/v1/messages", b"{}", JSON, 404, "near: /v1/messages"),
    ("POST", "/v1/chat/completion", b"{}", JSON, 404, "near: /v1/chat/completions"),
    ("GET", "/v1/" + "x" * 4000, b"", {}, 404, "there is no /v1/x"),
    ("GET", "/v1/cache/tree?max_nodes=-1", b"", {}, 400, "max_nodes must be"),
    ("GET", "/v1/cache/tree?depth=many", b"", {}, 400, "depth must be"),
    ("GET", "/v1/cache/tree?start=a", b"", {}, 400, "start must be"),
    ("DELETE", "/v1/sessions/none", b"", {}, 404, "no such session"),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "message"), RAW, ids=range(len(RAW))
)
def test_a_bad_body_or_route(
    served: LocalServer,
    method: str,
    path: str,
    body: bytes,
    headers: dict[str, str],
    status: int,
    message: str,
) -> None:
    answer = served.client.request(method, path, content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_has_a_limit(runtime: Runtime, is_declared: bool) -> None:
    """With its length in the header it is refused at once, else where it becomes too long."""
    with LocalServer(runtime, max_body=1000) as small:
        small.post(C, p(max_tokens=1))
        body = as_json(p(prompt="x" * 1000))
        content = body if is_declared else iter([body[:600], body[600:]])
        answer = small.client.post(C, content=content, headers=JSON)
        assert answer.status_code == 413
        assert "larger than 1000 bytes" in answer.json()["error"]["message"]


def test_the_bad_item_of_a_batch_has_its_index(served: LocalServer) -> None:
    answer = served.client.post(C, json={"prompt": [[1], [2], [9999]]})
    assert answer.json()["error"]["index"] == 2


def test_fields_that_ask_for_nothing_are_taken(served: LocalServer) -> None:
    body = {"messages": USER, "max_tokens": 1, "tools": None, "response_format": {"type": "text"},
            "tool_choice": "none", "user": "me", "logprobs": None, "stop": None,
            "store": False, "suffix": None, "stream": False}  # fmt: skip
    served.post(H, body)


def test_a_bad_request_disturbs_no_other(served: LocalServer) -> None:
    with served.client.stream("POST", C, json=p(max_tokens=20, stream=True)) as answer:
        assert served.client.post(C, json=p(n=0)).status_code == 400
        assert answer.read().endswith(b"data: [DONE]\n\n")
