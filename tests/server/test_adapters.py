"""Adapters over HTTP: named as models, loaded and unloaded by admins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from tests.adapters.peft_adapters import make_adapter
from tests.checkpoints import load_reference, make_checkpoint
from tests.server.local_server import LocalServer

ASK = {"prompt": "Total sales by month", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    model = load_reference(make_checkpoint(folder / "model", "llama", with_tokenizer=True))
    for seed, name in enumerate(("sql", "judge")):
        make_adapter(folder / name, model, seed)
    return folder


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[LocalServer]:
    adapters = {"sql": str(folder / "sql")}
    with (
        Runtime(str(folder / "model"), num_pages=2048, adapters=adapters) as rt,
        LocalServer(rt) as served,
    ):
        yield served
        rt.check()


def cached(answer: dict[str, Any]) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_a_model_names_an_adapter(served: LocalServer) -> None:
    plain = served.post("/v1/completions", {**ASK, "model": "demo"})
    answer = served.post("/v1/completions", {**ASK, "model": "sql"})
    assert (plain["model"], answer["model"]) == ("demo", "sql")
    assert plain["choices"][0]["text"] != answer["choices"][0]["text"]
    assert cached(answer) == 0
    assert cached(served.post("/v1/completions", {**ASK, "model": "sql"})) == 19
    look = {"prompt": ASK["prompt"], "model": "sql"}
    assert served.post("/v1/cache/lookup", look)["cached_tokens"] == 19
    messages = [{"role": "user", "content": "Hello"}]
    chat = {"messages": messages, "max_tokens": 4, "session_id": "s", "temperature": 0}
    said = [served.post("/v1/chat/completions", {**chat, "model": m}) for m in ("demo", "sql")]
    assert [one["model"] for one in said] == ["demo", "sql"]
    assert cached(said[1]) == 0
    score = {"prompt": "a", "candidates": ["b"]}
    scores = [served.post("/v1/score", {**score, "model": name}) for name in ("demo", "sql")]
    assert scores[0]["data"][0]["logprob"] != scores[1]["data"][0]["logprob"]
    ask = {"query": "a", "documents": ["b"]}
    ranks = [served.post("/rerank", {**ask, "model": name}) for name in ("demo", "sql")]
    assert [one["model"] for one in ranks] == ["demo", "sql"]
    assert ranks[0]["results"] != ranks[1]["results"]
    for name in ("demo", "sql"):
        ask = {"input": "a", "questions": [{"type": "predicate", "instructions": "b"}]}
        (found,) = served.post("/v1/decisions", {**ask, "model": name})["answers"]
        adapter = "" if name == "demo" else name
        (wanted,) = served.server.runtime.decide("a", "b", adapter=adapter)
        assert found["probability"] == wanted.probabilities[0]
    branch = served.post("/v1/branches", {"prompt": "a", "model": "sql"})
    more = served.post(f"/v1/branches/{branch['id']}/generate", {"max_tokens": 2})
    assert more["model"] == "sql"


def test_adapters_are_models(served: LocalServer) -> None:
    cards = {card["id"]: card for card in served.client.get("/v1/models").json()["data"]}
    assert cards["demo"]["parent"] is None
    assert cards["sql"]["parent"] == "demo"
    assert served.client.get("/v1/models/sql").json() == cards["sql"]


def test_loading_and_unloading(served: LocalServer, folder: Path) -> None:
    judge = {"lora_name": "judge", "lora_path": str(folder / "judge")}
    assert served.post("/v1/load_lora_adapter", judge)["rank"] == 4
    first = served.post("/v1/completions", {**ASK, "model": "judge"})
    again = served.client.post("/v1/load_lora_adapter", json=judge)
    assert again.status_code == 400
    assert "is loaded" in again.text
    other = {**judge, "lora_path": str(folder / "sql"), "load_inplace": True}
    served.post("/v1/load_lora_adapter", other)
    replaced = served.post("/v1/completions", {**ASK, "model": "judge"})
    assert replaced["choices"] != first["choices"]
    assert cached(replaced) == 0
    served.post("/v1/unload_lora_adapter", {"lora_name": "judge"})
    for path, body in (
        ("/v1/completions", {**ASK, "model": "judge"}),
        ("/v1/unload_lora_adapter", {"lora_name": "judge"}),
    ):
        gone = served.client.post(path, json=body)
        assert gone.status_code == 404, gone.text
    config = json.loads((folder / "judge" / "adapter_config.json").read_text())
    for fields, message in (
        ({"use_dora": True}, "use_dora=True are not built"),
        ({"r": 5}, "lora_A has rank 4, the config says 5"),
    ):
        (folder / "judge" / "adapter_config.json").write_text(json.dumps({**config, **fields}))
        refused = served.client.post("/v1/load_lora_adapter", json=judge)
        assert (refused.status_code, message in refused.text) == (400, True), refused.text
    for path in (str(folder), "\0"):
        broken = {"lora_name": "none", "lora_path": path}
        answer = served.client.post("/v1/load_lora_adapter", json=broken)
        assert answer.status_code == 400
        assert "is no adapter" in answer.text
