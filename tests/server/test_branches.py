"""/v1/branches: branches over HTTP are those of Runtime, and belong to their tenant."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime, SamplingParams
from radixserve.server.gate import branch_table
from radixserve.server.gate.tenants import Tenants
from tests.pacing import held, wait_until
from tests.server.local_server import LocalServer

PATH = "/v1/branches"
TEXT = "The json module reads and writes text that other programs understand"
KEYS = {name: f"key-of-{name}-0123456789" for name in ("ann", "bob")}


@pytest.fixture(autouse=True)
def _nothing_is_held(served: LocalServer, runtime: Runtime) -> Iterator[None]:
    runtime.flush_cache()
    before = runtime.cache_stats()["sessions"]
    yield
    table = served.server.branches
    assert len(table) == len(table._leases) == len(table._num_tokens) == 0
    assert runtime.cache_stats()["sessions"] <= before


def create(served: LocalServer, prompt: Any = TEXT, **fields: Any) -> str:
    name = served.post(PATH, {"prompt": prompt, **fields})["id"]
    assert isinstance(name, str)
    return name


def act(served: LocalServer, name: str, what: str, **fields: Any) -> dict[str, Any]:
    return dict(served.post(f"{PATH}/{name}/{what}", fields))


def delete(served: LocalServer, *names: str, **options: Any) -> None:
    for name in names:
        answer = served.client.delete(f"{PATH}/{name}", **options)
        assert answer.status_code == 200, answer.text
        assert answer.json()["deleted"] is True


def test_a_life_equals_that_of_a_branch_of_runtime(served: LocalServer, runtime: Runtime) -> None:
    params = SamplingParams(max_tokens=6, seed=3, ignore_eos=True)
    fields = {"max_tokens": 6, "seed": 3, "ignore_eos": True, "return_token_ids": True}
    with runtime.branch(TEXT, namespace="/mine") as root:
        length = root.length
        left, right = root.fork(2)
        left.extend(" quickly")
        expected = [left.generate(params), right.generate(params)]
        right.truncate(length + 2)
        again = right.generate(params)
        scores = root.score([" and", " or not"])
        left.release(), right.release()
    name = create(served)
    forks = act(served, name, "fork", n=2)["data"]
    assert [fork["parent"] for fork in forks] == [name, name]
    first, second = (fork["id"] for fork in forks)
    extended = act(served, first, "extend", tokens=" quickly")
    assert extended["length"] > length == forks[0]["length"]
    answers = [act(served, fork, "generate", **fields) for fork in (first, second)]
    for answer, completion in zip(answers, expected, strict=True):
        (choice,) = answer["choices"]
        assert choice["text"] == completion.text
        assert choice["token_ids"] == completion.token_ids
        assert answer["usage"]["prompt_tokens"] == completion.usage.prompt_tokens
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == completion.usage.cached_tokens
    assert answers[1]["branch"]["length"] == length + 6
    assert act(served, second, "truncate", length=length + 2)["length"] == length + 2
    assert act(served, second, "generate", **fields)["choices"][0]["text"] == again.text
    scored = act(served, name, "score", candidates=[" and", " or not"])
    assert [entry["logprob"] for entry in scored["data"]] == pytest.approx(
        [score.logprob for score in scores], abs=1e-4
    )
    shown = served.client.get(f"{PATH}/{second}?tokens=true").json()
    assert shown["length"] == len(shown["token_ids"]) == length + 8
    assert shown["cached_tokens"] == length + 7
    assert shown["text"].startswith(TEXT)
    assert shown["usage"]["completion_tokens"] == 12
    delete(served, name, first, second)
    assert served.client.get(f"{PATH}/{name}").status_code == 404


def test_a_stream_moves_the_branch_too(served: LocalServer) -> None:
    name = create(served, None, messages=[{"role": "user", "content": "Hello"}])
    (fork,) = act(served, name, "fork")["data"]
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    whole = act(served, fork["id"], "generate", **fields)
    events = served.stream(f"{PATH}/{name}/generate", fields)
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    assert text == whole["choices"][0]["text"]
    assert events[-1]["branch"]["length"] == whole["branch"]["length"]
    delete(served, name, fork["id"])


def test_no_two_moves_at_the_same_time_and_no_end_under_way(runtime: Runtime) -> None:
    with LocalServer(runtime, session_lease=0.0) as served:
        name = create(served)
        path = f"{PATH}/{name}"
        table = served.server.branches
        body = {"max_tokens": 200, "ignore_eos": True, "stream": True}
        with contextlib.ExitStack() as engine, contextlib.ExitStack() as stream:
            engine.enter_context(held(runtime))
            lines = stream.enter_context(
                served.client.stream("POST", f"{path}/generate", json=body)
            ).iter_lines()
            next(lines)
            for what, fields in (("truncate", {"length": 1}), ("generate", {})):
                other = served.client.post(f"{path}/{what}", json=fields)
                assert other.status_code == 409
                assert other.json()["error"]["code"] == "branch_busy"
            served.call(expire(served))
            assert len(table) == 1
            (fork,) = act(served, name, "fork")["data"]
            engine.close()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        wait_until(lambda: not served.server.in_flight)
        served.call(expire(served))
        assert len(table) == 0
        assert served.client.get(f"{PATH}/{fork['id']}").status_code == 404


async def expire(served: LocalServer) -> None:
    served.server.branches.close_expired()


def test_branches_belong_to_a_tenant_and_a_salt(runtime: Runtime, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("".join(f"{name} {key}\n" for name, key in KEYS.items()))
    path.chmod(0o600)
    with LocalServer(runtime, Tenants.load(str(path)), max_conversations=3) as served:
        as_ = {name: {"authorization": f"Bearer {key}"} for name, key in KEYS.items()}
        body = {"prompt": TEXT}
        bobs = served.post(PATH, body, headers=as_["bob"])["id"]
        salted = served.post(PATH, {**body, "cache_salt": "s"}, headers=as_["bob"])["id"]
        anns = [served.post(PATH, body, headers=as_["ann"])["id"] for _ in range(4)]
        for name, who, query in (
            (bobs, "ann", ""),
            (bobs, "bob", "?cache_salt=s"),
            (salted, "bob", ""),
            (anns[0], "ann", ""),  # the fourth one took its place
        ):
            for method in ("GET", "DELETE"):
                answer = served.client.request(method, f"{PATH}/{name}{query}", headers=as_[who])
                assert answer.status_code == 404
            if not query:
                generate = f"{PATH}/{name}/generate"
                assert served.client.post(generate, json={}, headers=as_[who]).status_code == 404
        delete(served, bobs, headers=as_["bob"])
        delete(served, salted, headers=as_["bob"], params={"cache_salt": "s"})
        delete(served, *anns[1:], headers=as_["ann"])
        assert len(served.server.branches) == 0


def test_all_branches_of_a_tenant_have_a_bound_of_tokens(
    served: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [create(served, [5] * 40) for _ in range(3)]
    monkeypatch.setattr(branch_table, "MAX_TOKENS", 130)
    act(served, names[2], "extend", tokens=[5] * 30)
    assert served.client.get(f"{PATH}/{names[0]}").status_code == 404
    act(served, names[1], "truncate", length=1)
    delete(served, *names[1:])


def test_wrong_requests(served: LocalServer) -> None:
    name = create(served)
    for path, body, status, param in (
        ("", {}, 400, "prompt"),
        ("", {"prompt": TEXT, "messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
        ("", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("", {"prompt": TEXT, "whim": 1}, 400, "whim"),
        (f"/{name}/fork", {"n": 0}, 400, "n"),
        (f"/{name}/fork", {"n": 10_000}, 400, "n"),
        (f"/{name}/extend", {"tokens": [10**6]}, 400, "tokens"),
        (f"/{name}/extend", {"tokens": "x " * 20_000}, 400, "tokens"),
        (f"/{name}/truncate", {"length": 10_000}, 400, "length"),
        (f"/{name}/truncate", {}, 400, "length"),
        (f"/{name}/generate", {"max_tokens": 0}, 400, "max_tokens"),
        (f"/{name}/generate", {"n": 2}, 400, "n"),
        (f"/{name}/score", {"candidates": []}, 400, "candidates"),
        (f"/{name}/score", {"candidates": [""]}, 400, "candidates"),
        ("/branch_0/extend", {"tokens": "x"}, 404, "branch_id"),
    ):
        answer = served.client.post(f"{PATH}{path}", json=body)
        assert answer.status_code == status, (path, body, answer.text)
        assert answer.json()["error"]["param"] == param
    delete(served, name)
    with LocalServer(served.server.runtime, max_conversations=0) as none:
        assert none.client.post(PATH, json={"prompt": TEXT}).status_code == 400
