"""Bodies beyond every bound: refused, quickly, without memory, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve.checks import MAX_NESTING, shown
from radixserve.server.app import make_app
from radixserve.server.config import ServerConfig
from radixserve.server.gate import json_body, json_parse
from radixserve.server.gate.json_body import FreedMemory
from radixserve.server.gate.json_parse import (
    MAX_DEPTH,
    TOKEN_IDS,
    BodyError,
    parse,
    parse_large,
)
from radixserve.server.gate.state import AppState
from radixserve.server.gate.tenants import Tenants
from radixserve.server.prompt.prompt_input import is_large
from radixserve.text.content_marks import MARK
from tests.server.bombs import Place, bomb, places
from tests.server.watched_server import WatchedServer

MEGABYTE = 1_000_000
JSON = {"content-type": "application/json"}
LONGEST_HOLD_S = 0.05
ON_ANY_MACHINE_S = 0.5  # a slow or busy one; what hurts others takes longer
ALWAYS_TAKEN = 32 * MEGABYTE  # bytes of memory that a body may take whatever its size
SETTLED_S = 3.0  # after the last body: freed memory has been returned
_A_GROUP = 16  # bodies that are measured together
_MANY_FAULTS = 20  # then the rest is not tried


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\xff"}' + b" " * 70_000, "not UTF-8"),
        (b"[" * 60_000, "nested too deeply"),
        (b"[" * 300 + b"]" * 300, "nested too deeply"),
        (b"1" * 5000, "too many digits"),
        (b'{"a": 1', "not valid JSON"),
        (b"[" + b"{}," * 100_000 + b"{}]", "objects and lists"),
        (b"[" + b"null," * 200_000 + b"1]", "131072 values"),
        (b"[" + b"1," * 1_300_000 + b"1]", "values|token ids"),
        (json.dumps({str(number): 1 for number in range(5000)}).encode(), "members"),
        (json.dumps({"stop": ["a"] * 20_000}).encode(), "stop has more than 16384 items"),
        (json.dumps({"hints": [{}] * 20_000}).encode(), "hints has more than 16384 items"),
    ],
)
def test_what_is_no_json_or_too_much(body: bytes, message: str) -> None:
    """Read by the event loop, where it is small, and by the process of large bodies."""
    with pytest.raises(BodyError, match=message):
        parse(body)
    with pytest.raises(BodyError, match=message):
        parse_large(bytearray(body))


def test_a_body_may_hold_any_value_that_its_fields_may_be() -> None:
    assert MAX_DEPTH == 2 * MAX_NESTING


def test_what_is_long_and_right() -> None:
    ids = list(range(300_000))
    value = parse_large(bytearray(json.dumps({"prompt": ids}).encode()))
    assert list(value["prompt"]) == ids
    bias = {str(number): 0.5 for number in range(60_000)}
    assert parse_large(bytearray(json.dumps({"logit_bias": bias}).encode())) == {"logit_bias": bias}
    text = '[{"},' * 500_000  # brackets and commas inside of a string are text
    body = json.dumps({"prompt": text}).encode()
    assert parse(body) == parse_large(bytearray(body)) == {"prompt": text}
    assert parse(b'{"a": [1, "b", null, true, 1.5, {"c": []}]}')["a"][5] == {"c": []}


def test_an_error_shows_the_beginning_of_a_value() -> None:
    for value in (array("q", [1]) * 100_000, [1] * 100_000):
        assert shown(value).startswith("list [1, 1, 1,")
        assert len(shown(value)) < 90
    slices: list[slice] = []

    class Watched(array):  # type: ignore[type-arg]
        def __getitem__(self, index: Any) -> Any:
            slices.append(index)
            return super().__getitem__(index)

        def __repr__(self) -> str:
            raise AssertionError("the whole array is shown")

    assert len(shown(Watched("q", [7] * 1_000))) < 90
    assert slices == [slice(None, 40)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"name": "f", "parameters": {"type": "object"}}], False),
        ([{"name": "f", "parameters": {"k" * 1_000 + str(n): None for n in range(3_000)}}], True),
        ([["a"] * 100_000], True),
        ({"text": "a" * 1_000_000}, True),
    ],
)
def test_large_values_are_read_in_another_thread(value: Any, *, expected: bool) -> None:
    assert is_large(value) is expected


def test_both_parsers_agree() -> None:
    """But for the type of long lists of token ids."""
    chance = random.Random(5)

    def value(depth: int) -> Any:
        kind = chance.randrange(10 if depth < 5 else 7)
        if kind < 2:
            return chance.choice([0, -1, 10**30, 1.5, -2e-9, True, False, None, 2**63 - 1])
        if kind < 5:
            text = chance.choice(["a", "\u00e9", "\U0001f600", '"\\\n', "[1, 2, {", " "])
            return text * chance.randrange(4)
        if kind < 7:
            most = chance.choice([9, 10**6, 2**63 - 1, 2**70])
            return [chance.randrange(-most, most) for _ in range(chance.choice([3, 200]))]
        members = range(chance.randrange(5))
        if kind < 8:
            return [value(depth + 1) for _ in members]
        names = [*"abcde", "prompt", "tokens", "hints"]
        return {chance.choice(names): value(depth + 1) for _ in members}

    for number in range(300):
        given = value(0)
        text = json.dumps(given, ensure_ascii=number % 2 == 0, indent=number % 3 or None)
        assert plain(parse_large(bytearray(text.encode()))) == parse(text.encode()) == given


def plain(value: Any) -> Any:
    """With lists in place of arrays."""
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | json_parse.array) else value


def test_lists_of_token_ids_are_arrays_where_the_schemas_have_them() -> None:
    ids = list(range(1000))
    assert parse_large(bytearray(json.dumps({"a": ids, "prompt": {"b": ids}}).encode())) == {
        "a": ids,
        "prompt": {"b": ids},
    }
    fields = {name.removeprefix(".").removesuffix("[]") for name in TOKEN_IDS}
    of_schemas = {place.name.removesuffix("[]") for place in all_places()}
    assert fields <= of_schemas
    integers = {place.name for place in all_places() if place.item == 1 and place.kind == "list"}
    few = {"stop_token_ids", "sampling_params.stop_token_ids", "logprob_token_ids"}
    assert integers - few <= {name.removeprefix(".") for name in TOKEN_IDS}


@pytest.mark.parametrize("text", ["[1,2,03]", "[1,,2]", "[1,2,]", "[1 2]", "[--1]", "[1,\f2]"])
def test_long_lists_of_integers_are_json(text: str) -> None:
    long = text.replace("[", "[" + "7," * 1000)
    for read in (parse, lambda body: parse_large(bytearray(body))):
        with pytest.raises(BodyError, match="not valid JSON"):
            read(long.encode())


def test_values_are_counted_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_parse.json, "loads", lambda _: pytest.fail("parsed"))
    monkeypatch.setattr("pydantic_core.from_json", lambda *_, **__: pytest.fail("parsed"))
    body = b"[" + b"[]," * MEGABYTE + b"[]]"
    for read in (parse, lambda body: parse_large(bytearray(body))):
        with pytest.raises(BodyError):
            read(body)


def test_what_large_bodies_took_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for every 128 MiB of them and when no more come, beside the event loop."""
    threads = []

    def return_memory() -> None:
        threads.append(threading.current_thread())

    monkeypatch.setattr(json_body, "return_freed_memory", return_memory)

    async def end_requests() -> None:
        freed = FreedMemory()
        for index in range(3 * 128):
            freed.add(1 << 20)
            if index % 128 == 127:
                await asyncio.sleep(0.05)
        for _ in range(8192):
            freed.add(32 * 1024)
        await asyncio.sleep(0.01)
        assert len(threads) == 3
        monkeypatch.setattr(json_body, "_RETURN_AFTER_S", 0.02)
        freed.add(1 << 20)
        await asyncio.sleep(0.2)

    asyncio.run(end_requests())
    assert len(threads) == 4
    assert threading.main_thread() not in threads


