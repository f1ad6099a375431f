"""A client's own package against the server, in an environment of its own.

    python tests/server/clients/run.py CLIENT_PYTHON tests/server/clients/SCRIPT.py ...

Run it where radixserve is installed. It serves the demo model, a model whose every answer is a
thought, a text and a tool call, and one that takes pictures. Each script runs with CLIENT_PYTHON
and finds their addresses in RADIXSERVE_URL, RADIXSERVE_TOOLS_URL and RADIXSERVE_PICTURES_URL.
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


_MAKE_VISION = """
import sys
from pathlib import Path
from tests.images.vision_checkpoints import make_vision_checkpoint
make_vision_checkpoint(Path(sys.argv[1]), "idefics3")
"""


def main() -> None:
    python, *scripts = sys.argv[1:]
    assert scripts, __doc__
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as vision:
        for make in (["-m", "tests.server.scripted_model", folder], ["-c", _MAKE_VISION, vision]):
            command = [sys.executable, *make]
            subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": PATH})
        with served("demo") as url, served(folder) as tools_url, served(vision) as pictures_url:
            environment = {**os.environ, "RADIXSERVE_URL": url, "RADIXSERVE_TOOLS_URL": tools_url}
            environment["RADIXSERVE_PICTURES_URL"] = pictures_url
            environment.pop("PYTHONPATH", None)
            for script in scripts:
                subprocess.run([python, script], check=True, env=environment)


if __name__ == "__main__":
    main()
