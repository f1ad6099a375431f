"""`radixserve serve` as a process: start, signals, exit codes."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
pytest.importorskip("httpx")

import httpx

from tests.checkpoints import make_checkpoint
from tests.server.served_process import ROOT, Served, environment

LONG = {"prompt": [1, 2, 3], "ignore_eos": True, "stream": True}


# A process imports and loads everything: seconds, and minutes where the machine is busy.
pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Small, but an answer of thousands of tokens takes a while."""
    folder = tmp_path_factory.mktemp("model")
    sizes: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 8}
    return str(make_checkpoint(folder, "llama", max_position_embeddings=4096, **sizes))


def run(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "radixserve", "serve", *arguments],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.fixture
def process(checkpoint: str) -> Iterator[Served]:
    served = Served(checkpoint, "--num-pages", "4096", "--shutdown-timeout", "100")
    try:
        served.wait_until_ready()
        yield served
    finally:
        served.stop()


@contextlib.contextmanager
def posting(
    served: Served, body: dict[str, Any], *, without: int = 0, buffer: int = 1 << 16
) -> Iterator[socket.socket]:
    """A connection that has sent a completion's body except for its last bytes, which are spaces.
    `buffer`: bytes that its system keeps of the answer."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content) + without}\r\n\r\n"
    )
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", served.port))
        sock.sendall(head.encode() + content)
        yield sock


def all_of(sock: socket.socket) -> bytes:
    """What comes until the connection is closed."""
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def test_sigterm_lets_requests_finish_and_refuses_new_ones(process: Served) -> None:
    body = {**LONG, "max_tokens": 3000}
    large = {"prompt": [1] * 1000, "max_tokens": 1, "prompt_logprobs": 100}
    with (
        httpx.Client(base_url=process.client.base_url, timeout=60) as other,
        posting(process, {"prompt": [1], "max_tokens": 2}, without=5) as sending,
        posting(process, large, buffer=4096) as reading,
        process.client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert reading.recv(12) == b"HTTP/1.1 200"  # the rest waits for its reader
        lines = answer.iter_lines()
        next(lines)
        process.process.send_signal(signal.SIGTERM)
        while other.get("/health/ready").status_code != 503:
            time.sleep(0.01)
        refused = other.post("/v1/completions", json={"prompt": [1]})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutdown"
        assert other.get("/health/live").status_code == 200
        rest = list(lines)
        time.sleep(0.5)  # only these two are left
        sending.sendall(b"     ")
        assert all_of(sending).startswith(b"HTTP/1.1 200")
        time.sleep(0.5)
        head, _, content = all_of(reading).partition(b"\r\n\r\n")
        assert f"content-length: {len(content)}".encode() in head
    assert rest[-2] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-4]
    assert process.process.wait(120) == 0


@pytest.mark.long
def test_what_takes_too_long_ends_with_an_error(checkpoint: str) -> None:
    served = Served(checkpoint, "--num-pages", "4096", "--shutdown-timeout", "0.2")
    try:
        served.wait_until_ready()
        body = {**LONG, "max_tokens": 4000}
        with served.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            whole: list[int] = []
            other = threading.Thread(
                target=lambda: whole.append(
                    httpx.post(
                        f"{served.client.base_url}/v1/completions",
                        json={**body, "stream": False}, timeout=60,
                    ).status_code
                )
            )  # fmt: skip
            other.start()
            time.sleep(0.3)
            served.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        other.join()
        assert whole == [503]
        assert '"code": "shutdown"' in rest[-4] or '"code":"shutdown"' in rest[-4]
        assert served.process.wait(20) == 0
    finally:
        served.stop()


@pytest.mark.long
def test_a_second_signal_ends_at_once(process: Served) -> None:
    body = {**LONG, "max_tokens": 4000, "n": 8}
    with process.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
        process.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert process.process.poll() is None
        process.process.send_signal(signal.SIGTERM)
        process.process.wait(20)


# A server whose engine fails once a file is there.
DYING = """
import os, sys
from radixserve.cli import main
from radixserve.scheduler import Scheduler

schedule = Scheduler.schedule

def fail(self):
    if os.path.exists(os.environ["FAIL_AT"]):
        raise ValueError("the schedule is broken")
    return schedule(self)

Scheduler.schedule = fail
sys.exit(main(sys.argv[1:]))
"""


def test_a_dead_engine_ends_its_server_after_open_requests_were_answered(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL_AT", str(tmp_path / "fail"))
    served = Served(checkpoint, "--num-pages", "4096", program=("-c", DYING))
    try:
        served.wait_until_ready()
        with served.client.stream(
            "POST", "/v1/completions", json={**LONG, "max_tokens": 4000}
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            (tmp_path / "fail").touch()
            rest = [line for line in lines if line]
        assert '"error"' in rest[-2], rest[-3:]
        assert "engine" in rest[-2]
        assert served.process.wait(60) == 1
        assert "the server ends with exit code 1" in served.errors()
    finally:
        served.stop()


# A server that loads its model once a file is there.
LOADING = """
import os, pathlib, sys, time
from radixserve.cli import main
from radixserve.server.process import Process
load = Process._make_runtime
def late(process):
    while not pathlib.Path(os.environ["LOAD_AT"]).exists():
        time.sleep(0.01)
    return load(process)
Process._make_runtime = late
sys.exit(main(sys.argv[1:]))
"""


def test_while_the_model_is_loaded_only_health_is_answered(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOAD_AT", str(tmp_path / "load"))
    served = Served(checkpoint, "--num-pages", "4096", program=("-c", LOADING))
    try:
        served.wait_until("/health/live")
        for path in ("/health", "/health/ready", "/health/startup"):
            answer = served.client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, "loading")
        for path, status, kind in (
            ("/v1/completions", 503, "loading"),
            ("/v1/chat/completions", 503, "loading"),
            ("/v1/messages", 529, "overloaded_error"),
            ("/generate", 503, "loading"),
        ):
            answer = served.client.post(path, json={})
            error = answer.json()["error"]
            assert answer.status_code == status
            assert kind in (error.get("code"), error["type"])
            assert error["message"] == "the model is being loaded"
            assert answer.headers["retry-after"] == "5"
        assert served.client.get("/v1/models").status_code == 503
        (tmp_path / "load").touch()
        served.wait_until_ready()
        body = {"prompt": [1, 2, 3], "max_tokens": 2}
        assert served.client.post("/v1/completions", json=body).status_code == 200
    finally:
        served.stop()


def test_what_cannot_be_served_is_one_line_and_code_2(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann 0123456789abcdef")
    keys.chmod(0o644)
    settings = tmp_path / "settings.toml"
    settings.write_text("prot = 8000")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, message in (
            (["demo", "--port", port], "cannot listen at 127.0.0.1:"),
            (["./no-such-model", "--port", "0"], "no-such-model"),
            (["demo", "--api-key-file", str(keys)], "may be read by others"),
            (["demo", "--api-key-file", str(tmp_path / "none")], "No such file"),
            (["demo", "--host", "0.0.0.0"], "reachable from other machines"),
            (["demo", "--settings", str(settings)], "unknown setting prot"),
            (["demo", "--num-pages", "0"], "num_pages must be"),
        ):
            code, errors = run(*arguments)
            assert code == 2, errors
            assert message in errors
            assert errors.startswith("radixserve: error: ")
            assert len(errors.splitlines()) == 1, errors