def all_places() -> list[Place]:
    return places(make_app(AppState(ServerConfig(), "demo", Tenants())))


BOMBS: list[Any] = [
    {"hints": [{}] * MEGABYTE},
    {"stop_token_ids": ["a"] * MEGABYTE},
    {"stop_token_ids": [7] * 600_000, "prompt": "a"},
    {"logprob_token_ids": [*range(400_000)], "prompt": "a", "logprobs": 1},
    {"allowed_token_ids": [5] * 1_500_000},
    {"messages": [{"role": "user"}] * 15_000},
    {"messages": [{"role": "user", "content": [{}] * 16_000}]},
    {"prompt": [["a"]] * 60_000},
    {"prompt": [1.5] * MEGABYTE},
    {"input": [[]] * 90_000, "stop": [1] * 100_000},
    {"tools": [{"type": "function"}] * 15_000},
    {"logit_bias": {str(number): "a" for number in range(200_000)}},
    {"metadata": {"a" * 1000 + str(number): "b" * 1000 for number in range(3000)}},
    {"cache_salt": "s" * 10 * MEGABYTE, "prompt": "a", "messages": []},
    {"user": "u" * 20 * MEGABYTE},
    {"prompt": "\\u00e9" * MEGABYTE, "session_id": "s" * MEGABYTE},
    [[]] * 90_000,
    "text" * MEGABYTE,
]


@pytest.fixture(scope="module")
def watched() -> Iterator[WatchedServer]:
    """A server that has answered ordinary requests: what they take is not a body's fault."""
    server = WatchedServer("demo", "--num-pages", "4096", "--max-response-bytes", "16MB")
    chat = {"messages": [user("a")], "logprobs": True, "response_format": {"type": "json_object"}}
    try:
        server.wait_until_ready()
        for tokens in ([1, 2], [7] * 4_000, [1] * 50_000):  # the last is refused
            content = json.dumps({"prompt": tokens, "max_tokens": 2})
            server.client.post("/v1/completions", content=content, headers=JSON)
        content = json.dumps({**chat, "max_tokens": 50})
        server.client.post("/v1/chat/completions", content=content, headers=JSON)
        yield server
    finally:
        server.stop()


