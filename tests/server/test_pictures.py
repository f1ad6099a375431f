"""Pictures over HTTP: each protocol's parts, one K/V for all of them, and what is refused."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

import httpcore
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from radixserve import InvalidRequest, Runtime, SamplingParams
from radixserve.images.fetching import UrlFetcher, is_public
from radixserve.images.sources import read_source
from radixserve.server.gate.tenants import Tenants
from tests.images.vision_checkpoints import as_file, make_vision_checkpoint, picture
from tests.pacing import PATIENCE_S
from tests.server.local_server import LocalServer

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
FEW = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    folder = make_vision_checkpoint(tmp_path_factory.mktemp("idefics3"), "idefics3")
    with Runtime(folder, num_pages=8192) as runtime:
        yield runtime
        runtime.check()


@pytest.fixture(scope="module")
def seeing(vision: Runtime) -> Iterator[LocalServer]:
    with LocalServer(vision) as served:
        yield served


def data_of(seed: int) -> str:
    return base64.b64encode(as_file(picture(seed))).decode()


def openai(data: str, text: str = "What is it?") -> dict[str, Any]:
    url = {"url": f"data:image/png;base64,{data}"}
    parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]
    return {"model": "demo", "messages": [{"role": "user", "content": parts}], **FEW}


def anthropic(data: str, text: str = "What is it?") -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    parts = [{"type": "image", "source": source}, {"type": "text", "text": text}]
    return {"model": "demo", "messages": [{"role": "user", "content": parts}], **FEW}


def responses(data: str, text: str = "What is it?") -> dict[str, Any]:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    parts = [image, {"type": "input_text", "text": text}]
    said = {"role": "user", "content": parts}
    return {"model": "demo", "input": [said], "max_output_tokens": 4, "temperature": 0}


def refused(served: LocalServer, path: str, body: dict[str, Any]) -> Any:
    answer = served.client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def encoded(vision: Runtime) -> int:
    stats: Any = vision.cache_stats()
    count: int = stats["pictures"]["encoded"]
    return count


def test_all_protocols_share_a_picture(seeing: LocalServer, vision: Runtime) -> None:
    data, before = data_of(1), encoded(vision)
    first = seeing.post(CHAT, openai(data))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    num_prompt = first["usage"]["prompt_tokens"]
    second = seeing.post(MESSAGES, anthropic(data))
    assert second["usage"]["cache_read_input_tokens"] == num_prompt - 1
    third = seeing.post(RESPONSES, responses(data))
    assert third["usage"]["input_tokens_details"]["cached_tokens"] == num_prompt - 1
    text = first["choices"][0]["message"]["content"]
    assert second["content"][0]["text"] == text
    assert third["output"][0]["content"][0]["text"] == text
    assert encoded(vision) == before + 1


def picture_metrics(served: LocalServer) -> dict[str, float]:
    """The samples of pictures by name, and by their label where they have one."""
    families = text_string_to_metric_families(served.client.get("/metrics").text)
    return {
        " ".join((sample.name.removeprefix("radixserve:"), *sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
        if "picture" in family.name
    }


def test_metrics(vision: Runtime) -> None:
    with LocalServer(vision) as seeing:
        before = picture_metrics(seeing)
        seeing.post(CHAT, openai(data_of(70)))
        seeing.post(CHAT, openai(data_of(70), "And so?"))
        vision.flush_cache()
        seeing.post(CHAT, openai(data_of(70)))
        part = openai(data_of(70))["messages"][0]["content"][0]
        for content in (
            openai("AAAA")["messages"][0]["content"],
            openai("no base64!")["messages"][0]["content"],
            [part] * 101,
            [part] * 60,
        ):
            said = {"model": "demo", "messages": [{"role": "user", "content": content}], **FEW}
            refused(seeing, CHAT, said)
        vision.cache_stats()
        after = picture_metrics(seeing)
    grown = {name: value - before.get(name, 0) for name, value in after.items()}
    assert grown.pop("picture_encode_seconds_total") > 0
    assert grown.pop("picture_embedding_bytes") > 0
    assert grown == {
        "encoded_pictures_total": 1,
        "reused_pictures_total kv_cache": 1,
        "reused_pictures_total embeddings": 1,
        "refused_pictures_total image": 1,
        "refused_pictures_total source": 1,
        "refused_pictures_total prompt": 2,
        "picture_waiting_requests": 0,
    }
    page = (Path(__file__).parent.parent.parent / "docs" / "images.md").read_text()
    assert all(f"`{name.split()[0].removesuffix('_total')}" in page for name in after)


class TurnUsage(NamedTuple):
    """The counts that a turn's usage has."""

    prompt: int
    cached: int
    completion: int


