"""/v1/completions and /v1/chat/completions answer as Runtime does."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime, SamplingParams
from tests.server.local_server import LocalServer

PROMPTS = ["The json module", "How do I sort a list?", "def main():", "Once upon a time", "x"]


def random_sampling(rng: random.Random) -> dict[str, Any]:
    """Fields that both sides call the same."""
    fields: dict[str, Any] = {"max_tokens": rng.randint(1, 12), "seed": rng.randint(0, 99)}
    optional = {
        "temperature": rng.choice([0, 0.7, 1.5]),
        "top_k": rng.choice([-1, 5]),
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "stop": rng.choice(["e", [" the", "list"]]),
        "stop_token_ids": [300, 301],
        "ignore_eos": True,
        "n": 3,
        "priority": 1,
    }
    return fields | {name: value for name, value in optional.items() if rng.random() < 0.35}


@pytest.mark.parametrize("seed", range(6))
def test_completions_equal_those_of_runtime(
    served: LocalServer, runtime: Runtime, seed: int
) -> None:
    """To the token, the log-probability and the count of cached tokens, streamed or not."""
    rng = random.Random(seed)
    for number in range(4):
        fields = random_sampling(rng)
        texts = rng.sample(PROMPTS, rng.randint(1, 3))
        prompts = [runtime.tokenize(t).tolist() for t in texts] if rng.random() < 0.5 else texts
        logprobs = rng.choice([None, 0, 3])
        salt = f"{seed}.{number}"
        expected = runtime.generate(
            prompts, SamplingParams(**fields, logprobs=logprobs, namespace="/" + salt)
        )
        groups = [one if isinstance(one, list) else [one] for one in expected]
        runtime.flush_cache("/" + salt)
        body = {"prompt": prompts, "cache_salt": salt, "logprobs": logprobs,
                "return_token_ids": True, "return_tokens_as_token_ids": True, **fields}  # fmt: skip
        cold = served.post("/v1/completions", body)
        check_choices(cold["choices"], groups)
        usage = cold["usage"]
        assert usage["prompt_tokens"] == sum(group[0].usage.prompt_tokens for group in groups)
        cached = sum(group[0].usage.cached_tokens for group in groups)
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}
        generated = sum(one.usage.completion_tokens for group in groups for one in group)
        assert usage["completion_tokens"] == generated

        warm = runtime.generate(prompts, SamplingParams(max_tokens=1, namespace="/" + salt))
        events = served.stream("/v1/completions", body)
        check_choices(joined(events, "text"), groups)
        cached = sum(one.usage.cached_tokens for one in warm)
        assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": cached}


def check_choices(choices: list[dict[str, Any]], groups: list[list[Any]]) -> None:
    completions = [one for group in groups for one in group]
    assert [choice["index"] for choice in choices] == list(range(len(completions)))
    for choice, one in zip(choices, completions, strict=True):
        assert choice["text"] == one.text
        assert choice["token_ids"] == one.token_ids
        assert choice["finish_reason"] == one.finish_reason
        if choice["logprobs"] is not None:
            assert choice["logprobs"]["token_logprobs"] == one.logprobs
            names = [f"token_id:{token_id}" for token_id in one.token_ids]
            assert choice["logprobs"]["tokens"] == names
            tops = one.top_logprobs or [{}] * len(names)
            for found, top, name in zip(
                choice["logprobs"]["top_logprobs"], tops, names, strict=True
            ):
                assert set(found) == {f"token_id:{token_id}" for token_id in top} | {name}


def joined(events: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The choices of a stream, put together."""
    found: dict[int, dict[str, Any]] = {}
    for event in events:
        for piece in event["choices"]:
            text = piece[key] if key == "text" else piece["delta"].get("content", "")
            choice = found.setdefault(
                piece["index"], {"text": "", "token_ids": [], "logprobs": None, "index": 0}
            )
            assert choice.get("finish_reason") is None, "a choice goes on after its end"
            choice["text"] += text
            choice["token_ids"] += piece.get("token_ids", [])
            choice |= {"index": piece["index"], "finish_reason": piece["finish_reason"]}
            if piece["logprobs"] is not None:
                before = choice["logprobs"] or {name: [] for name in piece["logprobs"]}
                both = piece["logprobs"].items()
                choice["logprobs"] = {n: [*before[n], *(v or [])] for n, v in both}
    return [found[at] for at in sorted(found)]