@pytest.mark.parametrize("index", range(len(BOMBS)))
def test_no_body_holds_the_loop(watched: WatchedServer, index: int) -> None:
    """Or takes memory, whatever it holds; none is a 5xx."""
    content = json.dumps(BOMBS[index]).encode()
    paths = sorted({place.path for place in all_places()})
    for path in ("/v1/completions", paths[index % len(paths)]):
        check_harmless(watched, path, content, str(index), ON_ANY_MACHINE_S)


QUESTION = {"type": "predicate", "instructions": "Is it?"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


LONG_CALL = {
    "type": "function_call",
    "call_id": "c",
    "name": "f",
    "arguments": json.dumps({"a": "a" * 2_500_000}),
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/decisions", {"input": [user("\\" * 600_000)], "questions": [QUESTION]}),
        ("/v1/decisions", {"input": [LONG_CALL], "questions": [QUESTION]}),
        ("/v1/messages/count_tokens", {"messages": [user(MARK * 830_000)]}),
        ("/generate", {"prompt": "a", "allowed_token_ids": [1] * 6_000_000}),
    ],
    ids=[
        "a long chat of decisions",
        "a call with a long text",
        "a text of marks",
        "five times as many ids as are taken",
    ],
)
def test_no_body_takes_memory(watched: WatchedServer, path: str, body: dict[str, Any]) -> None:
    """Texts that are shorter than a template may be given, and lists that are counted late."""
    check_harmless(watched, path, json.dumps(body).encode(), "", ON_ANY_MACHINE_S)


def test_no_field_of_any_route_takes_a_bomb(watched: WatchedServer) -> None:
    check_bombs(watched, 12, 1, ON_ANY_MACHINE_S)


@pytest.mark.long
@pytest.mark.timeout(36_000)
def test_no_field_of_any_route_takes_any_of_10_000_bombs(watched: WatchedServer) -> None:
    check_bombs(watched, 10_000, 2, LONGEST_HOLD_S)


def check_bombs(watched: WatchedServer, count: int, seed: int, longest_s: float) -> None:
    """Bodies for fields of all routes, by chance; afterwards the server is as large as before.

    They are measured in groups, and one by one where a group is beyond the bounds.
    """
    chance, all_of_them = random.Random(seed), all_places()
    time.sleep(SETTLED_S)
    before = watched.memory().present
    faults = []
    for first in range(0, count, _A_GROUP):
        group = []
        for _ in range(min(_A_GROUP, count - first)):
            place = chance.choice(all_of_them)
            group.append((place.path, *bomb(chance, place)))
        smallest = min(len(content) for _, _, content in group)
        if post_all(watched, group, smallest, longest_s) is not None:
            faults += [fault for body in group if (fault := fault_of(watched, *body, longest_s))]
        if len(faults) >= _MANY_FAULTS:
            break
    assert not faults, "\n".join(faults)
    time.sleep(SETTLED_S)
    assert watched.memory().present < before + 150 * MEGABYTE


def check_harmless(
    watched: WatchedServer, path: str, content: bytes, name: str, longest_s: float
) -> None:
    fault = fault_of(watched, path, name, content, longest_s)
    assert fault is None, fault


def fault_of(
    watched: WatchedServer, path: str, name: str, content: bytes, longest_s: float
) -> str | None:
    """None where the loop is held for at most `longest_s` of its thread's processor time, and at
    most three times the body's memory and 32 MB are taken: in the best of three posts. A run of the
    collector or a page fault comes once; what a body causes comes each time."""
    faults: list[str] = []
    for _ in range(3):
        fault = post_all(watched, [(path, name, content)], len(content), longest_s)
        if fault is None:
            return None
        faults.append(fault)
    return f"{path} {name}, {len(content)} bytes: {faults}"


def post_all(
    watched: WatchedServer,
    bodies: Sequence[tuple[str, str, bytes]],
    size: int,
    longest_s: float,
) -> str | None:
    """Post (path, name, body) after each other. None where meanwhile the loop was held for less
    than `longest_s` at a time, and less than three times `size` and 32 MB were taken."""
    before = watched.reset_peaks()
    watched.hold()
    for path, name, content in bodies:
        answer = watched.client.post(path, content=content, headers=JSON)
        assert answer.status_code < 500, (path, name, answer.text[:300])
    hold, taken = watched.hold(), watched.memory().peak - before
    if hold.loop_s < longest_s and taken < 3 * size + ALWAYS_TAKEN:
        return None
    return f"held for {hold.loop_s:.3f} s, {taken / MEGABYTE:.0f} MB taken"
