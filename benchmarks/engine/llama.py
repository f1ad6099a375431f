"""llama.cpp's server as an `Engine`, over HTTP, a connection a request; its files of weights."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.base import Answer, Engine, Prompts, Unavailable
from harness.processes import ServerProcess

_OPTIONS = {"temperature": 0.0, "ignore_eos": True, "stream": True, "cache_prompt": True,
            "return_tokens": True}  # fmt: skip


class LlamaServer(Engine):
    """The program of `command`. It cannot forget: give it other prompts in each turn."""

    def __init__(self, command: Sequence[str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        log = Path(self._folder.name) / "log"
        try:
            self._server = ServerProcess(command, "/health", log)
        except (OSError, RuntimeError) as error:
            raise Unavailable(str(error)) from error
        self._pool = ThreadPoolExecutor(64)

    @property
    def pid(self) -> int:
        return self._server.pid

    def serve(self, prompts: Prompts, _sessions: Sequence[int], num_new: int) -> list[Answer]:
        return list(self._pool.map(lambda prompt: self._ask(prompt, num_new), prompts))

    def _ask(self, prompt: list[int], num_new: int) -> Answer:
        body = json.dumps({"prompt": prompt, "n_predict": num_new, **_OPTIONS}).encode()
        start, first, tokens = time.perf_counter(), 0.0, []
        address, head = self._server.address + "/completion", {"Content-Type": "application/json"}
        request = urllib.request.Request(address, body, head)
        with urllib.request.urlopen(request, timeout=600) as lines:
            for line in lines:
                if line.startswith(b"data: "):
                    first = first or time.perf_counter() - start
                    event = json.loads(line[6:])
                    tokens += event.get("tokens", [])
        self.num_computed += event["timings"]["prompt_n"]
        return Answer(tokens, first)

    def close(self) -> None:
        self._server.close()
        self._folder.cleanup()


def quantize(programs: Path, file: Path, kind: str | None, folder: Path) -> Path:
    """A GGUF file with the weights of `file` in llama-quantize's type `kind`, written into `folder`
    once; `file` itself without one."""
    if not kind:
        return file
    made = folder / f"{file.stem}-{kind}.gguf"
    if not made.exists():
        command = [programs / "llama-quantize", "--allow-requantize", file, made, kind]
        subprocess.run(command, check=True, capture_output=True)
    return made
