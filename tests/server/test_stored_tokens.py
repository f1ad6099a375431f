"""Over HTTP: where cached tokens came from, and what a prompt's stored part would cost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from tests.server.local_server import LocalServer
from tests.server.served_process import Served

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
        assert lookup["host_tokens"] == 0
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
        for name in (
            *("loaded_tokens_total", "skipped_tokens_total", "returned_tokens_total"),
            *("read_bytes_per_second", "load_latency_seconds", "loading_requests"),
        ):
            assert f"radixserve:store_{name}" in text
        lookup = server.post("/v1/cache/lookup", {"prompt": PROMPT})
        assert (lookup["load_tokens"], lookup["load_s"]) == (0, 0)


def test_a_restarted_server_is_warm_before_the_first_request(tmp_path: Path) -> None:
    for is_restart in (False, True):
        server = Served("demo", "--num-pages", "2000", "--kv-store", str(tmp_path))
        try:
            server.wait_until_ready()
            deadline = time.monotonic() + 60
            while is_restart and cached_pages(server) < 10 and time.monotonic() < deadline:
                time.sleep(0.05)
            usage = server.client.post("/v1/completions", json=BODY).json()["usage"]
            expected = {"cached_tokens": 199} if is_restart else {"cached_tokens": 0}
            assert usage["prompt_tokens_details"] == expected
            server.process.terminate()
            server.process.wait(60)
        finally:
            server.stop()


def cached_pages(server: Served) -> float:
    """Pages of the tree. The text of /metrics is as Prometheus reads it."""
    (line,) = [
        line
        for line in server.client.get("/metrics").text.splitlines()
        if line.startswith('radixserve:pages{owner="tree"}')
    ]
    return float(line.split()[1])


TEXT = "A text that a chat begins with, long enough to be stored and to be loaded. " * 3
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize(
    ("path", "body", "keys"),
    [
        (
            "/v1/chat/completions",
            {"model": "demo", "messages": MESSAGES, "max_tokens": 1},
            ("usage", "prompt_tokens_details", "loaded_tokens"),
        ),
        (
            "/v1/responses",
            {"model": "demo", "input": TEXT, "max_output_tokens": 1, "store": False},
            ("usage", "input_tokens_details", "loaded_tokens"),
        ),
        (
            "/v1/messages",
            {"model": "demo", "messages": MESSAGES, "max_tokens": 1},
            ("usage", "loaded_input_tokens"),
        ),
        ("/generate", {"prompt": TEXT, "max_tokens": 1}, ("loaded_tokens",)),
        (
            "/generate",
            {"text": TEXT, "sampling_params": {"max_new_tokens": 1}},
            ("meta_info", "loaded_tokens"),
        ),
    ],
)
def test_every_protocol_names_loaded_tokens_where_there_are_any(
    tmp_path: Path, path: str, body: dict[str, Any], keys: tuple[str, ...]
) -> None:
    loaded = []
    for _ in range(2):
        with (
            Runtime("demo", num_pages=2000, kv_store=str(tmp_path)) as runtime,
            LocalServer(runtime) as server,
        ):
            for _ in range(2):
                fields = server.post(path, body)
                for key in keys[:-1]:
                    fields = fields[key]
                loaded.append(fields.get(keys[-1]))
    assert loaded[:2] == [None, None]  # computed, and found in memory
    assert loaded[2] > 16
    assert loaded[3] is None
