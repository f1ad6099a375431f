"""Log-probabilities of /v1/responses: of the tokens of the text, and of no others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
openai = pytest.importorskip("openai", reason="pip install openai==3.54.0")

from radixserve.api.runtime import DEMO  # noqa: E402
from radixserve.request import SamplingParams  # noqa: E402
from radixserve.server.answer.content_blocks import ContentBlocks, content_blocks_of  # noqa: E402
from radixserve.server.answer.output_parser import OutputParser, OutputParserConfig  # noqa: E402
from radixserve.server.answer.text_logprobs import TextLogprobs  # noqa: E402
from radixserve.server.wire.logprobs import TokenTexts  # noqa: E402
from radixserve.text.tokenizer import Tokenizer  # noqa: E402
from tests.server.local_server import LocalServer  # noqa: E402
from tests.server.test_output_parser import FORMS, HERMES_F, HERMES_G, coder  # noqa: E402
from tests.text.test_byte_fallback import llama2_tokenizer  # noqa: E402

ASK = "How do I sort a list?"
LOGPROBS = "message.output_text.logprobs"
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}


def client_of(served: LocalServer) -> Any:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def text_of(entries: Any) -> str:
    return b"".join(bytes(entry.bytes) for entry in entries).decode()


def test_they_are_those_of_a_chat(served: LocalServer) -> None:
    """Without the end token, which is not part of the text."""
    with client_of(served) as client:
        answer = client.responses.create(
            model="demo", input=ASK, temperature=0, include=[LOGPROBS], top_logprobs=3
        )
        chat = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": ASK}], temperature=0,
            logprobs=True, top_logprobs=3,
        )  # fmt: skip
        alone = client.responses.create(
            model="demo", input=ASK, temperature=0, include=[LOGPROBS], max_output_tokens=3
        )
        without = client.responses.create(model="demo", input=ASK, max_output_tokens=3)
    (part,) = answer.output[0].content
    assert answer.top_logprobs == 3
    assert text_of(part.logprobs) == part.text == answer.output_text
    expected = chat.choices[0].logprobs.content
    assert [
        (entry.token, entry.logprob, entry.bytes, [top.token for top in entry.top_logprobs])
        for entry in part.logprobs
    ] == [
        (entry.token, entry.logprob, entry.bytes, [top.token for top in entry.top_logprobs])
        for entry in expected[:-1]
    ]
    assert [entry.top_logprobs for entry in alone.output[0].content[0].logprobs] == [[], [], []]
    assert without.output[0].content[0].logprobs == []


@pytest.mark.parametrize("stop", [None, "dd t"])
def test_a_thought_and_a_call_have_none(calling: LocalServer, stop: str | None) -> None:
    """Streamed and whole, in the types of OpenAI's client."""
    from openai.types.responses import ResponseOutputText, ResponseTextDeltaEvent
    from openai.types.responses import ResponseTextDoneEvent as Done

    fields: dict[str, Any] = {"model": "demo", "input": ASK, "tools": [TOOL], "temperature": 0,
                              "include": [LOGPROBS], "top_logprobs": 2,
                              "extra_body": {"stop": stop}}  # fmt: skip
    tokens = ["Let me", " add"] + ([" them."] if stop is None else [])
    with client_of(calling) as client:
        with client.responses.stream(**fields) as stream:
            events = list(stream)
            final = stream.get_final_response()
        whole = client.responses.create(**fields)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [entry for event in deltas for entry in event.logprobs]
    assert [entry.token for entry in streamed] == tokens
    for event in deltas:
        ResponseTextDeltaEvent.model_validate(event.model_dump(exclude={"snapshot"}), strict=True)
    (done,) = (event for event in events if event.type == "response.output_text.done")
    Done.model_validate(done.model_dump(), strict=True)
    assert [entry.token for entry in done.logprobs] == tokens
    parts = [response.output[1].content[0] for response in (final, whole)]
    for part in parts:
        ResponseOutputText.model_validate(part.model_dump(exclude={"parsed"}), strict=True)
        assert [entry.token for entry in part.logprobs] == tokens
        assert [len(entry.top_logprobs) for entry in part.logprobs] == [2] * len(tokens)
    assert [entry.logprob for entry in parts[0].logprobs] == [
        entry.logprob for entry in parts[1].logprobs
    ]


