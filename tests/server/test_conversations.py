"""Histories stay exact: the ids that were generated are gone on from, not tokenised again."""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

import httpx

from radixserve import Runtime
from radixserve.server.gate import session_table
from radixserve.text import chat_clocks
from radixserve.text.conversations import AnsweredChat, ConversationTable
from tests.pacing import held, wait_until
from tests.server.local_server import LocalServer

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Tell me anything."}


def turn(served: LocalServer, messages: list[dict[str, str]], **fields: Any) -> Any:
    body = {"messages": messages, "max_tokens": 24, "return_token_ids": True, **fields}
    return served.post(CHAT, body)


def next_messages(answer: Any, content: str | None = None) -> list[dict[str, str]]:
    said = answer["choices"][0]["message"]["content"] if content is None else content
    return [USER, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]


def wild_answer(served: LocalServer, runtime: Runtime, salt: str) -> Any:
    """One whose text tokenises differently the second time."""
    assert runtime.tokenizer is not None
    for seed in range(50):
        answer = turn(served, [USER], temperature=2.0, seed=seed, cache_salt=salt,
                      ignore_eos=True, stop_token_ids=[])  # fmt: skip
        (choice,) = answer["choices"]
        text, ids = choice["message"]["content"], choice["token_ids"]
        if runtime.tokenizer.encode_more(text) != ids and not set(ids) & set(range(7)):
            return answer
    raise AssertionError("every answer tokenises the same twice")


def test_ids_that_tokenise_differently_are_reused_fully(
    served: LocalServer, runtime: Runtime
) -> None:
    answer = wild_answer(served, runtime, "exact")
    ids = answer["choices"][0]["token_ids"]
    second = turn(served, next_messages(answer), cache_salt="exact")
    known = [*answer["prompt_token_ids"], *ids]
    assert second["prompt_token_ids"][: len(known)] == known
    # The last token that was sampled has not been computed: nothing came after it.
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == len(known) - 1
    events = served.stream(CHAT, {"messages": next_messages(answer), "cache_salt": "exact",
                                  "max_tokens": 1})  # fmt: skip
    cached = events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == len(second["prompt_token_ids"]) - 1


