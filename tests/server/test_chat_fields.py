"""Fields of chats that vLLM's clients send, and the members of answers that they read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from tests.server.local_server import LocalServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAID = [{"role": "user", "content": "How do I sort a list?"}]
BEGUN = [*SAID, {"role": "assistant", "content": "Call the `sort"}]
BODY: dict[str, Any] = {"messages": SAID, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def wide(runtime: Runtime) -> Iterator[LocalServer]:
    """With the options of vLLM's server."""
    settings = {"max_logprobs": -1, "return_tokens_as_token_ids": True,
                "enable_force_include_usage": True, "enable_per_request_metrics": True}  # fmt: skip
    with LocalServer(runtime, **settings) as served:
        yield served


def joined(events: list[dict[str, Any]], name: str = "content") -> str:
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get(name) or "" for delta in deltas)


def test_echo_repeats_the_message_that_is_continued(served: LocalServer) -> None:
    going = {**BODY, "messages": BEGUN, "continue_final_message": True}
    plain = served.post(CHAT, going)["choices"][0]["message"]["content"]
    echoed = {**going, "echo": True}
    assert served.post(CHAT, echoed)["choices"][0]["message"]["content"] == "Call the `sort" + plain
    assert joined(served.stream(CHAT, echoed)) == "Call the `sort" + plain
    parts = [{"type": "text", "text": "Call"}, {"type": "text", "text": "it"}]
    listed = [*SAID, {"role": "assistant", "content": parts}]
    text = served.post(CHAT, {**echoed, "messages": listed})["choices"][0]["message"]["content"]
    assert text.startswith("Call\nit")
    # A question of the user's is not repeated.
    texts = [
        served.post(CHAT, {**BODY, "echo": on})["choices"][0]["message"] for on in (1 > 0, 0 > 1)
    ]
    assert texts[0] == texts[1]


def test_unasked_members_of_whole_answers_are_null(served: LocalServer) -> None:
    chat = served.post(CHAT, BODY)
    assert chat["choices"][0]["token_ids"] is None
    assert chat["choices"][0]["logprobs"] is None
    for name in ("prompt_logprobs", "prompt_token_ids", "prompt_text"):
        assert chat[name] is None
    (choice,) = served.post(TEXT, {"prompt": "x", "max_tokens": 1})["choices"]
    for name in ("prompt_logprobs", "prompt_token_ids", "token_ids", "logprobs"):
        assert choice[name] is None


def test_the_prompt_of_a_stream_is_in_its_first_event(
    served: LocalServer, runtime: Runtime
) -> None:
    body = {**BODY, "return_token_ids": True, "return_prompt_text": True, "n": 2}
    whole, events = served.post(CHAT, body), served.stream(CHAT, body)
    assert whole["prompt_token_ids"] == runtime.tokenize(SAID).tolist()
    assert runtime.tokenizer is not None
    text = runtime.tokenizer.decode(whole["prompt_token_ids"], keep_special=True)
    assert whole["prompt_text"] == text
    for name in ("prompt_token_ids", "prompt_text"):
        assert events[0][name] == whole[name]
        assert not any(name in event for event in events[1:])
        assert not any(name in choice for event in events for choice in event["choices"])


def test_special_tokens_of_the_tokenizer_before_those_of_the_template(
    served: LocalServer, runtime: Runtime
) -> None:
    assert runtime.tokenizer is not None
    before = runtime.tokenizer.encode("")
    body = {**BODY, "return_token_ids": True}
    plain = served.post(CHAT, body)["prompt_token_ids"]
    for path, name in ((CHAT, "prompt_token_ids"), ("/tokenize", "tokens")):
        asked = body if path == CHAT else {"messages": SAID}
        assert served.post(path, {**asked, "add_special_tokens": True})[name] == [*before, *plain]
        assert served.post(path, {**asked, "add_special_tokens": False})[name] == plain
    # What follows such a chat is not taken for its continuation.
    answer = served.post(CHAT, {**body, "add_special_tokens": True})["choices"][0]["message"]
    more = [*SAID, answer, {"role": "user", "content": "And a dict?"}]
    following = served.post(CHAT, {**body, "messages": more})["prompt_token_ids"]
    assert following[: len(plain)] == plain


def test_tokens_written_as_ids(served: LocalServer, wide: LocalServer) -> None:
    body = {**BODY, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    for server, fields in ((served, {"return_tokens_as_token_ids": True}), (wide, {})):
        for choice in (
            server.post(CHAT, {**body, **fields})["choices"][0],
            next(
                choice
                for event in server.stream(CHAT, {**body, **fields})
                for choice in event["choices"]
                if choice["logprobs"]
            ),
        ):
            content, ids = choice["logprobs"]["content"], choice["token_ids"]
            assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in ids]
            for entry in content:
                assert all(top["token"].startswith("token_id:") for top in entry["top_logprobs"])
    told = wide.post(CHAT, {**body, "return_tokens_as_token_ids": False})["choices"][0]
    assert not told["logprobs"]["content"][0]["token"].startswith("token_id:")
    asked = {"prompt": "x", "max_tokens": 1, "logprobs": 1}
    assert wide.post(TEXT, asked)["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")


