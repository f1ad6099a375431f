"""Roles of messages: the protocol's, and those that the model's template names."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from tests.server.local_server import LocalServer
from tests.server.scripted_model import TEMPLATE, make_scripted

ROUTES = ("/v1/chat/completions", "/tokenize", "/v1/cache/lookup", "/v1/branches")
KNOWN = "system or developer or user or assistant or tool"


def said(role: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi"}, {"role": role, "content": "hm"}]


@pytest.mark.parametrize("path", ROUTES)
def test_an_unknown_role_is_refused_with_the_known_ones(served: LocalServer, path: str) -> None:
    answer = served.client.post(path, json={"messages": said("usr")})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages[1].role"
    assert error["message"] == f"messages[1].role must be {KNOWN}, got 'usr'"


def test_hints_and_other_protocols_refuse_it_too(served: LocalServer) -> None:
    hint = {"verb": "prefetch", "messages": said("usr")}
    for path, body in (
        ("/v1/cache/hints", {"hints": [hint]}),
        ("/v1/responses", {"input": said("usr")}),
        ("/v1/messages", {"model": "demo", "max_tokens": 1, "messages": said("usr")}),
        ("/v1/decisions", {"input": said("usr"), "questions": [
            {"type": "predicate", "instructions": "y"}]}),
    ):  # fmt: skip
        answer = served.client.post(path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        assert "role" in answer.text


def test_a_role_that_the_template_names_is_taken(tmp_path_factory: Any) -> None:
    template = TEMPLATE.replace(
        "message.role == 'tool' %}", "message.role in ['tool', 'critic'] %}"
    )
    assert "critic" in template
    folder = make_scripted(tmp_path_factory.mktemp("critic"), template=template)
    with Runtime(str(folder), num_pages=512) as runtime, LocalServer(runtime) as served:
        for path in ROUTES:
            answer = served.client.post(path, json={"messages": said("critic")})
            assert answer.status_code == 200, (path, answer.text)
            message = served.client.post(path, json={"messages": said("usr")}).json()["error"]
            assert f"{KNOWN} or critic" in message["message"]