def chat_turns(served: LocalServer, data: str) -> Iterator[TurnUsage]:
    body = openai(data)
    while True:
        answer = served.post(CHAT, body)
        usage, (choice,) = answer["usage"], answer["choices"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        yield TurnUsage(usage["prompt_tokens"], cached, usage["completion_tokens"])
        body["messages"] += [choice["message"], {"role": "user", "content": "Sure?"}]


def streamed_turns(served: LocalServer, data: str) -> Iterator[TurnUsage]:
    body = {**openai(data), "stream_options": {"include_usage": True}}
    while True:
        *events, last = served.stream(CHAT, body)
        usage = last["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        yield TurnUsage(usage["prompt_tokens"], cached, usage["completion_tokens"])
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
        body["messages"] += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Sure?"},
        ]


def message_turns(served: LocalServer, data: str) -> Iterator[TurnUsage]:
    body = anthropic(data)
    while True:
        answer = served.post(MESSAGES, body)
        usage = answer["usage"]
        cached = usage["cache_read_input_tokens"]
        new = usage["input_tokens"] + usage.get("cache_creation_input_tokens", 0)
        yield TurnUsage(cached + new, cached, usage["output_tokens"])
        body["messages"] += [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": "Sure?"},
        ]


def response_turns(served: LocalServer, data: str) -> Iterator[TurnUsage]:
    body = responses(data)
    while True:
        answer = served.post(RESPONSES, body)
        yield turn_of_response(answer)
        body["input"] += [*answer["output"], {"role": "user", "content": "Sure?"}]


def response_turns_by_id(served: LocalServer, data: str) -> Iterator[TurnUsage]:
    body = responses(data)
    while True:
        answer = served.post(RESPONSES, body)
        yield turn_of_response(answer)
        body |= {"previous_response_id": answer["id"], "input": "Sure?"}


def turn_of_response(answer: Any) -> TurnUsage:
    usage = answer["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return TurnUsage(usage["input_tokens"], cached, usage["output_tokens"])


def runtime_turns(served: LocalServer, data: str) -> Iterator[TurnUsage]:
    params = SamplingParams(max_tokens=4, temperature=0.0)
    parts = [{"type": "image", "base64": data}, {"type": "text", "text": "What is it?"}]
    said: Any = {"role": "user", "content": parts}
    with served.server.runtime.chat(params=params) as chat:
        while True:
            usage = chat.send(said).usage
            yield TurnUsage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
            said = "Sure?"


@pytest.mark.parametrize(
    "turns",
    [
        *(chat_turns, streamed_turns, message_turns, response_turns, response_turns_by_id),
        runtime_turns,
    ],
)
def test_a_later_turn_computes_new_tokens_only(
    seeing: LocalServer, vision: Runtime, turns: Callable[[LocalServer, str], Iterator[TurnUsage]]
) -> None:
    """All that the turn before computed is cached; its last token was not."""
    vision.flush_cache()
    before = encoded(vision)
    with contextlib.closing(turns(seeing, data_of(2))) as told:
        last = next(told)
        assert last.cached == 0
        assert encoded(vision) <= before + 1
        for _ in range(2):
            before, prefilled = encoded(vision), vision.cache_stats()["prefilled_tokens"]
            turn = next(told)
            assert encoded(vision) == before
            assert turn.cached == last.prompt + last.completion - 1
            computed = vision.cache_stats()["prefilled_tokens"] - prefilled
            assert computed == turn.prompt - turn.cached < 30
            last = turn


def test_requests_that_arrive_together_encode_a_picture_once(
    seeing: LocalServer, vision: Runtime
) -> None:
    """By all protocols, of which some read the same file again."""
    vision.flush_cache()
    before, prefilled = encoded(vision), vision.cache_stats()["prefilled_tokens"]
    makers = [(CHAT, openai), (MESSAGES, anthropic), (RESPONSES, responses)]
    data = data_of(12)
    with ThreadPoolExecutor(32) as pool:
        asked = [
            pool.submit(seeing.post, path, make(data, f"Question {number}"))
            for number in range(32)
            for path, make in [makers[number % 3]]
        ]
        answers = [future.result(PATIENCE_S) for future in asked]
    assert encoded(vision) == before + 1
    rows = vision.tokenize([{"role": "user", "content": [{"type": "image", "base64": data}]}])
    num_rows = int((rows >= 1 << 30).sum())
    computed = vision.cache_stats()["prefilled_tokens"] - prefilled
    num_prompt = answers[0]["usage"]["prompt_tokens"]
    assert computed < num_prompt + 31 * (num_prompt - num_rows)


def test_a_conversation_is_known_by_its_pictures(seeing: LocalServer) -> None:
    """Equal texts with another picture go on from another prompt."""
    bodies = [openai(data_of(seed), "Look") for seed in (3, 4)]
    firsts = [seeing.post(CHAT, body) for body in bodies]
    answer = {"role": "assistant", "content": firsts[0]["choices"][0]["message"]["content"]}
    asked = {"role": "user", "content": "Sure?"}
    for body, first in zip(bodies, firsts, strict=True):
        body["messages"] += [answer, asked]
        found = seeing.post("/v1/cache/lookup", {"messages": body["messages"]})
        assert found["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1
    other = [{**bodies[1]["messages"][0]}, answer, asked]
    other[0] = openai(data_of(5), "Look")["messages"][0]
    found = seeing.post("/v1/cache/lookup", {"messages": other})
    assert found["reason"] == "picture"


def test_tool_results_with_pictures(seeing: LocalServer, vision: Runtime) -> None:
    """As a coding agent reads a PNG."""
    source = {"type": "base64", "media_type": "image/png", "data": data_of(6)}
    use = {"type": "tool_use", "id": "t1", "name": "Read", "input": {"file_path": "a.png"}}
    result = {"type": "tool_result", "tool_use_id": "t1"}
    tool = {"name": "Read", "input_schema": {"type": "object", "properties": {}}}
    body = {
        "model": "demo",
        "tools": [tool],
        "messages": [
            {"role": "user", "content": "Read a.png"},
            {"role": "assistant", "content": [use]},
            {
                "role": "user",
                "content": [{**result, "content": [{"type": "image", "source": source}]}],
            },
        ],
        **FEW,
    }
    before = encoded(vision)
    assert seeing.post(MESSAGES, body)["usage"]["output_tokens"] == 4
    again = seeing.post(MESSAGES, body)
    assert again["usage"]["input_tokens"] == 1
    assert encoded(vision) == before + 1
    output = {
        "type": "function_call_output",
        "call_id": "t1",
        "output": [{"type": "input_image", "image_url": f"data:image/png;base64,{source['data']}"}],
    }
    call = {"type": "function_call", "call_id": "t1", "name": "Read", "arguments": "{}"}
    said = {"role": "user", "content": "Read a.png"}
    answer = seeing.post(
        RESPONSES, {"model": "demo", "input": [said, call, output], "max_output_tokens": 4}
    )
    assert answer["status"] in ("completed", "incomplete")
    assert encoded(vision) == before + 1


def test_tokens_of_prompts_with_pictures(seeing: LocalServer) -> None:
    """They are counted as they are computed, and go back to text without the rows of pictures. A
    file may be in base64 of many lines, as programs write it."""
    body = openai(data_of(14))
    num_prompt = seeing.post(CHAT, body)["usage"]["prompt_tokens"]
    given = {"messages": body["messages"], "return_token_strs": True}
    made = seeing.post("/tokenize", given)
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) == num_prompt
    text = seeing.post("/detokenize", {"tokens": made["tokens"]})["prompt"]
    assert "What is it?" in text
    for wrong in (1 << 29, 1 << 31, -1):
        assert "must be between" in refused(seeing, "/detokenize", {"tokens": [wrong]})["message"]
    lines = base64.encodebytes(base64.b64decode(data_of(14))).decode()
    assert "\n" in lines.strip()
    said = {"model": "demo", "messages": anthropic(lines)["messages"]}
    counted = seeing.post("/v1/messages/count_tokens", said)
    assert counted["input_tokens"] == num_prompt


def test_ids_of_other_tenants_pictures(
    vision: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They can be guessed. A tenant that has sent the same picture may use them."""
    keys = {name: {"authorization": f"Bearer key-of-{name}-0123456789"} for name in ("ann", "bob")}
    file = tmp_path / "keys"
    file.write_text("".join(f"{name} key-of-{name}-0123456789\n" for name in keys))
    file.chmod(0o600)
    monkeypatch.setattr(vision.pictures, "has_tenants", False)  # afterwards, too
    with LocalServer(vision, Tenants.load(str(file))) as served:
        said = {"messages": openai(data_of(15))["messages"]}
        ids = served.post("/tokenize", said, headers=keys["ann"])["tokens"]
        requests = {
            "/v1/completions": {"model": "demo", "prompt": ids, "max_tokens": 2},
            "/generate": {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}},
            "/v1/score": {"prompt": ids, "candidates": ["yes"]},
        }

        def ask(name: str) -> Iterator[tuple[int, str]]:
            for path, body in requests.items():
                answer = served.client.post(path, json=body, headers=keys[name])
                yield answer.status_code, answer.text
            branch = served.post("/v1/branches", {"prompt": "Look"}, headers=keys[name])["id"]
            for action, body in (("extend", {"tokens": ids}), ("generate", {"max_tokens": 2})):
                path = f"/v1/branches/{branch}/{action}"
                answer = served.client.post(path, json=body, headers=keys[name])
            yield answer.status_code, answer.text

        assert {status for status, _ in ask("ann")} == {200}
        for status, text in ask("bob"):
            assert status == 400
            assert "is of no picture that is kept" in text
        served.post(CHAT, openai(data_of(15)), headers=keys["bob"])
        assert {status for status, _ in ask("bob")} == {200}


def test_streams(seeing: LocalServer) -> None:
    events = seeing.stream(CHAT, openai(data_of(7)))
    plain = seeing.post(CHAT, openai(data_of(7)))
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert text == plain["choices"][0]["message"]["content"]


def test_literal_markers_of_callers_are_text(seeing: LocalServer, vision: Runtime) -> None:
    ids = vision.tokenize([{"role": "user", "content": "<image> is a word"}])
    assert ids.max() < 1 << 30
    body = openai(data_of(8), "<image>")
    assert seeing.post(CHAT, body)["usage"]["completion_tokens"] == 4
    forged = "\ufdd1" + "0" * 64 + "\ufdd1"
    error = refused(seeing, CHAT, openai(data_of(8), forged))
    assert "U+FDD1" in error["message"]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def scans(count: int) -> bytes:
    """A progressive JPEG whose last scan stands so often."""
    file = io.BytesIO()
    Image.new("L", (2000, 2000), 128).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data[data.rfind(b"\xff\xda") : -2]
    return data[:-2] + count * last + data[-2:]


def large_tile(side: int) -> bytes:
    """A TIFF of 16 x 16 pixels in one tile of so many pixels a side."""
    data = zlib.compress(bytes(1000))
    tags = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: side, 323: side}
    tags |= {324: 8 + 2 + 12 * 10 + 4, 325: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + data


GIF = b"GIF89a" + struct.pack("<HHBBB", 5, 5, 0, 0, 0)
BMP = struct.pack("<2sIHHI", b"BM", 0, 0, 0, 54 + 1024)
BMP += struct.pack("<IiiHHIIiiII", 40, 7000, 7000, 1, 8, 1, 0, 0, 0, 256, 0)

BOMBS = {
    "pixels": (png(100_000, 100_000), "pixels"),
    "deflate": (png(60_000, 60_000, zlib.compress(bytes(20_000_000), 9)), "pixels"),
    "cut": (png(50, 50, zlib.compress(bytes(10))), "cannot be decoded"),
    "nothing": (b"", "cannot be decoded"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be decoded"),
    "texts": (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 5, 5, 8, 2, 0, 0, 0))
        + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100_000_000), 9)),
        "cannot be decoded",
    ),
    "line": (png(1, 40_000, zlib.compress(bytes(160_000))), "200 times the other"),
    "chunks": (png(5, 5)[:33] + 100_000 * chunk(b"prIv", b""), "50000 parts"),
    "empty data": (png(5, 5)[:33] + 100_000 * chunk(b"IDAT", b""), "50000 parts"),
    "comments": (GIF + 200_000 * b"\x21\xfe\x01a\0" + b";", "50000 parts"),
    "runs": (BMP + bytes(1024) + 200_000 * b"\x01\0", "50000 parts"),
    "scans": (scans(2000), "100 scans"),
    "tile": (large_tile(30_000), "30000 x 30000 pixels"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(seeing: LocalServer, name: str) -> None:
    file, message = BOMBS[name]
    body = openai(base64.b64encode(file).decode())
    began = time.monotonic()
    error = refused(seeing, CHAT, body)
    assert time.monotonic() - began < 1.0
    assert message in error["message"]
    assert error["param"] == "messages[0].content[0]"


def test_openais_own_examples(seeing: LocalServer) -> None:
    """As its guide has them: a file in base64 in a chat, and as an input of a response."""
    openai: Any = pytest.importorskip("openai", reason="pip install openai")
    url = f"data:image/png;base64,{data_of(11)}"
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none") as client:
        text = {"type": "text", "text": "What is in this image?"}
        content = [text, {"type": "image_url", "image_url": {"url": url, "detail": "high"}}]
        said: Any = [{"role": "user", "content": content}]
        chat = client.chat.completions.create(model="demo", messages=said, max_tokens=4)
        assert chat.usage.prompt_tokens > 16
        parts = [
            {"type": "input_text", "text": "What is in this image?"},
            {"type": "input_image", "image_url": url},
        ]
        asked: Any = [{"role": "user", "content": parts}]
        answer = client.responses.create(model="demo", input=asked, max_output_tokens=16)
        assert answer.usage.input_tokens == chat.usage.prompt_tokens
        assert answer.usage.input_tokens_details.cached_tokens >= chat.usage.prompt_tokens - 1


def test_large_files(seeing: LocalServer) -> None:
    """A picture may be longer than other texts of a body, and no text in its place or beside it."""
    large = io.BytesIO()
    Image.effect_noise((1800, 1800), 90).save(large, "PNG", compress_level=0)
    data = base64.b64encode(large.getvalue()).decode()
    assert len(data) > 4 << 20
    count = seeing.post(CHAT, openai(data))["usage"]["prompt_tokens"]
    assert seeing.post(RESPONSES, responses(data))["usage"]["input_tokens"] == count > 16
    usage = seeing.post(MESSAGES, anthropic(data))["usage"]
    assert usage["cache_read_input_tokens"] >= count - 1
    data = base64.b64encode(bytes((20 << 20) + 1)).decode()
    assert "more than 20971520 bytes" in refused(seeing, CHAT, openai(data))["message"]
    said = openai(data_of(1), "A" * (5 << 20))
    assert "the body has a text of more than" in refused(seeing, CHAT, said)["message"]
    said = openai("a picture! " * (1 << 19))
    assert "the body has a text of more than" in refused(seeing, CHAT, said)["message"]
    said = openai("A" * (28 << 20))
    assert "the body has a text of more than" in refused(seeing, CHAT, said)["message"]
    with pytest.raises(InvalidRequest, match="more than 20971520 bytes"):
        read_source({"type": "image", "base64": data}, 20 << 20, None, has_files=False)


def test_many_pictures(seeing: LocalServer) -> None:
    part = openai(data_of(1))["messages"][0]["content"][0]
    body = {"model": "demo", "messages": [{"role": "user", "content": [part] * 101}], **FEW}
    assert "more than 100 pictures" in refused(seeing, CHAT, body)["message"]
    body = {"model": "demo", "messages": [{"role": "user", "content": [part] * 60}], **FEW}
    assert "together more than 1024 tokens" in refused(seeing, CHAT, body)["message"]


def test_large_pictures_together(seeing: LocalServer, vision: Runtime) -> None:
    """They are refused before any is decoded."""
    part = openai(base64.b64encode(png(7_000, 7_000)).decode())["messages"][0]["content"][0]
    body = {"model": "demo", "messages": [{"role": "user", "content": [part] * 11}], **FEW}
    assert "together more than 500000000 pixels" in refused(seeing, CHAT, body)["message"]
    assert vision.pictures is not None
    reader = vision.pictures.of_callers(lambda *_: png(50, 50) + bytes(20_000_000)).of_prompt()
    url = {"type": "image", "source": {"type": "url", "url": "https://images.example/a.png"}}
    for _ in range(5):
        reader.open(url)
    with pytest.raises(InvalidRequest, match="together more than 104857600 bytes"):
        reader.open(url)


def test_slow_hosts_together(vision: Runtime) -> None:
    """The URLs of a prompt take so long together as four alone."""
    spent: list[float] = []

    def fetch(_: str, __: int, spent_s: float = 0.0) -> bytes:
        spent.append(spent_s)
        time.sleep(0.01)
        return png(50, 50)

    assert vision.pictures is not None
    reader = vision.pictures.of_callers(fetch).of_prompt()
    for _ in range(3):
        reader.open({"type": "image", "url": "https://images.example/a.png"})
    assert all(seconds >= 0.01 * number for number, seconds in enumerate(spent))
    with pytest.raises(InvalidRequest, match="takes too long"):
        UrlFetcher(["images.example"], 2.0)("https://images.example/a.png", 1_000, 8.1)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "a picture is"),
        ({"type": "image_url", "image_url": {"url": 5}}, "a picture is"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "a picture is"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "a picture is"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}, "valid base64"),
        ({"type": "image_url", "image_url": {"url": "data:text/html;base64,AA=="}}, "of an image"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,AA"}}, "in base64"),
        ({"type": "image_url", "image_url": {"url": "https://a.example/b"}}, "allowed_media"),
    ],
)
def test_parts_that_are_no_pictures(
    seeing: LocalServer, part: dict[str, Any], message: str
) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": [part]}], **FEW}
    error = refused(seeing, CHAT, body)
    assert message in error["message"]
    assert error["param"] == "messages[0].content[0]"


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (CHAT, {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}),
        (CHAT, {"type": "video_url", "video_url": {"url": "https://images.example/a.mp4"}}),
        (RESPONSES, {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}),
        (MESSAGES, {"type": "video", "source": {"type": "base64", "data": "AA=="}}),
    ],
)
def test_audio_and_video_are_refused_by_name(
    seeing: LocalServer, vision: Runtime, path: str, part: dict[str, Any]
) -> None:
    said = [{"role": "user", "content": [part]}]
    where = "input" if path == RESPONSES else "messages"
    body = {"model": "demo", where: said, "max_tokens": 4}
    if path == RESPONSES:
        body["max_output_tokens"] = body.pop("max_tokens")
    message = refused(seeing, path, body)["message"]
    assert f"[0].content[0].type {part['type']!r} is not supported" in message
    with pytest.raises(InvalidRequest, match=part["type"]):
        vision.generate(said)


def test_roles_without_pictures(seeing: LocalServer) -> None:
    body = openai(data_of(1))
    body["messages"].insert(0, {**body["messages"][0], "role": "system"})
    assert "of user and tool may" in refused(seeing, CHAT, body)["message"]


def test_a_text_model_refuses_by_name(served: LocalServer) -> None:
    error = refused(served, CHAT, openai(data_of(1)))
    assert error["param"] == "messages[0].content[0].type"
    assert "the model takes text only" in error["message"]
    assert "takes text only" in refused(served, MESSAGES, anthropic(data_of(1)))["message"]


def test_claude_code_knows_a_refused_picture(seeing: LocalServer, served: LocalServer) -> None:
    """By words that it looks for. Without them it sends the picture again with every turn."""
    broken = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(100)).decode()
    for server in (seeing, served):
        message = refused(server, MESSAGES, anthropic(broken))["message"]
        assert message.startswith("Could not process image: ")
        for path, body in ((CHAT, openai(broken)), (RESPONSES, responses(broken))):
            assert refused(server, path, body)["code"] == "invalid_image"


# -- URLs -----------------------------------------------------------------------------------------


class _Pictures(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("location", self.path.removeprefix("/to/"))
            self.end_headers()
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # nobody waits for it
                for _ in range(20):
                    self.wfile.write(b"\x89")
                    time.sleep(0.1)
        elif self.path == "/large":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(bytes(30 << 20))
        else:
            is_picture = self.path.partition("?")[0] == "/a.png"
            self.send_response(200 if is_picture else 404)
            self.end_headers()
            self.wfile.write(as_file(picture(9)) if is_picture else b"")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_address[1]}"
    server.shutdown()


def test_urls_of_allowed_hosts(
    seeing: LocalServer, vision: Runtime, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vision.pictures is not None
    fetch = UrlFetcher(["localhost"], allows_private=True)
    monkeypatch.setattr(seeing.server, "pictures", vision.pictures.of_callers(fetch))
    data, url = openai(data_of(9)), openai("")
    cold = seeing.post(CHAT, data)
    for place in (f"{site}/a.png", f"{site}/to//a.png", f"{site}/to/{site}/a.png"):
        url["messages"][0]["content"][0]["image_url"] = {"url": place}
        warm = seeing.post(CHAT, url)
        assert warm["choices"][0]["message"] == cold["choices"][0]["message"]
    url["messages"][0]["content"][0]["image_url"] = {"url": f"{site}/b.png"}
    assert "is answered 404" in refused(seeing, CHAT, url)["message"]


def test_slow_hosts_hold_up_nobody_else(
    seeing: LocalServer, vision: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long texts are tokenised in threads, too, and pictures in base64 decoded."""
    assert vision.pictures is not None
    fetching, answers = threading.Semaphore(0), threading.Event()

    def fetch(*_: object) -> bytes:
        fetching.release()
        assert answers.wait(PATIENCE_S)
        return as_file(picture(9))

    monkeypatch.setattr(seeing.server, "pictures", vision.pictures.of_callers(fetch))
    chat = openai("")
    chat["messages"][0]["content"][0]["image_url"] = {"url": "https://images.example/a.png"}
    text = {"model": "demo", "messages": [{"role": "user", "content": "a " * 5000}]}
    with ThreadPoolExecutor(40) as pool:
        chats = [pool.submit(seeing.post, CHAT, chat) for _ in range(40)]
        for _ in range(min(32, (os.cpu_count() or 1) + 4)):  # the threads of asyncio's pool
            assert fetching.acquire(timeout=PATIENCE_S)
        try:
            assert refused(seeing, CHAT, text)["code"] == "context_length_exceeded"
            assert seeing.post(MESSAGES, anthropic(data_of(9)))["usage"]["output_tokens"] == 4
        finally:
            answers.set()
        assert all(future.result(PATIENCE_S)["choices"] for future in chats)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/slow", "takes too long"),
        ("/large", "more than 1000 bytes"),
        ("/to/http://other.example/a.png", "has not allowed"),
        ("/to/file:///etc/passwd", "must be http"),
        ("/to//to//to//to//to//to//to//a.png", "redirects"),
    ],
)
def test_what_hosts_may_not_do(site: str, path: str, message: str) -> None:
    fetch = UrlFetcher(["localhost"], 0.5, allows_private=True)
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match=message):
        fetch(site + path, 1_000)
    assert time.monotonic() - began < 1.0


