"""Over HTTP: where cached tokens came from, and what a prompt's stored part would cost."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from tests.server.local_server import LocalServer

PROMPT = list(range(10, 210))
BODY = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}


def test_usage_and_lookup_tell_memory_from_store(tmp_path: Path) -> None:
    with Runtime("demo", num_pages=2000, kv_store=str(tmp_path)) as runtime:
        runtime.generate(PROMPT)
    with (
        Runtime("demo", num_pages=2000, kv_store=str(tmp_path)) as runtime,
        LocalServer(runtime) as server,
    ):
        lookup = server.post("/v1/cache/lookup", {"prompt": PROMPT})
        assert (lookup["cached_tokens"], lookup["load_tokens"]) == (0, 199)
        assert lookup["stored_tokens"] >= 200
        assert lookup["load_s"] > 0
        assert lookup["compute_s"] is None
        assert "stored" not in lookup
        for expected in (
            {"cached_tokens": 199, "loaded_tokens": 199},
            {"cached_tokens": 199},  # in memory by then
        ):
            usage = server.post("/v1/completions", BODY)["usage"]
            assert usage["prompt_tokens_details"] == expected
        text = server.client.get("/metrics").text
        assert "radixserve:store_loaded_tokens_total" in text
        lookup = server.post("/v1/cache/lookup", {"prompt": PROMPT})
        assert (lookup["load_tokens"], lookup["load_s"]) == (0, 0)
