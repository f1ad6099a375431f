"""The page's routes: what is sent, to whom, and that it costs a share of the time only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve import Runtime
from radixserve.cache import SnapshotView
from radixserve.server.config import ServerConfig
from radixserve.server.gate.limits import LONGEST_S, SHARE
from radixserve.server.gate.state import AppState
from radixserve.server.gate.tenants import Caller, Tenants
from radixserve.server.routes.dashboard_page import EVERY_S, Snapshots, session_id
from radixserve.server.wire.errors import ApiError
from tests.pacing import held
from tests.server.local_server import LocalServer
from tests.server.test_tenants import KEYS, as_, write

ROUTE = "/v1/cache/snapshot"
SECRETS = {"ann": "Only ann may read of her zebra", "bob": "Only bob may read of his walrus"}


@pytest.fixture(scope="module")
def own_runtime() -> Iterator[Runtime]:
    """Of this file alone: a pool where others' prefixes were flushed evicts those first."""
    with Runtime("demo", num_pages=8192) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def guarded(
    own_runtime: Runtime, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalServer]:
    path = tmp_path_factory.mktemp("keys") / "keys"
    lines = [f"{name} {key}{' admin' if name == 'root' else ''}" for name, key in KEYS.items()]
    with LocalServer(own_runtime, Tenants.load(write(path, "\n".join(lines)))) as served:
        for name, text in SECRETS.items():
            body = {"prompt": text, "max_tokens": 2, "session_id": f"of-{name}"}
            served.post("/v1/completions", body, headers=as_(name))
        yield served


def test_the_files_need_no_key_and_allow_no_script_but_their_own(guarded: LocalServer) -> None:
    scripts = [(f"/page/{name}.js", "javascript") for name in ("page", "chat", "teach", "pictures")]
    for path, kind in (("/", "html"), ("/page/style.css", "css"), *scripts):
        answer = guarded.client.get(path)
        assert answer.status_code == 200
        assert kind in answer.headers["content-type"]
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "unsafe" not in policy
        assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", "")
    assert "<script>" not in guarded.client.get("/").text
    assert " style=" not in guarded.client.get("/").text
    assert guarded.client.get("/page/../app.py").status_code in (401, 404)


def test_the_page_stays_small() -> None:
    folder = Path(__file__).parents[2] / "radixserve/server/routes/dashboard"
    sizes = {path.name: len(path.read_text().splitlines()) for path in folder.iterdir()}
    assert sorted(sizes) == [
        *("chat.js", "index.html", "page.js", "pictures.js", "style.css", "teach.js")
    ]
    assert sizes["page.js"] <= 945
    assert sizes["chat.js"] <= 460
    assert sizes["teach.js"] <= 60
    assert sizes["pictures.js"] <= 80
    assert sizes["style.css"] < 250


def test_tenants_see_their_own_part_only(guarded: LocalServer, own_runtime: Runtime) -> None:
    seen = {name: guarded.post(ROUTE, {}, headers=as_(name)) for name in KEYS}
    for name, other in (("ann", "bob"), ("bob", "ann")):
        found, text = seen[name], json.dumps(seen[name])
        assert SECRETS[name] in text
        assert SECRETS[other] not in text
        assert f"of-{name}" in text
        assert f"of-{other}" not in text
        assert found["tenant"] == name
        assert not found["is_admin"]
        assert {space["name"] for space in found["namespaces"]} == {name}
        assert not {"free", "tree_of_others"} & set(found["counters"])
        assert "pages_free" not in found["counters"]
        assert "evicted_tokens" not in found["counters"]
        assert found["victims"] == []
        own = sum(node["num_pages"] for node in found["nodes"])
        assert own == found["counters"]["pages_tree"] > 0
        letters = found["pages"]["owners"]
        assert set(letters) <= set("ots")  # nothing of theirs runs
        assert len(letters) - letters.count("o") <= own
        assert found["counters"]["prompted_tokens"] == own_tokens(guarded, name)
    everything = json.dumps(seen["root"])
    assert all(text in everything for text in SECRETS.values())
    assert seen["root"]["counters"]["pages_tree"] == own_runtime.cache_stats()["pages_tree"]
    assert seen["root"]["victims"]


def own_tokens(served: LocalServer, name: str) -> int:
    answer = served.client.get("/v1/cache/stats", headers=as_(name))
    tokens = answer.json()["prompt_tokens"]
    assert isinstance(tokens, int)
    return tokens


def test_what_a_tenant_asks_for_leads_to_no_other(
    guarded: LocalServer, own_runtime: Runtime
) -> None:
    ids = own_runtime.tokenize(SECRETS["bob"]).tolist()
    body = {"path": ids, "opened": list(range(100))}
    assert SECRETS["bob"] not in json.dumps(guarded.post(ROUTE, body, headers=as_("ann")))
    assert SECRETS["bob"] in json.dumps(guarded.post(ROUTE, body, headers=as_("bob")))


