"""`radixserve serve` in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent.parent


class Served:
    """The command in a process of its own."""

    def __init__(
        self, *arguments: str, program: Sequence[str] = ("-m", "radixserve"), **pipes: int
    ) -> None:
        """`program`: what Python runs in place of radixserve; `pipes`: of its process."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, *program, "serve", *arguments, "--port", str(self.port)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=environment(), **pipes
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60)

    def wait_until_ready(self) -> None:
        self.wait_until("/health/ready")

    def wait_until(self, path: str) -> None:
        """Wait until the server answers `path` with status 200."""
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            try:
                if self.client.get(path).status_code == 200:
                    return
            except httpx.TransportError:
                assert self.process.poll() is None, self.errors()
            time.sleep(0.05)
        raise AssertionError(f"the server did not answer {path} in time")

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def stop(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "kernels"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