def test_an_edited_history_is_tokenised_as_it_is(served: LocalServer, runtime: Runtime) -> None:
    answer = wild_answer(served, runtime, "edited")
    text = answer["choices"][0]["message"]["content"]
    for edited in (text + ".", text[:-1], "x" + text, text[: len(text) // 2]):
        messages = next_messages(answer, edited)
        second = turn(served, messages, cache_salt="edited", max_tokens=1)
        assert second["prompt_token_ids"] == runtime.tokenize(messages).tolist()


def test_another_namespace_does_not_know_the_conversation(
    served: LocalServer, runtime: Runtime
) -> None:
    answer = wild_answer(served, runtime, "here")
    messages = next_messages(answer)
    second = turn(served, messages, cache_salt="there", max_tokens=1)
    assert second["prompt_token_ids"] == runtime.tokenize(messages).tolist()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_stream_is_remembered_and_a_stop_string_cuts(
    served: LocalServer, runtime: Runtime
) -> None:
    assert runtime.tokenizer is not None
    body = {"messages": [USER], "max_tokens": 30, "temperature": 1.0, "seed": 4, "stop": [" "],
            "cache_salt": "cut", "return_token_ids": True}  # fmt: skip
    events = served.stream(CHAT, body)
    pieces = [choice for event in events for choice in event["choices"]]
    text = "".join(piece["delta"].get("content", "") for piece in pieces)
    messages = [USER, {"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
    second = turn(served, messages, cache_salt="cut", max_tokens=1)
    ids = second["prompt_token_ids"]
    rendered = runtime.tokenizer.render_chat(messages)
    assert runtime.tokenizer.decode(ids, keep_special=True) == rendered
    length = len(runtime.tokenize([USER]))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= length


def test_a_whole_conversation_computes_only_what_is_new(served: LocalServer) -> None:
    messages: list[dict[str, str]] = []
    known = 0
    for number in range(4):
        messages.append({"role": "user", "content": f"Question {number}?"})
        answer = turn(served, messages, cache_salt="whole", temperature=1.3, seed=number,
                      session_id="whole")  # fmt: skip
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= known - 1
        known = usage["total_tokens"] - (answer["choices"][0]["finish_reason"] == "stop")
        content = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
    assert served.client.delete("/v1/sessions/whole?cache_salt=whole").status_code == 200


def test_a_session_is_closed_when_its_time_is_over(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(session_table, "time", SimpleNamespace(monotonic=lambda: now))
    before = runtime.cache_stats()["sessions"]
    with LocalServer(runtime, session_lease=2) as served:
        turn(served, [USER], session_id="short", max_tokens=1)
        for now, num_open in ((101.9, 1), (102.1, 0)):  # noqa: B007
            served.server.sessions.close_expired()
            assert runtime.cache_stats()["sessions"] == before + num_open
        assert served.client.delete("/v1/sessions/short").status_code == 404


def test_a_session_that_is_closed_too_early_is_closed_again(runtime: Runtime) -> None:
    before = runtime.cache_stats()["sessions"]
    with LocalServer(runtime, max_conversations=0) as served:  # it keeps none
        turn(served, [USER], session_id="s", max_tokens=1)
        assert runtime.cache_stats()["sessions"] == before


def test_leased_pages_fall_back_after_a_compaction() -> None:
    """What the session has left behind is superseded, in the counts and in the metrics."""
    with (
        Runtime("demo", num_pages=1_024, admission="greedy") as runtime,
        LocalServer(runtime) as served,
    ):
        system, leased = list(range(300, 320)), []
        for number, size in enumerate((300, 20, 30)):  # the second history begins anew
            history = [*system, *range(400 + min(1, number), 400 + number + size)]
            body = {"prompt": history, "max_tokens": 1, "session_id": "agent"}
            served.post("/v1/completions", body)
            leased.append(runtime.cache_stats()["pages_leased"])
        assert leased == [320, 40, 51]
        assert runtime.cache_stats()["superseded_tokens"] == 300
        assert "radixserve:superseded_tokens_total 300.0" in served.client.get("/metrics").text
        (victim, *_) = runtime.eviction_preview(1)
        assert victim["reason"] == "superseded: its session went on without it"


def test_a_newer_request_takes_the_place_of_one_that_waits(
    served: LocalServer, runtime: Runtime
) -> None:
    busy = {"prompt": [5, 6, 7], "max_tokens": 9, "ignore_eos": True, "n": 20}
    waits = {"prompt": "This one waits", "max_tokens": 1, "session_id": "s", "priority": -1}
    with ThreadPoolExecutor(3) as pool:

        def ask(body: dict[str, Any]) -> Future[httpx.Response]:
            return pool.submit(served.client.post, "/v1/completions", json=body)

        with held(runtime, steps=6):  # 16 run
            first = ask(busy)
            wait_until(lambda: runtime.status().waiting == 4)
            older = ask(waits)
            wait_until(lambda: runtime.status().waiting == 5)
            newer = ask({**waits, "supersede": True})
            assert older.result().status_code == 409
        assert first.result().status_code == newer.result().status_code == 200
    served.client.delete("/v1/sessions/s")


def test_the_billing_header_is_taken_out(served: LocalServer, runtime: Runtime) -> None:
    def messages(hash_: str) -> list[dict[str, str]]:
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={hash_};\n"
        return [{"role": "system", "content": header + "You write code."}, USER]

    before = served.server.num_billing_headers
    first = turn(served, messages("a1"), cache_salt="bill", max_tokens=1)
    second = turn(served, messages("b2"), cache_salt="bill", max_tokens=1)
    length = second["usage"]["prompt_tokens"]
    assert first["prompt_token_ids"] == second["prompt_token_ids"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == length - 1
    assert served.server.num_billing_headers == before + 2
    assert "radixserve:billing_headers_total" in served.client.get("/metrics").text
    with LocalServer(runtime, keep_billing_header=True) as keeping:
        kept = turn(keeping, messages("c3"), cache_salt="bill", max_tokens=1)
        assert kept["prompt_token_ids"] == runtime.tokenize(messages("c3")).tolist()


def test_messages_of_answers_are_taken_back(served: LocalServer) -> None:
    """Whatever a server may have put into them, and members that nobody knows."""
    for said, text in (
        ({"content": None, "reasoning_content": "Hm."}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": [], "annotations": [], "audio": None, "refusal": None}, ""),
        ({"content": [{"type": "text", "text": ""}, {"type": "refusal", "refusal": "-"}]}, "\n-"),
        ({"content": "Yes.", "annotations": [{"type": "url_citation"}], "audio": {"id": "a"},
          "function_call": None, "unknown": 5}, "Yes."),
    ):  # fmt: skip
        messages = [USER, {"role": "assistant", **said}, {"role": "user", "content": "And?"}]
        plain = [USER, {"role": "assistant", "content": text}, messages[-1]]
        tokens = [
            served.post("/tokenize", {"messages": chat})["tokens"] for chat in (messages, plain)
        ]
        assert tokens[0] == tokens[1]


def test_the_longest_beginning_is_found() -> None:
    """Against a search through all of them."""
    rng = random.Random(1)
    for _ in range(200):
        table = ConversationTable(40)
        texts: list[tuple[str, str, str]] = []
        for _ in range(rng.randint(0, 60)):
            space, answer = rng.choice("xy"), rng.choice("pq")
            text = "".join(rng.choice("ab") for _ in range(rng.randint(1, 9)))
            table.note(space, AnsweredChat(text, np.empty(0, np.int32), answer))
            texts = [one for one in texts if one[:2] != (space, text)]
            texts = [*texts, (space, text, answer)][-40:]
        assert len(table) == len(texts)
        for _ in range(20):
            space, answers = rng.choice("xyz"), rng.choice([["p"], ["q"], ["p", "q"], []])
            text = "".join(rng.choice("ab") for _ in range(rng.randint(0, 10)))
            fits = [one for s, one, a in texts if s == space and a in answers
                    and text.startswith(one)]  # fmt: skip
            found = table.find(space, text, answers)
            assert (None if found is None else found.text) == max(fits, key=len, default=None)
            if found is not None:  # it is the last used one now
                texts = [*(o for o in texts if o[:2] != (space, found.text)),
                         (space, found.text, found.answer)]  # fmt: skip


class Clock:
    """Stands for `datetime`; its time is set by tests."""

    time = datetime(2026, 3, 31, 23, 59)

    @classmethod
    def now(cls) -> datetime:
        return cls.time


def test_a_day_ends_and_open_conversations_stay_cached(
    served: LocalServer, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over chat and messages: the template's date is that of the first turn."""
    assert runtime.tokenizer is not None
    template = "Today: {{ strftime_now('%d %B %Y') }}\n" + runtime.tokenizer.chat_template
    monkeypatch.setattr(runtime.tokenizer._tokenizer, "chat_template", template)
    monkeypatch.setattr(chat_clocks, "datetime", Clock)
    for month, path in ((3, CHAT), (5, "/v1/messages")):
        monkeypatch.setattr(Clock, "time", datetime(2026, month, 31, 23, 59))
        asked = [{"role": "user", "content": f"Hi {path}"}]
        said, known, _ = answer_of(served, path, asked)
        more = [*asked, {"role": "assistant", "content": said}, {"role": "user", "content": "?"}]
        monkeypatch.setattr(Clock, "time", datetime(2026, month + 1, 1, 0, 1))
        miss = served.post("/v1/cache/lookup", {"messages": asked})
        assert miss["reason"] == "date"
        other = served.post("/v1/cache/lookup", {"messages": [{"role": "user", "content": "3"}]})
        assert other["reason"] == "date"
        _, _, num_cached = answer_of(served, path, asked)  # a new one, with the new date
        assert num_cached < known // 2
        other = served.post("/v1/cache/lookup", {"messages": [{"role": "user", "content": "3"}]})
        assert other["reason"] == "diverged"
        _, _, num_cached = answer_of(served, path, more)
        assert num_cached >= known - 2


def answer_of(
    served: LocalServer, path: str, messages: list[dict[str, Any]]
) -> tuple[Any, int, int]:
    """The answer's content; the tokens of prompt and answer; the cached ones of the prompt."""
    body = {"model": "demo", "messages": messages, "max_tokens": 9, "temperature": 0.0}
    answer = served.post(path, body)
    usage = answer["usage"]
    if path == CHAT:
        content = answer["choices"][0]["message"]["content"]
        return content, usage["total_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
    cached = usage["cache_read_input_tokens"]
    return answer["content"], cached + usage["input_tokens"] + usage["output_tokens"], cached