def test_other_includes_are_skipped_by_name(served: LocalServer) -> None:
    for include, skipped in (
        ([LOGPROBS], None),
        ([], None),
        (["reasoning.encrypted_content", LOGPROBS], "include"),
    ):
        body = {"input": ASK, "max_output_tokens": 1, "include": include}
        answer = served.client.post("/v1/responses", json=body)
        assert answer.headers.get("x-radixserve-skipped-fields") == skipped
        part = answer.json()["output"][0]["content"][0]
        assert len(part["logprobs"]) == include.count(LOGPROBS)


def test_wrong_values_are_named(served: LocalServer) -> None:
    for value in (-1, 21_000, "many"):
        body = {"input": ASK, "top_logprobs": value}
        answer = served.client.post("/v1/responses", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize("kind", ["byte level", "byte fallback"])
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "hermes",
        "think",
        "thinking",
        "qwen3-coder",
        "think-qwen3-coder",
        "think-kimi",
        "harmony",
    ],
)
def test_every_token_of_a_text_is_given_once(kind: str, name: str) -> None:
    """However the tokens are grouped, and wherever marks, calls and parts of characters stand."""
    tokenizer = Tokenizer.load(DEMO) if kind == "byte level" else Tokenizer(llama2_tokenizer())
    assert tokenizer is not None
    config, texts = FORMS[name], TokenTexts(tokenizer)
    pieces = ["a ", " <b", "\n\n", "é€\U0001f642", "<tool", "<think>", "hm", "</think>",
              " tool_call", HERMES_F, HERMES_G, coder("f", a="1"), "name f a", ".\n",
              "<|im"]  # fmt: skip
    numbers = random.Random(5)
    for _ in range(60):
        written = "".join(numbers.choices(pieces, k=numbers.randint(1, 9)))
        ids = tokenizer.encode_more(written)
        check_blocks(tokenizer, config, texts, ids, numbers)


def check_blocks(
    tokenizer: Tokenizer,
    config: OutputParserConfig,
    texts: TokenTexts,
    ids: list[int],
    numbers: random.Random,
) -> None:
    detokenizer = tokenizer.detokenizer([])
    logprobs = TextLogprobs(tokenizer, np.array([], np.int32), SamplingParams(), config, texts)
    parser, blocks = OutputParser(config), ContentBlocks()
    streamed: dict[int, list[Any]] = {}
    first = 0
    while first < len(ids) or first == 0:
        end = min(len(ids), first + numbers.randint(1, 5))
        logprobs.add(ids[first:end], [-float(index) for index in range(first, end)], None)
        delta = parser.feed(detokenizer.push(ids[first:end]))
        is_last = end == len(ids)
        if is_last:
            logprobs.finish()
            delta += parser.feed(detokenizer.finish())
            delta += parser.finish()
        for event in blocks.push(delta):
            if event.kind == "delta" and event.block.kind == "text":
                entries = logprobs.next(event.block.index, len(event.delta))
                streamed.setdefault(event.block.index, []).extend(entries)
        first = end
        if is_last:
            break
    places = []
    for block in content_blocks_of(parser.answer()):
        if block.kind != "text":
            continue
        entries = logprobs.all(block.index, len(block.text))
        assert entries == streamed[block.index]
        places += [-entry["logprob"] for entry in entries]
        text = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
        assert block.text.strip() in text, (block, entries)
        # Beside the text the tokens have no more than what was cut off of the first and the last.
        longest = max((len(entry["bytes"]) for entry in entries), default=0)
        assert len(text) <= len(block.text) + 2 * longest
    assert places == sorted(set(places))
