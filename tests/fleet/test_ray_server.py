"""`radixserve serve` with replicas, as a process."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

pytest.importorskip("ray", reason="the cluster needs the extra [cluster]")
pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

import httpx

from tests.pacing import wait_until
from tests.server.served_process import Served

RULE = (
    "max_replicas=2,target_ongoing_requests=2,metrics_interval_s=0.5,look_back_period_s=1,"
    "upscale_delay_s=0"
)
LONG = {"ignore_eos": True, "stream": True, "max_tokens": 2500, "temperature": 0}
NUM_STREAMS = 8

pytestmark = pytest.mark.timeout(600)  # processes start, and the machine may be busy


def test_load_adds_a_replica_and_sigterm_lets_requests_finish() -> None:
    served = Served("demo", "--autoscaling", RULE, "--num-pages", "16000",
                    "--shutdown-timeout", "400")  # fmt: skip
    have_begun = Barrier(NUM_STREAMS + 1)

    def read(at: int) -> list[str]:
        body = {**LONG, "prompt": f"How do I open file {at}?"}
        with httpx.Client(base_url=served.client.base_url, timeout=400) as client:
            while num_replicas(client) < 2:
                short = client.post("/v1/completions", json={**body, "stream": False}).json()
                assert short["usage"]["completion_tokens"] == LONG["max_tokens"]
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                first = next(lines)
                have_begun.wait(400)
                return [first, *lines]

    try:
        served.wait_until_ready()
        assert num_replicas(served.client) == 1
        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            streams = [pool.submit(read, at) for at in range(NUM_STREAMS)]
            have_begun.wait(400)
            served.process.send_signal(signal.SIGTERM)
            for stream in streams:
                lines = stream.result()
                assert lines[-2] == "data: [DONE]"
                assert '"finish_reason":"length"' in lines[-4]
        wait_until(lambda: served.process.poll() is not None)
        assert served.process.returncode == 0
    finally:
        served.stop()


def num_replicas(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    (found,) = [line for line in lines if line.startswith("radixserve:replicas ")]
    return float(found.split()[1])
