"""The dashboard at /: its files, the snapshots that it reads (/v1/cache/snapshot), the
comparison of caches that it shows (/v1/cache/compare), and the teaching allocator."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.api.runtime import Runtime
from radixserve.cache import SnapshotView
from radixserve.config import CacheKind
from radixserve.request import SamplingParams, unmarked
from radixserve.server.gate.json_body import JsonRoute
from radixserve.server.gate.limits import SHARE, Ration
from radixserve.server.gate.state import AppState, caller_of, check_admin
from radixserve.server.gate.tenants import Caller
from radixserve.server.wire.errors import ApiError
from radixserve.server.wire.json_response import answer, dump
from radixserve.server.wire.schema import SnapshotRequest, TeachingRequest
from radixserve.text.picture_parts import shown_text

router = APIRouter(route_class=JsonRoute)
_FOLDER = Path(__file__).parent / "dashboard"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/pictures.js": ("pictures.js", "text/javascript; charset=utf-8"),
    "/page/chat.js": ("chat.js", "text/javascript; charset=utf-8"),
    "/page/teach.js": ("teach.js", "text/javascript; charset=utf-8"),
}
PATHS = frozenset(_FILES)  # need no key: they are static files
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_MAX_OPENED = 200
_MAX_PATH = 100_000


@router.get("/", include_in_schema=False)
@router.get("/page/style.css", include_in_schema=False)
@router.get("/page/page.js", include_in_schema=False)
@router.get("/page/pictures.js", include_in_schema=False)
@router.get("/page/chat.js", include_in_schema=False)
@router.get("/page/teach.js", include_in_schema=False)
async def file(request: Request) -> Response:
    name, kind = _FILES[request.url.path]
    return Response((_FOLDER / name).read_bytes(), headers=_HEADERS, media_type=kind)


@router.post("/v1/cache/snapshot")
async def snapshot(request: Request, body: SnapshotRequest) -> Response:
    """A bounded snapshot of the cache and the requests for the dashboard: the caller's own part;
    for an admin, all of it.

    `opened`: ids of nodes to show with more children. `path`: token ids whose nodes are shown.
    Snapshots are shared and limited in rate; "next_s" is how many seconds to wait before the next.
    """
    caller = caller_of(request)
    for name, values, limit in (
        ("opened", body.opened, _MAX_OPENED),
        ("path", body.path, _MAX_PATH),
    ):
        if values is not None and len(values) > limit:
            raise ApiError(400, f"{name} takes {limit} numbers at most", param=name)
        if any(not 0 <= value < 2**31 for value in values or ()):
            raise ApiError(400, f"{name} must be numbers from 0 to 2**31 - 1", param=name)
    view = SnapshotView(
        within=None if caller.is_admin else caller.tenant,
        opened=frozenset(body.opened or ()),
        path=tuple(body.path or ()),
        path_namespace=caller.namespace(None),
    )
    return Response(
        await request.app.state.snapshots.get(caller, view), media_type="application/json"
    )


@router.post("/v1/cache/compare")
async def compare(request: Request) -> Response:
    """Run a short script on the bundled demo model with the radix cache, the hash cache, and
    without a cache. Needs an admin key.

    One script runs at a time; requests that arrive meanwhile get its answer.
    """
    check_admin(request)
    return answer(await request.app.state.comparison.run())


@router.post("/v1/cache/allocator")
async def allocator(body: TeachingRequest) -> Response:
    """Play a script of requests on a cache of its own with 24 pages of 4 tokens, and return the
    state after each action. Nothing of it is kept."""
    from radixserve.replay.teaching import NUM_PAGES, PAGE_SIZE, play  # is not needed to start

    states = await asyncio.to_thread(play, body.script, body.cache or "radix")
    return answer({"pages": NUM_PAGES, "page_size": PAGE_SIZE, "states": states})


EVERY_S = 0.4  # the least age at which a snapshot is replaced
ANSWER_COST_S = 0.0005  # estimated cost of an answer with a snapshot that exists
_MAX_KEPT = 32
_MAX_TEXTS = 8192
_COUNTERS = (
    "prompted_tokens reused_tokens computed_tokens generated_tokens prefilled_tokens "
    "decoded_tokens evicted_tokens preemptions splits finished nodes namespaces sessions "
    "pages_total pages_free pages_tree pages_locked pages_private pages_leased pages_shared "
    "superseded_tokens"
).split()


class Snapshots:
    """Snapshots of the cache for the open dashboards, limited to a share of the time. Owned by the
    event loop.

    A snapshot is taken only on request, and shared by all requests for the same one. Its cost, in
    the engine's thread and here, is limited as `Ration` says. Each answer says when to ask again;
    the more viewers there are, the longer they wait.
    """

    def __init__(self, server: AppState, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._clock = clock
        self._kept: OrderedDict[tuple[str, SnapshotView], tuple[float, bytes]] = OrderedDict()
        self._texts: OrderedDict[tuple[int, ...], str] = OrderedDict()
        self.ration = Ration(clock)
        self._answers_until = 0.0  # by the clock: when the answers' cost is below the share again
        self.num_taken = 0

    async def get(self, caller: Caller, view: SnapshotView) -> bytes:
        """The snapshot as JSON. Raises ApiError 429 if too many requests wait for snapshots."""
        key = (caller.tenant, view)
        kept = self._fresh(key)
        if kept is None:
            kept = await self._make(key, caller, view)
        now = self._clock()
        self._answers_until = max(self._answers_until, now) + ANSWER_COST_S / SHARE
        wait_s = max(EVERY_S, self.ration.next_at - now, self._answers_until - now)
        return kept[:-1] + f',"next_s":{wait_s:.2f}}}'.encode()

    def _fresh(self, key: tuple[str, SnapshotView]) -> bytes | None:
        """The last snapshot if it is recent, or a new one may not be taken yet; else None."""
        made_at, kept = self._kept.get(key, (0.0, None))
        if kept is None or self._clock() >= max(made_at + EVERY_S, self.ration.next_at):
            return None
        return kept

    async def _make(
        self, key: tuple[str, SnapshotView], caller: Caller, view: SnapshotView
    ) -> bytes:
        async with self.ration.turn():
            kept = self._fresh(key)  # another request may have taken it meanwhile
            if kept is not None:
                return kept
            await self.ration.pause()
            snapshot, cost_s = await asyncio.to_thread(self._take, caller, view)
            self.num_taken += 1
            self.ration.spend(cost_s)
            self._kept[key] = (self._clock(), snapshot)
            self._kept.move_to_end(key)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
            return snapshot

    def _take(self, caller: Caller, view: SnapshotView) -> tuple[bytes, float]:
        """Take a snapshot; called in a thread. Returns its JSON and the processor time in
        seconds."""
        server = self._server
        start = time.thread_time()
        snapshot = server.runtime.cache_snapshot(view)
        engine_s = snapshot.pop("engine_s")
        stats = {**server.runtime.status().stats, **snapshot.pop("counters")}
        for entry in (*snapshot["nodes"], *snapshot["victims"]):
            entry["text"] = self._text(entry["head"])
            entry["tail_text"] = self._text(entry["tail"])
            del entry["tail"]
        for entry in snapshot["nodes"]:
            entry["sessions"] = [session_id(name) for name in entry["sessions"]]
        for entry in snapshot["requests"]:
            entry["session"] = session_id(entry["session"])
        snapshot |= {
            "model": server.model_name,
            "tenant": caller.tenant,
            "is_admin": caller.is_admin,
            "takes_pictures": server.pictures is not None,
            "counters": _counters(server, caller, stats, snapshot),
            "cost_ms": {"engine": round(engine_s * 1e3, 2)},
        }
        text = dump(snapshot)
        return text.encode(), engine_s + time.thread_time() - start

    def _text(self, tokens: list[int]) -> str | None:
        tokenizer = self._server.runtime.tokenizer
        if tokenizer is None:
            return None
        key = tuple(unmarked(np.array(tokens, np.int32)).tolist())  # without marks of adapters
        text = self._texts.get(key)
        if text is None:
            decode = partial(tokenizer.decode, keep_special=True)
            text = self._texts[key] = shown_text(key, decode, self._server.pictures)
            while len(self._texts) > _MAX_TEXTS:
                self._texts.popitem(last=False)
        return text


def session_id(name: str) -> str:
    """The client's own id in the name that `SessionTable` gave to a cache session."""
    length, colon, rest = name.partition(":")
    if colon and length.isdigit() and rest[int(length) : int(length) + 1] == ":":
        return rest[int(length) + 1 :]
    return name