def test_requests_of_a_tenant_as_they_run(guarded: LocalServer, own_runtime: Runtime) -> None:
    body = {"prompt": "One that takes its time", "max_tokens": 400, "ignore_eos": True,
            "stream": True}  # fmt: skip
    seen = []
    for name in ("ann", "bob", "root"):
        with (
            held(own_runtime),
            guarded.client.stream("POST", "/v1/completions", json=body, headers=as_("ann")) as one,
        ):
            lines = one.iter_lines()  # the stream is closed with its iterator
            next(lines)
            seen.append(snap(guarded, name))
    mine, theirs, all_ = seen
    (request,) = mine["requests"]
    assert request["state"] == "decode"
    assert request["generated_tokens"] > 0
    assert sum(count for _, count in request["pages"]) == request["num_pages"]
    assert mine["running"] == all_["running"] == 1
    assert (theirs["running"], theirs["requests"]) == (0, [])
    assert set(theirs["pages"]["owners"]) <= set("ots")
    assert "k" in mine["pages"]["owners"]


def snap(served: LocalServer, name: str) -> Any:
    """One that nobody has asked for before."""
    return served.post(ROUTE, {"opened": [next(_unused)]}, headers=as_(name))


_unused = iter(range(10**6, 10**7))  # ids that no node has


def test_wrong_bodies(served: LocalServer) -> None:
    for body, param in (
        ({"opened": list(range(201))}, "opened"),
        ({"path": [-1]}, "path"),
        ({"path": [2**31]}, "path"),
        ({"within": "bob"}, "within"),
    ):
        answer = served.client.post(ROUTE, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


def test_the_comparison(guarded: LocalServer) -> None:
    assert guarded.client.post("/v1/cache/compare", json={}, headers=as_("ann")).status_code == 403
    found = guarded.post("/v1/cache/compare", {}, headers=as_("root"))
    assert [run["cache"] for run in found["caches"]] == ["radix", "hash", "off"]
    radix, hashed, off = (run["computed_tokens"] for run in found["caches"])
    assert radix < hashed < off
    assert found["caches"][2]["cached_tokens"] == 0
    sums = {run["cached_tokens"] + run["computed_tokens"] for run in found["caches"]}
    assert len(sums) == 1
    assert found["same_answers"]


def test_names_of_sessions() -> None:
    assert session_id("3:ann:chat:7") == "chat:7"
    assert session_id("0::x") == "x"
    assert session_id("branch-7") == "branch-7"
    assert session_id("") == ""


class FakeRuntime:
    """Counts its snapshots, each of which costs so much."""

    def __init__(self, runtime: Runtime, cost_s: float) -> None:
        self._runtime = runtime
        self._cost_s = cost_s
        self.num_taken = 0
        self.tokenizer, self.config = runtime.tokenizer, runtime.config
        self.pictures = runtime.pictures
        self.close_session = runtime.close_session

    def cache_snapshot(self, view: SnapshotView) -> dict[str, Any]:
        self.num_taken += 1
        return {**self._runtime.cache_snapshot(view), "engine_s": self._cost_s}

    def status(self) -> Any:
        return self._runtime.status()


def test_viewers_share_snapshots_within_the_share_of_time(runtime: Runtime) -> None:
    """200 viewers, each asking again when it was told to, for 100 seconds of a clock."""
    cost_s, now = 0.02, 0.0
    fake: Any = FakeRuntime(runtime, cost_s)
    server = AppState(ServerConfig(port=0), "demo", Tenants())
    server.set_runtime(fake)
    snapshots = Snapshots(server, lambda: now)
    caller = Caller("", is_admin=True)

    async def look() -> list[int]:
        nonlocal now
        due, answers = [0.0] * 200, [0, 0]
        while now < 100.0:
            at = min(range(200), key=due.__getitem__)
            now = max(now, due[at])
            found = json.loads(await snapshots.get(caller, SnapshotView()))
            assert found["next_s"] >= EVERY_S
            due[at] = now + found["next_s"]
            answers[now > 50.0] += 1
        return answers

    _, later = asyncio.run(look())
    assert fake.num_taken * cost_s <= 100 * SHARE + 2 * cost_s
    assert fake.num_taken >= 0.5 * 100 * SHARE / cost_s
    assert later * 0.0005 <= 50 * SHARE * 1.1
    assert snapshots.num_taken == fake.num_taken


def test_nothing_is_taken_for_nobody_and_many_different_ones_are_refused(runtime: Runtime) -> None:
    fake: Any = FakeRuntime(runtime, 1.0)  # 100 seconds of the share: the longest wait
    server = AppState(ServerConfig(port=0), "demo", Tenants())
    server.set_runtime(fake)
    snapshots = Snapshots(server)
    caller = Caller("", is_admin=True)

    async def look() -> int:
        found = json.loads(await snapshots.get(caller, SnapshotView()))
        assert found["next_s"] <= LONGEST_S
        views = [SnapshotView(opened=frozenset({number})) for number in range(40)]
        tasks = [asyncio.create_task(snapshots.get(caller, view)) for view in views]
        await asyncio.sleep(0.05)
        assert (await snapshots.get(caller, SnapshotView())).startswith(b"{")
        refused = [task.exception() for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(error, ApiError) and error.status == 429 for error in refused)
        return len(refused)

    assert fake.num_taken == 0
    assert asyncio.run(look()) == 40 - 32
    assert fake.num_taken == 1
