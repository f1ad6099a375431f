"""Responses in the background: their states, their end by a client or by the server, and bounds."""

from __future__ import annotations

import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")
openai = pytest.importorskip("openai", reason="pip install openai==3.54.0")

from radixserve import Runtime  # noqa: E402
from radixserve.server.gate.tenants import Tenants  # noqa: E402
from radixserve.server.wire.errors import ApiError  # noqa: E402
from tests.pacing import held, wait_until  # noqa: E402
from tests.server.local_server import LocalServer  # noqa: E402

R = "/v1/responses"
ASK: dict[str, Any] = {
    "input": "How do I sort a list?", "max_output_tokens": 40, "temperature": 0, "ignore_eos": True,
}  # fmt: skip


def start(served: LocalServer, **fields: Any) -> Any:
    return served.post(R, {**ASK, "background": True, **fields})


def state(served: LocalServer, response_id: str) -> str:
    return str(served.client.get(f"{R}/{response_id}").json()["status"])


def ended(served: LocalServer, response_id: str) -> Any:
    """The response after its end."""
    wait_until(lambda: state(served, response_id) not in ("queued", "in_progress"))
    return served.client.get(f"{R}/{response_id}").json()


def cancel(served: LocalServer, response_id: str, **options: Any) -> Any:
    return served.client.post(f"{R}/{response_id}/cancel", **options)


def test_a_response_in_the_background(runtime: Runtime, served: LocalServer) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        fields = {**ASK, "model": "demo"}
        del fields["ignore_eos"]
        with held(runtime, 0):
            answer = client.responses.create(background=True, **fields)
            assert (answer.status, answer.background, answer.output) == ("queued", True, [])
            assert client.responses.retrieve(answer.id).status == "queued"
            items = client.responses.input_items.list(answer.id)
            assert items.data[0].content[0].text == ASK["input"]
        done = ended(served, answer.id)
        assert client.responses.retrieve(answer.id, stream=False).status == "incomplete"
        plain = client.responses.create(**fields)
        assert client.responses.retrieve(answer.id).output_text == plain.output_text != ""
        assert plain.background is False
        assert done["usage"]["output_tokens"] == 40
        assert done["incomplete_details"] == {"reason": "max_output_tokens"}
        more = client.responses.create(previous_response_id=answer.id, **fields)
        assert more.usage.input_tokens > plain.usage.input_tokens
        assert client.responses.cancel(answer.id).output_text == plain.output_text  # it has ended
        with pytest.raises(openai.BadRequestError, match=r"Cannot cancel a synchronous response\."):
            client.responses.cancel(plain.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.cancel("resp_0")
        with pytest.raises(openai.BadRequestError, match="stream is not supported"):
            client.responses.retrieve(answer.id, stream=True)


def test_it_completes(calling: LocalServer) -> None:
    """With its thought, its text and its call."""
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    done = ended(
        calling, start(calling, tools=[tool], ignore_eos=False, max_output_tokens=99)["id"]
    )
    assert done["status"] == "completed"
    assert [item["type"] for item in done["output"]] == ["reasoning", "message", "function_call"]
    call_id = done["output"][-1]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "5"}
    more = {"input": [result], "tools": [tool], "previous_response_id": done["id"]}
    assert calling.post(R, more)["status"] == "completed"


def test_cancel(runtime: Runtime, served: LocalServer) -> None:
    """Whether it is queued or in progress; once cancelled, it stays so and cannot be continued."""
    for steps, status in ((0, "queued"), (3, "in_progress")):
        with held(runtime, steps):
            name = start(served)["id"]
            wait_until(lambda: state(served, name) == status)  # noqa: B023
            with pytest.raises(openai.BadRequestError, match=f"is {status}: it has no answer"):
                continue_it(served, name)
            answer = cancel(served, name)
            assert answer.status_code == 200
            assert answer.json()["status"] == "cancelled"
        assert cancel(served, name).json() == answer.json()
        assert cancel(served, name, headers={"content-type": "application/json"}).is_success
        assert state(served, name) == "cancelled"
        with pytest.raises(openai.BadRequestError, match="is cancelled: it has no answer"):
            continue_it(served, name)


def continue_it(served: LocalServer, name: str) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        client.responses.create(model="demo", input="And?", previous_response_id=name)


