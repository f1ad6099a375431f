"""Open WebUI's own server against `radixserve serve demo`: models, chats, streams, and its tasks.

    python tests/server/clients/open_webui.py PROGRAM

PROGRAM is `open-webui` in an environment of its own (pip install open-webui==0.12.4). It keeps its
data in a temporary folder, and is told to stay offline.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from tests.server.clients.run import served  # noqa: E402

_START_S = 600  # it reads large libraries, and makes its database


class WebUI:
    """Calls of Open WebUI's own routes, as its page makes them."""

    def __init__(self, url: str) -> None:
        self._url = url
        account = {"name": "a", "email": "a@example.org", "password": "a long password 1"}
        self._token = ""
        self._token = json.loads(self.post("/api/v1/auths/signup", account))["token"]

    def get(self, path: str) -> Any:
        return json.loads(self._send(path, None))

    def post(self, path: str, body: dict[str, Any]) -> str:
        return self._send(path, json.dumps(body).encode())

    def _send(self, path: str, content: bytes | None) -> str:
        headers = {"content-type": "application/json"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self._url + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=_START_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            error.add_note(f"{path}: {error.read().decode()}")
            raise


@contextlib.contextmanager
def web_ui(program: str, url: str, folder: str) -> Iterator[WebUI]:
    """Open WebUI, connected to the server at `url`, and a user who has signed in."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [program, "serve", "--host", "127.0.0.1", "--port", str(port)],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "HOME": folder, "DATA_DIR": folder,
             "OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none",
             "ENABLE_OLLAMA_API": "false", "RAG_EMBEDDING_ENGINE": "openai",
             "OFFLINE_MODE": "true", "HF_HUB_OFFLINE": "1", "WEBUI_SECRET_KEY": "x",
             "SCARF_NO_ANALYTICS": "true", "DO_NOT_TRACK": "true", "ANONYMIZED_TELEMETRY": "false"},
    )  # fmt: skip
    try:
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            assert process.poll() is None, "it did not start"
            health = f"http://127.0.0.1:{port}/health"
            with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=5):
                break
            time.sleep(1)
        yield WebUI(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(60)


def check(ui: WebUI) -> None:
    models = [model["id"] for model in ui.get("/api/models")["data"]]
    assert "demo" in models, models
    messages = [{"role": "user", "content": "How do I sort a list?"}]
    body = {"model": "demo", "messages": messages, "max_tokens": 30}
    chat = json.loads(ui.post("/api/chat/completions", {**body, "stream": False}))
    said = chat["choices"][0]["message"]["content"]
    assert "sort" in said, said
    stream = ui.post("/api/chat/completions", {**body, "stream": True})
    assert stream.rstrip().endswith("data: [DONE]"), stream
    more = [*messages, {"role": "assistant", "content": said}]
    more.append({"role": "user", "content": "And a dict?"})
    second = json.loads(
        ui.post("/api/chat/completions", {**body, "messages": more, "stream": False})
    )
    known = chat["usage"]["total_tokens"]
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= known - 1, (cached, known)
    print(f"a second turn: {cached} of {second['usage']['prompt_tokens']} tokens cached")
    for task in ("title", "tags", "follow_up"):
        path = f"/api/v1/tasks/{task}/completions"
        answer = json.loads(ui.post(path, {"model": "demo", "messages": more}))
        assert answer["choices"][0]["message"]["content"], answer
        print(f"{task}: answered")


def main() -> None:
    (program,) = sys.argv[1:]
    with (
        served("demo") as url,
        tempfile.TemporaryDirectory() as folder,
        web_ui(program, url, folder) as ui,
    ):
        check(ui)


if __name__ == "__main__":
    main()
