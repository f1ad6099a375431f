"""Clients with a read timeout of 15 s, and a prompt of 30 s: each gets its answer from its first
request.

    python tests/server/clients/long_prompt.py ANTHROPIC_PYTHON LANGCHAIN_PYTHON

Run it where radixserve and OpenAI's client are installed. The clients, each in its environment,
ask at the same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROMPT_S, READ_TIMEOUT_S = 30.0, 15.0
URL = os.environ.get("RADIXSERVE_URL", "")
ASK: Any = [{"role": "user", "content": "How do I sort a list?"}]


# -- in the environments of the clients -----------------------------------------------------------


def ask_openai() -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=READ_TIMEOUT_S)

    def chat() -> None:
        chunks = client.chat.completions.create(
            model="demo", messages=ASK, max_tokens=8, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    def completion() -> None:
        chunks = client.completions.create(model="demo", prompt="Sort", max_tokens=8, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    def response() -> None:
        events = client.responses.create(
            model="demo", input="Sort", max_output_tokens=8, stream=True
        )
        assert [event for event in events if event.type == "response.output_text.delta"]

    asking = [Caught(ask) for ask in (chat, completion, response)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
        assert thread.error is None, thread.error


def ask_anthropic() -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=URL, api_key="none", timeout=READ_TIMEOUT_S)
    with client.messages.stream(model="demo", messages=ASK, max_tokens=8) as stream:
        assert "".join(stream.text_stream)


def ask_langchain() -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="demo", base_url=f"{URL}/v1", api_key="none", timeout=READ_TIMEOUT_S, max_tokens=8
    )
    assert "".join(str(chunk.content) for chunk in model.stream("How do I sort a list?"))


class Caught(threading.Thread):
    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__()
        self._ask = ask
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._ask()
        except Exception as error:
            self.error = error


CLIENTS = {"openai": ask_openai, "anthropic": ask_anthropic, "langchain": ask_langchain}
NUM_REQUESTS = {
    "/v1/chat/completions": 2,  # and LangChain's
    "/v1/completions": 1,
    "/v1/responses": 1,
    "/v1/messages": 1,
    "/generate": 1,
}


# -- where radixserve is installed ----------------------------------------------------------------


def watch(port: int) -> None:
    """Prints when the head, the first ping and the end of a stream come."""
    body = json.dumps({"prompt": "Sort", "max_tokens": 8, "stream": True}).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=READ_TIMEOUT_S) as sock:
        asked = time.monotonic()
        rest = "content-type: application/json\r\nconnection: close\r\n\r\n"
        sock.sendall((head + rest).encode() + body)
        received, times = b"", {}
        while part := sock.recv(4096):
            received += part
            for name, mark in (("head", b"\r\n\r\n"), ("ping", b": ping"), ("end", b"[DONE]")):
                if mark in received:
                    times.setdefault(name, time.monotonic() - asked)
    print(*(f"{name} after {seconds:.2f} s," for name, seconds in times.items()))
    assert times["head"] < 1.0, "the head came late"
    assert 9.0 < times["ping"] < 13.0, "the first ping did not come after 10 s"
    assert times["end"] > PROMPT_S - 1, "the prompt took too little time to show anything"


@contextlib.contextmanager
def served(log: Path) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    root = Path(__file__).parents[3]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.slow_server", str(PROMPT_S), "serve", "demo",
             f"--port={port}", "--served-model-name=demo", "--log-requests"],
            cwd=root, stderr=stderr,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "kernels"), str(root)])},
        )  # fmt: skip
    try:
        while "serving demo at" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()


def main() -> None:
    pythons = dict(zip(CLIENTS, [sys.executable, *sys.argv[1:]], strict=True))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with served(log) as port:
            environment = {**os.environ, "RADIXSERVE_URL": f"http://127.0.0.1:{port}"}
            environment.pop("PYTHONPATH", None)
            asking = {
                name: subprocess.Popen([python, __file__, "--client", name], env=environment)
                for name, python in pythons.items()
            }
            watch(port)
            for name, process in asking.items():
                assert process.wait(120) == 0, f"{name} got no answer"
        lines = [json.loads(line) for line in log.read_text().splitlines() if line[:1] == "{"]
        requests = Counter(line["path"] for line in lines if line["method"] == "POST")
        assert requests == NUM_REQUESTS, f"a request was sent twice: {requests}"
        assert {line["status"] for line in lines} == {200}
        print(f"{sum(requests.values())} streams answered, none asked for twice")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        CLIENTS[sys.argv[2]]()
    else:
        main()