def test_delete_ends_it(runtime: Runtime, served: LocalServer) -> None:
    with held(runtime):
        name = start(served)["id"]
        assert served.client.delete(f"{R}/{name}").json()["deleted"]
        wait_until(lambda: not served.server.in_flight)
    assert served.client.get(f"{R}/{name}").status_code == 404


def test_it_outlives_its_client(runtime: Runtime, served: LocalServer) -> None:
    with held(runtime):
        sock = served.connect(R, {**ASK, "background": True})
        head, _, body = sock.makefile("rb").read().partition(b"\r\n\r\n")
        assert b"200 OK" in head
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        name = json.loads(body)["id"]
        wait_until(lambda: not served.num_connections or state(served, name) == "in_progress")
    assert ended(served, name)["usage"]["output_tokens"] == 40


def test_one_that_fails(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """As a newer request of its session takes its place, or by its own error; and its log."""
    caplog.set_level(logging.INFO, "radixserve.requests")
    with LocalServer(runtime, log_requests=True) as served:
        with held(runtime, 0):
            name = start(served, session_id="s")["id"]
            newer = start(served, session_id="s", supersede=True)["id"]
            failed = ended(served, name)
            assert failed["status"] == "failed"
            assert failed["error"]["message"] == "a newer request of this session took its place"
        assert ended(served, newer)["status"] == "incomplete"
        for wrong in ({"input": "x " * 9_000}, {"top_p": 2}):  # at once, as for any response
            answer = served.client.post(R, json={**ASK, **wrong, "background": True})
            assert answer.status_code == 400
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    for answer_id, status in ((name, "failed"), (newer, "incomplete")):
        own = [line for line in lines if f"resp_{line['id']}" == answer_id]
        assert [line["background"] for line in own] == ["queued", status]
        assert ("completion_tokens" in own[1]) == (status == "incomplete")


def test_a_shutdown_ends_it(runtime: Runtime, served: LocalServer) -> None:
    async def end_all() -> None:
        served.server.background.end_all(ApiError(503, "the server was shut down"))

    with held(runtime):
        names = [start(served)["id"] for _ in range(3)]
        served.call(end_all())
        for name in names:
            assert ended(served, name)["error"]["message"] == "the server was shut down"
        assert not served.server.in_flight


def test_bounds_of_each_tenant(runtime: Runtime, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ann key-of-ann-0123456789\nbob key-of-bob-0123456789\n")
    path.chmod(0o600)
    settings = {"max_responses": 2, "max_response_bytes": 9_000}
    with LocalServer(runtime, Tenants.load(str(path)), **settings) as served:

        def send(tenant: str, method: str, at: str = "", **fields: Any) -> Any:
            headers = {"authorization": f"Bearer key-of-{tenant}-0123456789"}
            body = {"json": {**ASK, "background": True, **fields}} if not at else {}
            return served.client.request(method, f"{R}{at}", headers=headers, **body)

        with held(runtime, 0):
            names = [send("ann", "POST").json()["id"] for _ in range(2)]
            full = send("ann", "POST")
            assert (full.status_code, full.json()["error"]["code"]) == (429, "background_full")
            assert send("bob", "POST").status_code == 200
            for method, at in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
                assert send("bob", method, f"/{names[0]}{at}").status_code == 404
            assert send("ann", "POST", f"/{names[0]}/cancel").json()["status"] == "cancelled"
            assert send("ann", "POST", input="x " * 1_250).status_code == 429  # bytes
            assert send("bob", "POST", input="x " * 1_600).status_code == 413
            assert send("ann", "POST").status_code == 200
        wait_until(lambda: not served.server.in_flight)
        assert send("ann", "GET", f"/{names[1]}").json()["status"] == "incomplete"
    with LocalServer(runtime, max_responses=0) as served:
        answer = served.client.post(R, json={**ASK, "background": True})
        assert answer.status_code == 400
        assert "stores none" in answer.text
    with LocalServer(runtime, max_response_bytes=3_500) as served:
        name = start(served, max_output_tokens=2_000)["id"]
        assert "too large to be stored" in ended(served, name)["error"]["message"]
        assert served.post(R, {"input": "a", "max_output_tokens": 1})["store"] is True
        large = served.post(R, {"input": "a " * 1_000, "max_output_tokens": 1})
        assert large["store"] is False, "it cannot be continued"
