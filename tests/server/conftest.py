"""One model for all tests of the server; it needs the extra `[serve]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from radixserve import Runtime
    from tests.server.local_server import LocalServer


@pytest.fixture(scope="session")
def runtime() -> Iterator[Runtime]:
    """The demo model: it has text, and a chat template."""
    from radixserve import Runtime

    with Runtime("demo", num_pages=8192, max_running_requests=16, advice=True) as runtime:
        yield runtime


@pytest.fixture(scope="session")
def served(runtime: Runtime) -> Iterator[LocalServer]:
    """Without keys."""
    from tests.server.local_server import LocalServer

    with LocalServer(runtime) as served:
        yield served


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Its model answers with a thought, a text and a call, always."""
    from tests.server.scripted_model import CALL

    yield from _scripted(tmp_path_factory, CALL)


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Its model's answers have 1,000 tokens."""
    yield from _scripted(tmp_path_factory, [f"word{number} " for number in range(1_000)])


def _scripted(factory: pytest.TempPathFactory, answer: Sequence[str]) -> Iterator[LocalServer]:
    from radixserve import Runtime
    from tests.server.local_server import LocalServer
    from tests.server.scripted_model import make_scripted

    folder = make_scripted(factory.mktemp("scripted"), answer)
    with Runtime(str(folder), num_pages=16_384) as runtime, LocalServer(runtime) as served:
        yield served
        check_drained(runtime)


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Afterwards nothing runs and every page has its owner."""
    yield
    if "runtime" in request.fixturenames:
        check_drained(request.getfixturevalue("runtime"))


def check_drained(runtime: Runtime) -> None:
    """A client has its answer before the server has let go of all."""
    from tests.pacing import wait_until

    names = ("running", "waiting", "pages_private")
    wait_until(lambda: not any(runtime.cache_stats()[name] for name in names))
    runtime.check()