def test_the_token_itself_comes_first_in_top_logprobs_of_completions(served: LocalServer) -> None:
    for count in (0, 1, 3):
        body = {"prompt": "The json", "max_tokens": 6, "seed": 3, "temperature": 1.5, "echo": True,
                "logprobs": count, "return_tokens_as_token_ids": True}  # fmt: skip
        found = served.post(TEXT, body)["choices"][0]["logprobs"]
        assert [next(iter(top)) for top in found["top_logprobs"][1:]] == found["tokens"][1:]
        for top in found["top_logprobs"][1:]:
            others = list(top.values())[1:]
            assert others == sorted(others, reverse=True)
            assert max(count, 1) <= len(top) <= count + 1


def test_named_tokens_come_with_the_sampled_one(served: LocalServer) -> None:
    named = [300, 7, 40]
    body = {**BODY, "logprobs": True, "top_logprobs": 3, "logprob_token_ids": named,
            "return_tokens_as_token_ids": True, "max_tokens": 1}  # fmt: skip
    (entry,) = served.post(CHAT, body)["choices"][0]["logprobs"]["content"]
    names = [top["token"] for top in entry["top_logprobs"]]
    assert names == [entry["token"], *(f"token_id:{token}" for token in named)]
    assert all(-math.inf < top["logprob"] <= 0 for top in entry["top_logprobs"])


def test_all_log_probabilities_within_the_servers_bound(
    served: LocalServer, wide: LocalServer, runtime: Runtime
) -> None:
    size = runtime.model.vocab_size
    every = {**BODY, "logprobs": True, "top_logprobs": -1, "max_tokens": 1}
    (entry,) = wide.post(CHAT, every)["choices"][0]["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == size
    assert math.fsum(math.exp(top["logprob"]) for top in entry["top_logprobs"]) == pytest.approx(1)
    found = wide.post(CHAT, {**BODY, "prompt_logprobs": -1})["prompt_logprobs"]
    assert {len(entries) for entries in found[1:]} == {size}
    (choice,) = wide.post(TEXT, {"prompt": "x", "max_tokens": 1, "logprobs": -1})["choices"]
    assert len(choice["logprobs"]["top_logprobs"][0]) <= size  # texts may be equal
    for fields, name in (
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 101}, "top_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ):
        error = served.client.post(CHAT, json={**BODY, **fields}).json()["error"]
        assert error["param"] == name
        assert "must be at most 100 here (--max-logprobs)" in error["message"]
    many = {**every, "max_tokens": 4_000}
    error = wide.client.post(CHAT, json=many).json()["error"]
    assert "more than 2000000 entries" in error["message"]


def test_seeds_of_64_bits_with_a_sign(served: LocalServer) -> None:
    body = {**BODY, "temperature": 1.5, "max_tokens": 8, "return_token_ids": True}

    def answer(seed: int) -> Any:
        return served.post(CHAT, {**body, "seed": seed})["choices"][0]["token_ids"]

    for seed in (-2, -(2**63), 2**63 - 1):
        assert answer(seed) == answer(seed)
    assert answer(-2) != answer(-3)
    for wrong in (-(2**63) - 1, 2**63):
        error = served.client.post(CHAT, json={**body, "seed": wrong}).json()["error"]
        assert error["param"] == "seed"


def test_empty_documents_and_arguments_of_extensions(served: LocalServer) -> None:
    fields = {"documents": [], "vllm_xargs": {}}
    assert served.post(CHAT, {**BODY, **fields})["choices"] == served.post(CHAT, BODY)["choices"]
    answer = served.client.post(CHAT, json={**BODY, "documents": [{"text": "x"}]})
    assert "put them into a message" in answer.json()["error"]["message"]


def test_the_times_of_a_request(wide: LocalServer, served: LocalServer) -> None:
    assert "metrics" not in served.post(CHAT, BODY)
    for path, body in ((CHAT, BODY), (TEXT, {"prompt": "x", "max_tokens": 4, "ignore_eos": True})):
        whole, last = wide.post(path, body)["metrics"], wide.stream(path, body)[-1]["metrics"]
        for times in (whole, last):
            assert times["time_to_first_token_ms"] >= 0
            assert times["mean_itl_ms"] == pytest.approx(times["generation_time_ms"] / 3)
            assert times["tokens_per_second"] > 0
            assert times["queue_time_ms"] >= 0
        assert wide.post(path, {**body, "n": 2})["metrics"] is None  # of no single answer


@pytest.mark.parametrize("is_list", [False, True])
def test_a_prediction_is_counted_and_changes_nothing(served: LocalServer, is_list: bool) -> None:
    body = {**BODY, "max_tokens": 20}
    plain = served.post(CHAT, body)
    text = plain["choices"][0]["message"]["content"]
    content: Any = [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]
    predicted = {"type": "content", "content": content if is_list else text}
    answer = served.post(CHAT, {**body, "prediction": predicted})
    assert answer["choices"][0]["message"]["content"] == text
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 10
    assert details["rejected_prediction_tokens"] <= 5
    assert "accepted_prediction_tokens" not in plain["usage"]["completion_tokens_details"]


def test_bad_predictions_are_refused(served: LocalServer) -> None:
    for predicted in ("text", {"type": "other", "content": "x"}, {"type": "content"}):
        answer = served.client.post(CHAT, json={**BODY, "prediction": predicted})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"].startswith("prediction")
