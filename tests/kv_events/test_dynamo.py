"""Dynamo's indexer as the judge: it follows a cache by the published events alone."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

if importlib.util.find_spec("dynamo") is None:
    pytest.skip("pip install ai-dynamo-runtime==1.6.1 msgspec pyzmq", allow_module_level=True)

from tests.kv_events.test_publisher import SIZE, Replica
from tests.pacing import wait_until

_NEW_TOKENS = itertools.count(100)
HISTORY = [1, 2, 3, 4, 5, 6, 7, 8]


class Indexer:
    """`python -m dynamo.indexer`, which follows one replica."""

    def __init__(self, pub: str, replay: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port)]
        env = {**os.environ, "DYN_KV_INDEXER_TEST_ENDPOINTS": "1"}  # to pause it
        self.process = subprocess.Popen(command, env=env)
        wait_until(self.is_there)
        self.call(
            "/register",
            instance_id=1,
            endpoint=pub,
            replay_endpoint=replay,
            model_name="demo",
            block_size=SIZE,
        )

    def is_there(self) -> bool:
        try:
            urllib.request.urlopen(self.url + "/health", timeout=10).close()
        except OSError:
            assert self.process.poll() is None, "the indexer has ended"
            return False
        return True

    def call(self, path: str, **body: Any) -> Any:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def matched(self, tokens: list[int], **options: Any) -> int:
        """Tokens of the prompt that it takes for cached."""
        answer = self.call("/query", token_ids=tokens, model_name="demo", **options)
        found: int = answer["scores"].get("1", {}).get("0", 0)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def sockets() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"ipc://{folder}/pub", f"ipc://{folder}/replay"


@pytest.fixture
def replica(sockets: tuple[str, str]) -> Iterator[Replica]:
    replica = Replica(sockets)
    replica.put([*HISTORY, 9])
    yield replica
    replica.publisher.close()


@pytest.fixture
def indexer(sockets: tuple[str, str], replica: Replica) -> Iterator[Indexer]:
    """One that came after the first events and has caught up."""
    indexer = Indexer(*sockets)
    try:
        follow(indexer, replica)
        yield indexer
    finally:
        indexer.close()


def follow(indexer: Indexer, replica: Replica) -> None:
    """Until the indexer reads what is published now."""

    def is_following() -> bool:
        token = next(_NEW_TOKENS)
        replica.put([token] * SIZE)
        time.sleep(0.1)
        return indexer.matched([token] * SIZE) == SIZE

    wait_until(is_following)


def test_it_follows_what_is_stored_removed_and_cleared(indexer: Indexer, replica: Replica) -> None:
    assert indexer.matched(HISTORY) == 8, "what was stored before it came"
    replica.put([*HISTORY, 9, 10, 11, 12])
    wait_until(lambda: indexer.matched([*HISTORY, 9, 10, 11, 12, 13]) == 12)
    replica.put([50] * SIZE, "b")
    wait_until(lambda: indexer.matched([50] * SIZE, cache_salt="b") == SIZE)
    assert indexer.matched([50] * SIZE) == 0, "another namespace"
    assert indexer.matched(HISTORY, cache_salt="b") == 0
    replica.put([51] * SIZE)
    replica.cache.reset("b")
    replica.publisher.publish()
    wait_until(lambda: indexer.matched([50] * SIZE, cache_salt="b") == 0)
    assert indexer.matched([51] * SIZE) == SIZE
    with replica.cache.acquire([51] * SIZE, allow_full=True):
        replica.cache.evict(10_000)  # all that is not in use
    replica.publisher.publish()
    wait_until(lambda: indexer.matched(HISTORY) == 0)
    assert indexer.matched([51] * SIZE) == SIZE
    replica.cache.reset()
    replica.publisher.publish()
    wait_until(lambda: indexer.matched([51] * SIZE) == 0)


def test_it_asks_for_what_it_missed(indexer: Indexer, replica: Replica) -> None:
    indexer.call("/test/pause_listener", instance_id=1)
    replica.cache.evict(10_000)
    replica.put([60] * 2 * SIZE)
    indexer.call("/test/resume_listener", instance_id=1)
    follow(indexer, replica)
    assert indexer.matched(HISTORY) == 0
    assert indexer.matched([60] * 2 * SIZE) == 2 * SIZE


def test_it_notices_that_a_replica_was_restarted(
    indexer: Indexer, replica: Replica, sockets: tuple[str, str]
) -> None:
    replica.publisher.close()
    again = Replica(sockets)
    again.put([70] * SIZE)
    try:
        follow(indexer, again)
        assert indexer.matched(HISTORY) == 0
        assert indexer.matched([70] * SIZE) == SIZE
    finally:
        again.publisher.close()
