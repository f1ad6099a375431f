"""Answers with many log-probabilities: another thread writes them, in pieces."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve.server.wire import json_response
from radixserve.server.wire.json_response import dump, dump_parts
from tests.server.local_server import LocalServer

ENTRY = {"5": {"logprob": -0.5, "rank": None, "decoded_token": 'a\u20ac"'}}
VALUES: list[Any] = [
    *(None, 5, "text", [], {}, [[]], [{}], {"a": {}}, {"a": []}, [1, 2.5, None], list(range(200))),
    [{"text": "a", "meta_info": {"logprobs": [[-0.5, 7, None]] * 130}}],
    {"choices": [{"index": 0, "prompt_logprobs": [None, *[ENTRY] * 300]}, {}], "usage": {"n": 5}},
    {"choices": [{"logprobs": {"tokens": ["a"] * 70, "text_offset": [3] * 64}}]},
    {"data": [{"index": at, "token_logprobs": [-0.25] * at} for at in range(200)]},
    {"prompt_logprobs": [None, *[ENTRY] * 65], "a\n": [[{}], {"b": [[[[[]]]]]}]},
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_the_pieces_are_the_whole(value: Any) -> None:
    assert "".join(dump_parts(value)) == dump(value)


def test_no_piece_is_large() -> None:
    tokens = [{str(at): {"logprob": -0.5, "rank": at} for at in range(20)}] * 8_000
    for body in (
        {"choices": [{"prompt_logprobs": tokens}]},
        {"prompt_logprobs": tokens},
        {"choices": [{"logprobs": {"content": tokens}}]},
        {"data": [{"token_logprobs": [-0.5] * 1_000}] * 1_000},
        [{"meta_info": {"output_top_logprobs": [[-0.5, 5, None]] * 20_000}}] * 4,
    ):
        assert max(map(len, dump_parts(body))) < 64_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5] * 600, "max_tokens": 1, "prompt_logprobs": 2}),
        ("/v1/completions", {"prompt": [5] * 600, "max_tokens": 1, "logprobs": 1, "echo": True}),
        ("/v1/completions", {"prompt": "Sort", "max_tokens": 300, "logprobs": 4, "n": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Sort"}],
                                  "max_tokens": 300, "logprobs": True, "top_logprobs": 5}),
        ("/generate", {"input_ids": [[5], [6]], "return_logprob": True, "top_logprobs_num": 3,
                       "sampling_params": {"max_new_tokens": 200}}),
        ("/v1/score", {"prompt": "Sort", "candidates": [[at, *[5] * 5] for at in range(300)]}),
    ],
    ids=range(6),
)  # fmt: skip
def test_a_large_answer_is_written_elsewhere(
    served: LocalServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """It is the same."""
    threads: set[int] = set()

    def noted(*args: Any) -> Any:
        threads.add(threading.get_ident())
        return dump_parts(*args)

    asked = {"temperature": 0, "ignore_eos": True, **body} if path != "/v1/score" else body
    if path == "/generate":
        asked = {**body, "sampling_params": {**body["sampling_params"], "temperature": 0,
                                             "ignore_eos": True}}  # fmt: skip
    monkeypatch.setattr(json_response, "dump_parts", noted)
    large = served.post(path, asked)
    assert len(threads) == 1
    assert threads != {served.call(ident())}
    monkeypatch.setattr(json_response, "_MANY_LOGPROBS", 1 << 30)
    assert plain(served.post(path, asked)) == plain(large)
    assert len(threads) == 1


async def ident() -> int:
    return threading.get_ident()


def plain(value: Any) -> Any:
    """Without what differs from request to request."""
    if isinstance(value, dict):
        own = {"id", "created", "usage", "cached_tokens", "e2e_latency"}
        return {name: plain(member) for name, member in value.items() if name not in own}
    return [plain(item) for item in value] if isinstance(value, list) else value