def test_chats_equal_those_of_runtime(served: LocalServer, runtime: Runtime) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Sort a list?"}]
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=2, namespace="/chats")
    expected = runtime.generate(messages, params)
    runtime.flush_cache("/chats")
    body = {"messages": messages, "max_completion_tokens": 9, "temperature": 0, "logprobs": True,
            "top_logprobs": 2, "cache_salt": "chats", "return_token_ids": True}  # fmt: skip
    answer = served.post("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == expected.logprobs
    tops = [
        [top["logprob"] for top in one["top_logprobs"]] for one in choice["logprobs"]["content"]
    ]
    assert tops == [list(top.values()) for top in expected.top_logprobs]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    events = served.stream("/v1/chat/completions", body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    (streamed,) = joined(events, "content")
    assert streamed["text"] == expected.text
    assert streamed["token_ids"] == expected.token_ids
    assert [one["logprob"] for one in streamed["logprobs"]["content"]] == expected.logprobs
    details = events[-1]["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": answer["usage"]["prompt_tokens"] - 1}


def test_content_may_be_text_parts(served: LocalServer) -> None:
    parts = [{"type": "text", "text": "Sort"}, {"type": "text", "text": "a list?"}]
    bodies = [
        {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "seed": 1}
        for content in (parts, "Sort\na list?")
    ]
    one, other = (served.post("/v1/chat/completions", body) for body in bodies)
    assert one["choices"] == other["choices"]


def test_a_final_message_is_continued(served: LocalServer, runtime: Runtime) -> None:
    messages = [
        {"role": "user", "content": "How do I sort a list?"},
        {"role": "assistant", "content": "Call the `sort"},
    ]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 4, "temperature": 0,
            "add_generation_prompt": False}  # fmt: skip
    text = served.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    assert runtime.tokenizer is not None
    prompt = runtime.tokenizer.encode_more(
        "<|begin|><|user|>How do I sort a list?<|end|><|assistant|>Call the `sort"
    )
    expected = runtime.generate(prompt, SamplingParams(max_tokens=4, temperature=0.0))
    assert text == expected.text
    body |= {"continue_final_message": False, "return_token_ids": True}
    closed = served.post("/v1/chat/completions", body)["prompt_token_ids"]
    assert closed == runtime.tokenizer.encode_more(
        "<|begin|><|user|>How do I sort a list?<|end|><|assistant|>Call the `sort<|end|>"
    )


def test_usage_comes_where_it_is_asked_for(served: LocalServer) -> None:
    body: dict[str, Any] = {"prompt": "The json", "max_tokens": 3, "ignore_eos": True, "seed": 5}
    unasked = served.stream("/v1/completions", body)
    assert [("usage" in event) for event in unasked] == [False] * (len(unasked) - 1) + [True]
    asked = served.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert [event["usage"] for event in asked[:-1]] == [None] * (len(asked) - 1)
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"]["completion_tokens"] == 3
    options = {"include_usage": True, "continuous_usage_stats": True}
    always = served.stream("/v1/completions", {**body, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in always]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 3


def test_echo_scores_the_prompt_and_generates_nothing(
    served: LocalServer, runtime: Runtime
) -> None:
    """As harnesses for evaluations ask for it, warm and cold alike."""
    ids = runtime.tokenize("The json module provides").tolist()
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, prompt_logprobs=1)
    expected = runtime.generate(ids, params)
    for max_tokens in (0, 1):
        body = {"prompt": [ids, ids[:2]], "echo": True, "logprobs": 1, "max_tokens": max_tokens,
                "temperature": 0, "seed": 1234}  # fmt: skip
        answer = served.post("/v1/completions", body)
        found = answer["choices"][0]["logprobs"]
        assert found["token_logprobs"][: len(ids)] == expected.prompt_logprobs
        assert len(found["tokens"]) == len(ids) + max_tokens
        best = [max(top.values()) for top in found["top_logprobs"][1 : len(ids)]]
        assert best == [max(top.values()) for top in expected.prompt_top_logprobs[1:]]
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens
        text = answer["choices"][0]["text"]
        assert text == "The json module provides" + (expected.text if max_tokens else "")


def test_prompt_logprobs_are_vllms(served: LocalServer, runtime: Runtime) -> None:
    body = {"prompt": "The json", "prompt_logprobs": 2, "max_tokens": 1, "temperature": 0}
    (choice,) = served.post("/v1/completions", body)["choices"]
    ids = runtime.tokenize("The json").tolist()
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second[str(ids[1])]["decoded_token"] == " json"
    ranks = sorted(one["rank"] for one in second.values())
    assert ranks[:2] == [1, 2]
    assert len(ranks) == len(set(ranks))
    (choice,) = served.post("/v1/completions", {**body, "prompt_logprobs": 0})["choices"]
    (entry,) = choice["prompt_logprobs"][1].values()
    expected = runtime.generate("The json", SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert expected.prompt_ranks == [None, entry["rank"]]


def test_a_stream_of_echo_begins_with_the_prompt(served: LocalServer) -> None:
    body = {"prompt": ["The json", "def"], "echo": True, "max_tokens": 2, "n": 2}
    choices = joined(served.stream("/v1/completions", body), "text")
    assert [choice["text"][:3] for choice in choices] == ["The", "The", "def", "def"]


def test_best_of_returns_the_best(served: LocalServer, runtime: Runtime) -> None:
    fields = {"max_tokens": 5, "seed": 3, "n": 2, "best_of": 5}
    expected = runtime.generate("The json", SamplingParams(**fields))
    choices = served.post("/v1/completions", {"prompt": "The json", **fields})["choices"]
    assert [choice["text"] for choice in choices] == [one.text for one in expected]


def test_the_tokenizer_over_http(served: LocalServer, runtime: Runtime) -> None:
    ids = runtime.tokenize("hello there").tolist()
    found = served.post("/tokenize", {"prompt": "hello there", "return_token_strs": True})
    assert found["tokens"] == ids
    assert found["count"] == len(ids)
    assert found["token_strs"] == ["he", "ll", "o", "\u0120there"]  # as the vocabulary writes them
    assert served.post("/tokenize", {"prompt": "hello there"})["token_strs"] is None
    assert served.post("/detokenize", {"tokens": ids}) == {"prompt": "hello there"}
    messages = [{"role": "user", "content": "hi"}]
    assert (
        served.post("/tokenize", {"messages": messages})["tokens"]
        == runtime.tokenize(messages).tolist()
    )
    info = served.client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>"
    assert info["vocab_size"] == 4096


def test_models(served: LocalServer) -> None:
    (card,) = served.client.get("/v1/models").json()["data"]
    assert card["id"] == "demo"
    assert card["max_model_len"] == 4096
    assert (card["root"], card["parent"]) == ("demo", None)
    assert served.client.get("/v1/models/demo").json() == card
    assert served.client.get("/v1/models/other").status_code == 404


def test_health(served: LocalServer) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/health/startup"):
        answer = served.client.get(path)
        assert answer.status_code == 200
        assert answer.json()["status"] == "ok"
    assert served.client.get("/health").json()["cache"]["pages_total"] == 8192


def test_health_before_the_model_is_loaded() -> None:
    with LocalServer(None) as served:
        status = {p: served.client.get(f"/health/{p}").status_code for p in ("live", "ready")}
        assert status == {"live": 200, "ready": 503}
        assert served.client.get("/health/startup").status_code == 503
        answer = served.client.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "loading"


def test_named_tokens_in_place_of_the_best(served: LocalServer, runtime: Runtime) -> None:
    ids = [300, 7, 40]
    params = SamplingParams(max_tokens=3, temperature=0, logprob_token_ids=ids)
    expected = runtime.generate(PROMPTS[0], params).top_logprobs
    assert expected is not None
    body = {"prompt": PROMPTS[0], "max_tokens": 3, "temperature": 0, "logprobs": 5,
            "logprob_token_ids": ids, "return_tokens_as_token_ids": True}  # fmt: skip
    tops = served.post("/v1/completions", body)["choices"][0]["logprobs"]["top_logprobs"]
    for top, values in zip(tops, expected, strict=True):
        named = [top[f"token_id:{token_id}"] for token_id in ids]
        assert named == pytest.approx(list(values.values()), abs=1e-4)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "logprobs": True,
            "logprob_token_ids": ids, "ignore_eos": True,
            "return_tokens_as_token_ids": True}  # fmt: skip
    (choice,) = served.post("/v1/chat/completions", chat)["choices"]
    for entry in choice["logprobs"]["content"]:  # the token itself, then the named ones
        tops = entry["top_logprobs"]
        assert (tops[0]["token"], tops[0]["logprob"]) == (entry["token"], entry["logprob"])
        names = [top["token"] for top in tops]
        named = [f"token_id:{token_id}" for token_id in ids]
        assert names[1:] == [name for name in named if name != names[0]]
    for path, wrong in (
        ("/v1/completions", {**body, "logprobs": None}),
        ("/v1/chat/completions", {**chat, "logprobs": False}),
    ):
        answer = served.client.post(path, json=wrong)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "logprob_token_ids"


def test_the_side_that_is_cut_off(served: LocalServer, runtime: Runtime) -> None:
    ids = runtime.tokenize(PROMPTS[1]).tolist()
    body = {"prompt": ids, "max_tokens": 1, "return_token_ids": True, "truncate_prompt_tokens": 2}
    for side, kept in (("left", ids[-2:]), ("right", ids[:2]), (None, ids[-2:])):
        (choice,) = served.post("/v1/completions", {**body, "truncation_side": side})["choices"]
        assert choice["prompt_token_ids"] == kept
    large = {**body, "prompt": ids * 10_000, "truncation_side": "right"}  # becomes an array
    (choice,) = served.post("/v1/completions", large)["choices"]
    assert choice["prompt_token_ids"] == ids[:2]
    chat = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 1,
            "return_token_ids": True}  # fmt: skip
    whole = served.post("/v1/chat/completions", chat)["prompt_token_ids"]
    cut = {**chat, "truncate_prompt_tokens": 3, "truncation_side": "right"}
    assert served.post("/v1/chat/completions", cut)["prompt_token_ids"] == whole[:3]
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=2, truncation_side="right")
    assert runtime.generate(ids, params).usage.prompt_tokens == 2
    answer = served.client.post("/v1/completions", json={**body, "truncation_side": "up"})
    assert answer.status_code == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_of_prompt_and_answer_in_each_choice(served: LocalServer, path: str) -> None:
    asked: dict[str, Any] = {"prompt": PROMPTS[:2]}
    if "chat" in path:
        asked = {"messages": [{"role": "user", "content": "Hi"}]}
    body = {**asked, "max_tokens": 3, "n": 2, "seed": 1, "return_token_ids": True}
    whole = served.post(path, body)["choices"]
    prompts: dict[int, list[int]] = {}
    answers: dict[int, list[int]] = {choice["index"]: [] for choice in whole}
    for event in served.stream(path, body):
        if "prompt_token_ids" in event:
            assert not prompts  # in the first event of a chat, for all choices
            prompts = dict.fromkeys(answers, event["prompt_token_ids"])
        for choice in event["choices"]:
            answers[choice["index"]] += choice.get("token_ids", [])
            if "prompt_token_ids" in choice:
                assert choice["index"] not in prompts  # once
                prompts[choice["index"]] = choice["prompt_token_ids"]
    assert answers == {choice["index"]: choice["token_ids"] for choice in whole}
    assert prompts == {choice["index"]: choice["prompt_token_ids"] for choice in whole}


def test_an_answer_that_the_context_cuts_is_said_in_a_header(
    served: LocalServer, runtime: Runtime
) -> None:
    ids = [5] * (runtime.max_seq_len - 3)
    for path, name, fields in (
        ("/v1/completions", "prompt", {"max_tokens": 90}),
        ("/generate", "input_ids", {"sampling_params": {"max_new_tokens": 90}}),
        ("/generate", "prompt", {"max_tokens": 90, "stream": True}),
    ):
        answer = served.client.post(path, json={name: ids, **fields})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-radixserve-max-tokens"] == "3"
        fits = served.client.post(path, json={name: [5, 6], **fields})
        assert "x-radixserve-max-tokens" not in fits.headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_usage_where_it_is_refused_by_name(served: LocalServer, path: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 2, "prompt": "x"}
    if "chat" in path:
        asked = {"max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
    refused = {**asked, "stream_options": {"include_usage": False}}
    assert not any(event.get("usage") for event in served.stream(path, refused))
    assert served.stream(path, asked)[-1]["usage"]