def _counters(
    server: AppState, caller: Caller, stats: Any, snapshot: dict[str, Any]
) -> dict[str, int | float]:
    """The counters of all requests for an admin; for a tenant, those of its ended requests."""
    if caller.is_admin:
        return {name: stats[name] for name in _COUNTERS if name in stats}
    own = server.tenant_usage.of(caller.tenant)
    locked = [space["num_locked"] or 0 for space in snapshot["namespaces"]]
    return {
        "prompted_tokens": int(own["prompt_tokens"]),
        "reused_tokens": int(own["cached_tokens"]),
        "computed_tokens": int(own["computed_tokens"]),
        "generated_tokens": int(own["completion_tokens"]),
        "finished": int(own["requests"]),
        "pages_tree": sum(space["num_pages"] for space in snapshot["namespaces"]),
        "pages_locked": sum(locked),
        "pages_private": snapshot["pages"]["private"],
    }


# The requests, and the token ids of each answer.
PlayedScript = tuple[list[dict[str, Any]], list[list[int]]]
COMPARISON_PAGE_SIZE = 16  # tokens a page, for all three
_COMPARISON_TRIES = 2  # runs of each cache, in turns; the faster run counts
_COMPARED_CACHES: tuple[CacheKind, ...] = ("radix", "hash", "off")
_COMPARISON_PAGES = 512
_COMPARISON_TOKENS = 12  # of each answer
_SYSTEM = """\
You are a helpful assistant for the Python standard library. Keep your answers short. Name the \
module a function is in. Use the wording of the documentation. Write code in backquotes. If you do \
not know the answer, say so.

Notes on list.sort: sort the list in place, using only comparisons between items. The argument \
`key` is a function of one argument that is called once for each item. The sort is stable: items \
that compare equal keep their order.

Notes on shutil.copy: copy the file `src` to the file or directory `dst`. The contents and the \
permission bits are copied; other metadata, such as the times of creation and modification, is not.

Notes on generators: a function that contains `yield` returns an iterator. Its body runs up to the \
next `yield` each time that an item is asked for, and goes on from there the next time."""
_CHATS = (
    ("How do I sort a list?", "What is a lambda?"),
    ("How do I copy a file?", "How do I delete a file?"),
    ("What is a generator?", "What is an iterator?"),
)
_BRANCHES = ("Give an example.", "Why is that so?", "Is there another way?")