LOOPBACK = (  # forms of one address
    *("localhost", "localhost.", "LOCALHOST", "127.0.0.1", "127.0.0.1.", "127.1", "2130706433"),
    *("017700000001", "0177.0.0.1", "0x7f.1", "0x7f000001", "0", "0.0.0.0", "127.127.127.127"),
    *("①②⑦.⓪.⓪.①", "127。0。0。1", "１２７.0.0.1", "ⓛocalhost"),
    *("[::1]", "[::]", "[0:0::0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]"),
    *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[2001:0:7f00:1::1]", "[::1%25lo]", "[fe80::1%25lo]"),
)
ELSEWHERE = (  # of networks outside the internet, or that are not given out
    *("169.254.169.254", "2852039166", "[fd00:ec2::254]", "[64:ff9b::a9fe:a9fe]", "10.1.2.3"),
    *("100.64.0.1", "192.168.1.1", "172.16.9.9", "198.18.0.1", "224.0.0.1", "255.255.255.255"),
    *("[ff02::1]", "[fec0::1]", "[fc00::1]", "[::ffff:0:7f00:1]", "[64:ff9b:1::808:808]"),
    *("[2600:1f18::5efe:7f00:1]", "[3fff::1]", "[5f00::1]"),
)


def test_private_addresses() -> None:
    """Also of hosts that were allowed by mistake, in each form of an address that is known."""
    for host in (*LOOPBACK, *ELSEWHERE):
        fetch = UrlFetcher([host.strip("[]"), host.strip("[]").replace("%25", "%")], 1.0)
        began = time.monotonic()
        for scheme in ("http", "hTTps"):
            with pytest.raises(InvalidRequest) as caught:
                fetch(f"{scheme}://{host}:9/a.png", 1_000)
            assert "not of the internet" in str(caught.value) or "cannot be" in str(caught.value)
            assert "refused" not in str(caught.value), host  # a connection was tried
        assert time.monotonic() - began < 1.0, host


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://user@images.example/a.png", "must be http"),
        ("http://:word@images.example/a.png", "must be http"),
        ("http://images.example\\@localhost/a.png", "must be http"),
        ("http://localhost#@images.example/a.png", "has not allowed"),
        ("http://localhost\\.images.example/a.png", "has not allowed"),
        ("http://images.example.localhost/a.png", "has not allowed"),
        ("http://a.images.example/a.png", "has not allowed"),
        ("http:///images.example/a.png", "has not allowed"),
        ("http:images.example", "has not allowed"),
        ("ftp://images.example/a.png", "must be http"),
        ("file://images.example/etc/passwd", "must be http"),
        ("//images.example/a.png", "must be http"),
        ("http://images.example:99999/a.png", "is not a URL"),
        ("http://images.example:a/a.png", "is not a URL"),
        ("http://[::1/a.png", "is not a URL"),
        ("http://images.example℀/a.png", "is not a URL"),
        (f"http://{'a' * 64}.example/a.png", "is not a URL"),
        (f"http://images.example/{'a' * 9_000}", "more than 8192 characters"),
    ],
)
def test_urls_that_are_refused(monkeypatch: pytest.MonkeyPatch, url: str, message: str) -> None:
    """None is looked up."""
    monkeypatch.setattr("socket.getaddrinfo", None)
    with pytest.raises(InvalidRequest, match=message):
        UrlFetcher(["images.example"], 1.0)(url, 1_000)


