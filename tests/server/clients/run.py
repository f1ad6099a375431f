"""A client's own package against the server, in an environment of its own.

    python tests/server/clients/run.py CLIENT_PYTHON tests/server/clients/SCRIPT.py ...

Run it where radixserve is installed. It serves the demo model, and a model whose every answer is a
thought, a text and a tool call; each script runs with CLIENT_PYTHON and finds their addresses in
RADIXSERVE_URL and RADIXSERVE_TOOLS_URL.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PATH = os.pathsep.join([str(ROOT / "kernels"), str(ROOT)])


@contextlib.contextmanager
def served(model: str) -> Iterator[str]:
    """The address; the server has to end well, too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "radixserve", "serve", model, f"--port={port}",
         "--served-model-name=demo", "--num-pages=16384"],
        env={**os.environ, "PYTHONPATH": PATH},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1_200):
            assert process.poll() is None, "the server did not start"
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health/ready"):
                break
            time.sleep(0.1)
        else:
            raise AssertionError("the server was not ready in time")
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def main() -> None:
    python, *scripts = sys.argv[1:]
    assert scripts, __doc__
    with tempfile.TemporaryDirectory() as folder:
        make = [sys.executable, "-m", "tests.server.scripted_model", folder]
        subprocess.run(make, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": PATH})
        with served("demo") as url, served(folder) as tools_url:
            environment = {**os.environ, "RADIXSERVE_URL": url, "RADIXSERVE_TOOLS_URL": tools_url}
            environment.pop("PYTHONPATH", None)
            for script in scripts:
                subprocess.run([python, script], check=True, env=environment)


if __name__ == "__main__":
    main()
