"""/generate, /v1/score and the cache over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime, SamplingParams
from tests.server.local_server import LocalServer

TEXT = "The json module encodes"


def test_generate_as_sglang_has_it(served: LocalServer, runtime: Runtime) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)
    one = runtime.generate(TEXT, params)
    body: dict[str, Any] = {
        "text": TEXT, "sampling_params": {"max_new_tokens": 6, "temperature": 0},
        "return_logprob": True, "top_logprobs_num": 2,
    }  # fmt: skip
    found = served.post("/generate", body)
    assert found["text"] == one.text
    assert found["output_ids"] == one.token_ids
    meta = found["meta_info"]
    assert meta["prompt_tokens"] == one.usage.prompt_tokens
    assert meta["cached_tokens"] == one.usage.prompt_tokens - 1
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert [value for value, _, _ in meta["output_token_logprobs"]] == one.logprobs
    ids = runtime.tokenize(TEXT).tolist()
    several = served.post("/generate", {**body, "text": None, "input_ids": [ids, ids]})
    assert [each["text"] for each in several] == [one.text] * 2
    events = served.stream("/generate", body)
    assert events[-1]["text"] == one.text
    assert all(one.text.startswith(event["text"]) for event in events)
    assert events[-1]["meta_info"]["cached_tokens"] == one.usage.prompt_tokens - 1


def test_generate_as_tutorials_have_it(served: LocalServer) -> None:
    body = {"prompt": "A short form for tutorials", "max_tokens": 5, "temperature": 0}
    found = served.post("/generate", body)
    assert found["cached_tokens"] + found["computed_tokens"] == found["prompt_tokens"]
    assert found["time_s"] > 0
    assert found["completion_tokens"] <= 5
    events = served.stream("/generate", body)
    assert "".join(event["text"] for event in events) == found["text"]
    assert events[-1]["cached_tokens"] == found["prompt_tokens"] - 1


def test_scores_are_those_of_runtime(served: LocalServer, runtime: Runtime) -> None:
    candidates = [" encodes", " flies away", [300, 301]]
    expected = runtime.score(TEXT, candidates)
    body = {"prompt": TEXT, "candidates": candidates, "return_token_ids": True}
    found = served.post("/v1/score", body)
    assert [one["logprob"] for one in found["data"]] == [one.logprob for one in expected]
    assert [one["token_logprobs"] for one in found["data"]] == [one.logprobs for one in expected]
    assert [one["token_ids"] for one in found["data"]] == [one.token_ids for one in expected]


def test_new_sampling_fields(served: LocalServer, runtime: Runtime) -> None:
    base = {"prompt": TEXT, "max_tokens": 6, "seed": 2}
    allowed = served.post(
        "/v1/completions", {**base, "allowed_token_ids": [300, 301], "return_token_ids": True}
    )
    assert set(allowed["choices"][0]["token_ids"]) <= {300, 301}
    biased = served.post(
        "/v1/completions", {**base, "logit_bias": {"305": 100}, "return_token_ids": True}
    )
    assert biased["choices"][0]["token_ids"] == [305] * 6
    cut = served.post("/v1/completions", {**base, "truncate_prompt_tokens": 2, "echo": True})
    assert cut["usage"]["prompt_tokens"] == 2
    ids = runtime.tokenize(TEXT).tolist()[-2:]
    assert runtime.tokenizer is not None
    assert cut["choices"][0]["text"].startswith(runtime.tokenizer.decode(ids))
    stopped = served.post(
        "/v1/completions",
        {**base, "logit_bias": {"305": 100}, "stop_token_ids": [305]},
    )
    assert stopped["choices"][0]["stop_reason"] == 305


def test_lookup_tells_why_not_more(served: LocalServer, runtime: Runtime) -> None:
    ids = list(range(700, 720))
    served.post("/v1/completions", {"prompt": ids, "max_tokens": 1, "cache_salt": "look"})
    other = [*ids[:10], 5, *ids[11:]]
    body = {"prompt": [ids, other], "cache_salt": "look"}
    first, second = served.post("/v1/cache/lookup", body)["data"]
    assert (first["cached_tokens"], first["reason"]) == (19, "full")
    assert (second["cached_tokens"], second["reason"]) == (10, "diverged")
    assert (second["expected"], second["found"]) == (710, 5)
    before = runtime.cache_stats()["num_acquired"]
    served.post("/v1/cache/lookup", {"messages": [{"role": "user", "content": "hi"}]})
    assert runtime.cache_stats()["num_acquired"] == before


def test_the_tree_is_bounded(served: LocalServer) -> None:
    for end in (5, 6):
        prompt = [*range(800, 820), end, 7, 8]
        served.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "cache_salt": "tree"})

    def tree(query: str = "") -> Any:
        answer = served.client.get(f"/v1/cache/tree?cache_salt=tree{query}").json()
        return answer["namespaces"]["/tree"]

    (top,) = tree()["children"]
    assert top["tokens"] == list(range(800, 820))
    assert sorted(child["tokens"][0] for child in top["children"]) == [5, 6]
    assert tree("&depth=0")["num_children"] == 1
    assert tree("&depth=1")["children"][0]["children"] == []
    start = ",".join(map(str, range(800, 820)))
    assert len(tree(f"&start={start}&depth=1")["children"]) == 2
    assert served.client.get("/v1/cache/tree?max_nodes=1").json()["truncated"] is True


def test_flush_forgets_one_namespace_or_all(served: LocalServer) -> None:
    body = {"prompt": list(range(900, 910)), "max_tokens": 1}

    def cached(salt: str) -> int:
        usage = served.post("/v1/completions", {**body, "cache_salt": salt})["usage"]
        tokens = usage["prompt_tokens_details"]["cached_tokens"]
        assert isinstance(tokens, int)
        return tokens

    assert (cached("one"), cached("two")) == (0, 0)
    served.post("/v1/cache/flush", {"cache_salt": "one"})
    assert (cached("one"), cached("two")) == (0, 9)
    served.post("/v1/cache/flush", {})
    assert (cached("one"), cached("two")) == (0, 0)


def test_settings_may_stand_in_a_file(tmp_path: Any) -> None:
    from radixserve.server.config import read_settings

    path = tmp_path / "settings.toml"
    path.write_text('port = 9000\nmax-body = "1MB"\npage-size = 16\neviction = "arc"\n')
    ours, theirs = read_settings(str(path))
    assert ours == {"port": 9000, "max_body": "1MB"}
    assert theirs == {"page_size": 16, "eviction": "arc"}