def resolve_with(monkeypatch: pytest.MonkeyPatch, look_up: Callable[[str], list[str]]) -> None:
    """Names are looked up by a function, addresses as they are."""
    real = socket.getaddrinfo

    def resolve(host: str, port: int, *args: Any, **options: Any) -> Any:
        if host[0].isdigit():
            return real(host, port, *args, **options)
        return [(0, 0, 0, "", (address, port)) for address in look_up(host)]

    monkeypatch.setattr("socket.getaddrinfo", resolve)


def test_a_name_whose_address_changes(monkeypatch: pytest.MonkeyPatch, site: str) -> None:
    """It is looked up once for each connection, which goes to the address that was checked. All of
    its addresses are checked, and tried."""
    answers = [["93.184.216.34"], ["127.0.0.1"], ["93.184.216.34", "127.0.0.1"]]
    asked: list[str] = []

    def look_up(_: str) -> list[str]:
        return answers.pop(0)

    def connect(_: object, address: str, *__: object) -> Any:
        asked.append(address)
        raise httpcore.ConnectError("no route")

    resolve_with(monkeypatch, look_up)
    fetch = UrlFetcher(["images.example"], 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(httpcore.SyncBackend, "connect_tcp", connect)
        for message in ("no route", "not of the internet", "not of the internet"):
            with pytest.raises(InvalidRequest, match=message):
                fetch("http://images.example/a.png", 1_000)
        assert asked == ["93.184.216.34"]
    port = site.rpartition(":")[2]
    answers.append(["127.0.0.2", "127.0.0.1"])  # nothing listens at the first one
    fetch = UrlFetcher(["images.example"], 1.0, allows_private=True)
    assert fetch(f"HTTP://Images.Example.:{port}/a.png", 1 << 20) == as_file(picture(9))


def test_names_and_paths_beyond_ascii(monkeypatch: pytest.MonkeyPatch, site: str) -> None:
    looked_up: list[str] = []

    def look_up(host: str) -> list[str]:
        looked_up.append(host)
        return ["127.0.0.1"]

    resolve_with(monkeypatch, look_up)
    fetch = UrlFetcher(["Bücher.example"], 1.0, allows_private=True)
    for host in ("bücher.example", "BÜCHER。example", "xn--bcher-kva.example"):
        url = f"http://{host}:{site.rpartition(':')[2]}/to//a.png?x=ü y%20z"
        assert fetch(url, 1 << 20) == as_file(picture(9))
    assert {*looked_up} == {"xn--bcher-kva.example"}


def test_resolvers_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look-up ends at the deadline, also where more hang than may at once."""
    fetch, ends = UrlFetcher(["images.example"], 0.1), threading.Event()

    def hang(*_: object, **__: object) -> None:
        ends.wait(30)
        raise OSError("no address")

    monkeypatch.setattr("socket.getaddrinfo", hang)
    try:
        with ThreadPoolExecutor(40) as pool:
            began = time.monotonic()
            answers = [pool.submit(fetch, "https://images.example/a.png", 100) for _ in range(40)]
            for answer in answers:
                with pytest.raises(InvalidRequest, match="takes too long"):
                    answer.result(5)
            assert time.monotonic() - began < 5
            assert sum("pictures" in one.name for one in threading.enumerate()) <= 34
    finally:
        ends.set()
    with pytest.raises(InvalidRequest, match="no address"):
        UrlFetcher(["images.example"], 5.0)("https://images.example/a.png", 100)


def test_addresses() -> None:
    public = ("8.8.8.8", "2606:4700:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8")
    private = (
        *("0.0.0.0", "10.0.0.1", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1"),
        *("192.168.0.1", "192.0.0.8", "192.88.99.1", "224.0.0.1", "255.255.255.255", "::", "::1"),
        *("::127.0.0.1", "::8.8.8.8", "::ffff:0:8.8.8.8", "fe80::1%eth0", "fec0::1", "fc00::1"),
        *("ff02::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::808:808", "2002:808:808::1"),
        *("2001:db8::1", "2001::1", "3fff::1", "5f00::1", "4000::1", "2600::200:5efe:8.8.8.8"),
    )
    assert [address for address in public if not is_public(address)] == []
    assert [address for address in private if is_public(address)] == []
