"""Pauses, weight updates and reranking over HTTP."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from safetensors.torch import load_file, save_file

from radixserve import Runtime
from tests.checkpoints import make_checkpoint
from tests.server.local_server import LocalServer

ASK = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [
        make_checkpoint(
            tmp_path_factory.mktemp(f"served{seed}"), "llama", seed=seed, with_tokenizer=True
        )
        for seed in range(2)
    ]


@pytest.fixture(scope="module")
def own(folders: list[Path]) -> Iterator[LocalServer]:
    """A server whose weights may change."""
    with Runtime(str(folders[0]), num_pages=400) as rt, LocalServer(rt) as served:
        yield served


def ask(served: LocalServer) -> list[int]:
    ids: list[int] = served.post("/v1/completions", ASK)["choices"][0]["token_ids"]
    return ids


def test_an_update_as_sglang_has_it(own: LocalServer, folders: list[Path], tmp_path: Path) -> None:
    old = ask(own)
    assert own.client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    assert own.client.get("/is_paused").json() == {"is_paused": True}
    body = {"model_path": str(folders[1]), "weight_version": "two"}
    found = own.post("/update_weights_from_disk", body)
    assert (found["success"], found["epoch"], found["kv"]) == (True, 1, "stale")
    assert own.client.post("/continue_generation").json()["status"] == "ok"
    new = ask(own)
    assert new != old
    assert own.client.get("/weight_version").json() == {"weight_version": "two", "epoch": 1}
    path = tmp_path / "weights.safetensors"
    save_file(load_file(folders[0] / "model.safetensors"), path)
    found = own.post("/update_weights_from_tensor", {"path": str(path), "kv": "recompute"})
    assert (found["epoch"], found["kv"]) == (2, "recompute")
    assert ask(own) == old
    tensors = list(load_file(folders[1] / "model.safetensors").items())
    for part, epoch in ((tensors[:7], 2), (tensors[7:], 3)):
        save_file(dict(part), path)
        found = own.post("/update_weights_from_tensor", {"path": str(path), "is_last": epoch == 3})
        assert found["epoch"] == epoch
    assert ask(own) == new
    own.post("/update_weights_from_disk", {"model_path": str(folders[0])})
    assert ask(own) == old


def test_answers_name_their_weights(own: LocalServer) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "ignore_eos": True}
    epoch = own.client.get("/weight_version").json()["epoch"]
    wanted = [{"start": 0, "end": 6, "epoch": epoch, "kv": "computed"}]
    for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", chat)):
        body = {**body, "return_token_ids": True}
        assert own.post(path, body)["choices"][0]["weight_epochs"] == wanted
        text = own.client.post(path, json={**body, "stream": True}).text
        chunks = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
        epochs = [chunk["choices"][0].get("weight_epochs") for chunk in chunks]
        assert epochs == [None] * (len(epochs) - 1) + [wanted]
    native = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
    assert own.post("/generate", native)["meta_info"]["weight_epochs"] == wanted


def test_weights_that_do_not_fit(own: LocalServer, tmp_path: Path) -> None:
    before = ask(own)
    os.mkfifo(tmp_path / "pipe")
    for route, body, message in (
        ("/update_weights_from_disk", {"model_path": str(tmp_path / "none")}, "none"),
        ("/update_weights_from_tensor", {"path": str(tmp_path / "pipe")}, "not a file"),
        ("/update_weights_from_tensor", {"path": "/dev/zero"}, "not a file"),
        ("/update_weights_from_disk", {}, "model_path is missing"),
        ("/update_weights_from_tensor", {}, "give path or shared_memory"),
        ("/update_weights_from_tensor", {"path": str(tmp_path / "none")}, "not a safetensors"),
        ("/update_weights_from_tensor", {"shared_memory": "../etc/passwd"}, "must be a name"),
        ("/update_weights_from_tensor", {"shared_memory": "a\0b"}, "not a safetensors"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["x"]}, "serialized"),
        ("/pause_generation", {"mode": "stop"}, "mode"),
    ):
        answer = own.client.post(route, json=body)
        assert answer.status_code == 400, answer.text
        assert message in answer.text
    assert ask(own) == before


def test_pauses_as_vllm_has_them(own: LocalServer) -> None:
    assert own.client.post("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
    assert own.client.get("/is_paused").json() == {"is_paused": True}
    assert own.client.post("/resume").json() == {"status": "resumed"}
    assert own.client.get("/is_paused").json() == {"is_paused": False}
    assert own.client.post("/pause?mode=wait").status_code == 400
    origin = {"origin": "http://evil.example"}
    assert own.client.post("/pause", headers=origin).status_code == 403


def test_logprob_start_len_as_sglang_has_it(own: LocalServer) -> None:
    body: dict[str, Any] = {
        "input_ids": list(range(5, 25)), "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1,
    }  # fmt: skip
    whole = own.post("/generate", body)["meta_info"]
    assert [token for _, token, _ in whole["input_token_logprobs"]] == list(range(5, 25))
    assert whole["input_token_logprobs"][0][0] is None
    part = own.post("/generate", {**body, "logprob_start_len": 15})["meta_info"]
    assert part["cached_tokens"] == 19
    assert part["input_token_logprobs"][0] == [None, 20, None]
    assert part["input_token_logprobs"][1:] == whole["input_token_logprobs"][16:]
    assert part["input_top_logprobs"][1:] == whole["input_top_logprobs"][16:]
    none = own.post("/generate", {**body, "logprob_start_len": -1})["meta_info"]
    assert "input_token_logprobs" not in none
    refused = own.client.post("/generate", json={**body, "return_logprob": False})
    assert refused.status_code == 400


def test_lm_evals_choices_compute_their_context_once(own: LocalServer) -> None:
    context, choices = list(range(30, 70)), [[71, 72], [71, 73], [74], [75, 76, 77]]
    body = {
        "prompt": [context + choice for choice in choices], "echo": True, "logprobs": 1,
        "max_tokens": 1, "temperature": 0,
    }  # fmt: skip
    first = own.post("/v1/completions", body)
    details = first["usage"]["prompt_tokens_details"]
    computed = first["usage"]["prompt_tokens"] - details["cached_tokens"]
    assert computed == len(context) + sum(map(len, choices)) - 1 + len(choices) - 1
    second = own.post("/v1/completions", body)
    details = second["usage"]["prompt_tokens_details"]
    assert second["usage"]["prompt_tokens"] - details["cached_tokens"] == len(choices)
    for one, other in zip(first["choices"], second["choices"], strict=True):
        assert one["logprobs"] == other["logprobs"]


def test_usage_counts_what_scores_compute(own: LocalServer) -> None:
    body = {"prompt": list(range(90, 130)), "candidates": [[1, 2, 3], [1, 2, 4], [5]]}
    found = [own.post("/v1/score", body) for _ in range(2)]
    assert found[0]["data"] == found[1]["data"]
    usages = [one["usage"] for one in found]
    computed = [
        usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] for usage in usages
    ]
    assert computed == [44, 3]  # the prompt, two tokens and two last ones; then three last ones


def test_documents_are_computed_once_for_all_queries(own: LocalServer) -> None:
    documents = ["A text about cats." * 3, "A text about dogs." * 3, {"text": "Nothing at all."}]
    body: dict[str, Any] = {"query": "cats", "documents": documents, "return_documents": True}
    found = own.post("/v1/rerank", body)
    assert sorted(one["index"] for one in found["results"]) == [0, 1, 2]
    scores = [one["relevance_score"] for one in found["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert found["results"][0]["document"]["text"]
    again = own.post("/rerank", {**body, "query": "dogs", "top_n": 2})
    assert len(again["results"]) == 2
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    texts = [one if isinstance(one, str) else one["text"] for one in documents]
    assert cached >= sum(map(len, texts)) - len(texts)  # a token is a byte here
    for _ in range(2):
        one = own.post("/rerank", {**body, "documents": ["Short."]})["usage"]
    num_computed = one["prompt_tokens"] - one["prompt_tokens_details"]["cached_tokens"]
    assert num_computed == 3  # the last token of the prompt, and before that of yes and of no
    for wrong in ({"query": ""}, {"documents": []}, {"top_n": 0}, {"documents": [""]}):
        assert own.client.post("/rerank", json={**body, **wrong}).status_code == 400