class Comparison:
    """Runs a short script with the radix cache, the hash cache, and without a cache, in a thread.
    Owned by the event loop."""

    def __init__(self) -> None:
        self._running: asyncio.Task[dict[str, Any]] | None = None

    async def run(self) -> dict[str, Any]:
        """The result of the running script, or of a new one: see `compare_caches`."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(asyncio.to_thread(compare_caches))
        return await asyncio.shield(self._running)


def compare_caches() -> dict[str, Any]:
    """Run the script with each cache. Returns {"caches": [{"cache", "requests": [{"title",
    "cached_tokens", "computed_tokens", "time_s"}], "cached_tokens", "computed_tokens", "time_s"}],
    "same_answers", "model", "page_size"}."""
    runs, answers = [], []
    tries = [[_run_script(cache) for cache in _COMPARED_CACHES] for _ in range(_COMPARISON_TRIES)]
    for cache, cache_tries in zip(_COMPARED_CACHES, zip(*tries, strict=True), strict=True):
        requests, ids = min(
            cache_tries, key=lambda played: sum(request["time_s"] for request in played[0])
        )
        answers.append(ids)
        sums = {
            name: sum(request[name] for request in requests)
            for name in ("cached_tokens", "computed_tokens", "time_s")
        }
        runs.append({"cache": cache, "requests": requests, **sums})
    same = all(ids == answers[0] for ids in answers)
    return {
        "model": "demo",
        "page_size": COMPARISON_PAGE_SIZE,
        "caches": runs,
        "same_answers": same,
    }


def _run_script(cache: CacheKind) -> PlayedScript:
    with Runtime(
        "demo",
        cache=cache,
        page_size=COMPARISON_PAGE_SIZE,
        num_pages=_COMPARISON_PAGES,
        device="cpu",
    ) as runtime:
        return _play_script(runtime)


def _play_script(runtime: Runtime) -> PlayedScript:
    """Run chats of two turns with the same system prompt, then three branches of the last chat."""
    params = SamplingParams(max_tokens=_COMPARISON_TOKENS, temperature=0.0)
    runtime.generate("warm up " * 40, params, progress=False)
    runtime.flush_cache()
    requests: list[dict[str, Any]] = []
    ids: list[list[int]] = []

    def ask(title: str, messages: list[dict[str, str]]) -> str:
        start = time.perf_counter()
        done = runtime.generate(messages, params, progress=False)
        ids.append(done.token_ids)
        cached, computed = done.usage.cached_tokens, done.usage.computed_tokens
        counts = {"cached_tokens": cached, "computed_tokens": computed}
        requests.append({"title": title, **counts, "time_s": time.perf_counter() - start})
        return done.text

    history: list[dict[str, str]] = []
    for number, (first, second) in enumerate(_CHATS, 1):
        history = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": first}]
        text = ask(f"chat {number}, first turn: {first}", history)
        history += [_message("assistant", text), _message("user", second)]
        text = ask(f"chat {number}, second turn: {second}", history)
        history.append(_message("assistant", text))
    for number, branch in enumerate(_BRANCHES, 1):
        ask(
            f"branch {number} of chat {len(_CHATS)}: {branch}", [*history, _message("user", branch)]
        )
    return requests, ids


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
