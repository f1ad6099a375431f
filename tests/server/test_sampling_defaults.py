"""The model's own sampling defaults hold over HTTP, field by field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.server.local_server import LocalServer


def test_fields_that_a_body_leaves_out_are_the_models(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", with_tokenizer=True, eos_ids=[3])
    own = {"temperature": 0.05, "top_k": 2}
    (folder / "generation_config.json").write_text(json.dumps(own))
    with Runtime(folder, num_pages=512) as rt, LocalServer(rt) as served:

        def ask(path: str, **fields: object) -> list[int]:
            body = {"max_tokens": 8, "seed": 3, "return_token_ids": True, **fields}
            ids: list[int] = served.post(path, body)["choices"][0]["token_ids"]
            return ids

        for given in ({}, {"temperature": 2.0}, {"top_k": 0, "temperature": 2.0}):
            params = SamplingParams(**{**own, **given}, seed=3, max_tokens=8)
            expected = rt.generate("abc", params).token_ids
            assert ask("/v1/completions", prompt="abc", **given) == expected
        card = served.client.get("/v1/models").json()["data"][0]["sampling_defaults"]
        assert card["temperature"] == {"value": 0.05, "source": "generation_config.json"}
        assert card["min_p"] == {"value": 0.0, "source": "neutral"}
        native = {"text": "abc", "sampling_params": {"max_new_tokens": 8, "sampling_seed": 3}}
        expected = rt.generate("abc", SamplingParams(**own, seed=3, max_tokens=8)).token_ids
        assert served.post("/generate", native)["output_ids"] == expected
