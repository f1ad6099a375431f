"""Answers that have a form, over HTTP: OpenAI's fields, vLLM's, SGLang's."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
pytest.importorskip("llguidance", reason="the server needs the extra [serve]")

from tests.server.local_server import LocalServer

USER = [{"role": "user", "content": "Name a cat."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}


def chat(served: LocalServer, **fields: Any) -> dict[str, Any]:
    body = {"messages": USER, "max_tokens": 150, "seed": 1, **fields}
    return dict(served.post("/v1/chat/completions", body)["choices"][0])


@pytest.mark.parametrize("strict", [True, False, None])
def test_response_format_of_a_chat(served: LocalServer, strict: bool | None) -> None:
    inner = {"name": "cat", "schema": SCHEMA, "strict": strict}
    choice = chat(served, response_format={"type": "json_schema", "json_schema": inner})
    value = json.loads(choice["message"]["content"])
    assert list(value) == ["name", "old"]
    assert choice["finish_reason"] == "stop"
    bounded = chat(served, response_format={"type": "json_object"}, max_tokens=40)
    assert bounded["message"]["content"].startswith("{")


def test_strict_refuses_unique_items_that_cannot_be_held(served: LocalServer) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2}
    for items, strict, status in (
        ({"enum": [1, 2]}, True, 200),
        ({"type": "integer"}, True, 400),
        ({"type": "integer", "minimum": 0, "maximum": 99}, None, 200),
    ):
        inner = {"name": "set", "schema": {**schema, "items": items, "maxItems": 3}}
        inner |= {} if strict is None else {"strict": strict}
        body = {"messages": USER, "max_tokens": 150, "seed": 1,
                "response_format": {"type": "json_schema", "json_schema": inner}}  # fmt: skip
        answer = served.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == status, answer.text
        if status == 400:
            assert "uniqueItems cannot be enforced" in answer.json()["error"]["message"]
        elif strict:
            content = answer.json()["choices"][0]["message"]["content"]
            assert sorted(json.loads(content)) == [1, 2]


def test_a_stream_is_the_same_answer(served: LocalServer) -> None:
    fields: dict[str, Any] = {"structured_outputs": {"json": SCHEMA}, "temperature": 0}
    whole = chat(served, **fields)["message"]["content"]
    body = {"messages": USER, "max_tokens": 150, "seed": 1, "stream": True, **fields}
    text = ""
    with served.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
    assert text == whole


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, "[0-9]{3}-[a-f]{2}"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'start: "[" /[a-c]{2}/ "]"'}, r"\[[a-c]{2}\]"),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 99}, "regex": None}, "[1-9][0-9]"),
        ({"json_object": True, "disable_any_whitespace": True}, r"\{.*"),
    ],
)
def test_structured_outputs_of_a_completion(
    served: LocalServer, form: dict[str, Any], pattern: str
) -> None:
    body = {"prompt": ["Hello", "Now"], "n": 2, "max_tokens": 60, "structured_outputs": form}
    for choice in served.post("/v1/completions", body)["choices"]:
        assert re.fullmatch(pattern, choice["text"], re.DOTALL)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[xy]{4}"}, "[xy]{4}"),
        ({"ebnf": 'root ::= "a" | "b" "c"'}, "a|bc"),
        ({"json_schema": '{"enum": [1, 2]}'}, "[12]"),
    ],
)
def test_the_native_form(served: LocalServer, fields: dict[str, Any], pattern: str) -> None:
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 20, **fields}}
    assert re.fullmatch(pattern, served.post("/generate", body)["text"])


def test_text_asks_for_nothing(served: LocalServer) -> None:
    plain = chat(served, temperature=0, max_tokens=8)
    assert chat(served, temperature=0, max_tokens=8, response_format={"type": "text"}) == plain
