"""Generated requests, from the server's own schema: none of them is answered with a 5xx."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")

from hypothesis import Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.errors import Unsatisfiable  # noqa: E402

from radixserve import Runtime  # noqa: E402
from tests.pacing import PATIENCE_S  # noqa: E402
from tests.server.local_server import LocalServer  # noqa: E402

EXAMPLES = int(os.environ.get("RADIXSERVE_SCHEMA_EXAMPLES", "6"))  # a route and kind


@pytest.fixture(scope="module")
def short_served() -> Iterator[LocalServer]:
    """Answers cannot become long."""
    with Runtime("demo", num_pages=4096, max_seq_len=48) as runtime, LocalServer(runtime) as served:
        yield served


def test_no_generated_request_is_an_error_of_the_server(short_served: LocalServer) -> None:
    schema = schemathesis.openapi.from_url(f"{short_served.url}/openapi.json", timeout=PATIENCE_S)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 15
    seen: set[int] = set()
    for operation in operations:
        if operation.path in ("/metrics", "/v1/cache/compare"):  # they take nothing
            continue
        for mode in schemathesis.GenerationMode:

            @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
            @settings(max_examples=EXAMPLES, phases=[Phase.generate])
            def ask(case: object, data: object) -> None:  # noqa: ARG001
                answer = case.call(  # type: ignore[attr-defined]
                    base_url=short_served.url, timeout=PATIENCE_S
                )
                seen.add(answer.status_code)
                assert answer.status_code < 500, answer.text

            with contextlib.suppress(Unsatisfiable):  # no request of this route is wrong
                ask()
    assert {200, 400} <= seen
