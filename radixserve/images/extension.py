"""Pictures in the engine: a request is held until the embeddings that it needs are computed.

A thread encodes one picture at a time, in the order of the requests, and none whose K/V is cached.
The embeddings of a request stay until its prompt is computed. A request is not let in while those
of others take all of the memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from radixserve.daemon_call import call_in_thread
from radixserve.engine.engine import Engine
from radixserve.engine.extension import EngineExtension
from radixserve.errors import request_failed
from radixserve.picture import Picture
from radixserve.request import Request
from radixserve.scheduler.extension import SchedulerExtension, SchedulerParts

_WAIT_S = 0.005  # for a picture that is being encoded, where there is nothing else to do


class _Held(NamedTuple):
    request: Request
    release: Callable[[int], None]


class _OpenRequests(SchedulerExtension):
    """Knows the scheduler's requests."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def attach(self, parts: SchedulerParts) -> None:
        self._requests = parts.requests
        self._rows.read_requests(parts.requests)

    def needed(self) -> set[int]:
        """The first ids of pictures whose rows requests have not computed yet. O(requests)."""
        return {
            picture.first_id
            for state in self._requests.values()
            if state.request.pictures and state.committed < state.num_prompt
            for picture in state.request.pictures
        }


class PictureExtension(EngineExtension):
    """The engine's thread makes all calls."""

    name = "pictures"

    def __init__(self, engine: Engine, rows: Any, itemsize: int) -> None:
        """rows: the runner's `PictureRows`. itemsize: bytes of a number of an embedding."""
        self._engine, self._rows, self._itemsize = engine, rows, itemsize
        self._open = _OpenRequests(rows)
        engine.scheduler.plug_in(self._open)
        self._held: dict[str, _Held] = {}  # in their order
        self._encoding: tuple[Picture, Future[Any]] | None = None

    def hold(self, request: Request, queued_at: float, release: Callable[[int], None]) -> bool:
        del queued_at
        if not request.pictures:
            return False
        for picture in request.pictures:
            self._rows.know(picture)
        if not self._held and not self._missing(request):
            return False
        self._held[request.request_id] = _Held(request, release)
        return True

    def let_go(self, request_id: str) -> None:
        self._held.pop(request_id, None)

    def before_step(self, *, may_wait: bool) -> None:
        if self._held or self._encoding is not None:
            self._take_encoded(_WAIT_S if may_wait else 0.0)
            if self._encoding is None:
                self._release_held()

    def on_epoch(self, weights: str) -> None:
        del weights
        self._encoding = None  # by the weights before

    @property
    def has_work(self) -> bool:
        return bool(self._held)

    def stats(self) -> dict[str, int]:
        return {
            "encoded": self._rows.num_encoded,
            "kept": len(self._rows),
            "kept_bytes": self._rows.num_bytes,
            "held_requests": len(self._held),
        }

    def check(self) -> None:
        for held in self._held.values():
            assert held.request.pictures, "a request without pictures is held"

    # -- inside -------------------------------------------------------------------------------

    def _missing(self, request: Request) -> list[Picture]:
        """The request's pictures whose rows are to be computed and whose embeddings are not kept,
        in order of the prompt."""
        tokens = request.keyed_tokens()
        cached = self._engine.lookup(
            tokens, str(request.namespace), compare_namespaces=False
        ).cached_len
        return [
            picture
            for picture in request.pictures
            if _ends_after(picture, tokens, cached) and not self._rows.has(picture)
        ]

    def _release_held(self) -> None:
        """Let requests go in their order, as far as their pictures are encoded."""
        while self._held:
            held = next(iter(self._held.values()))
            missing = self._missing(held.request)
            if missing:
                self._begin(missing[0])
                return
            if self._held.pop(held.request.request_id, None) is not None:
                held.release(0)

    def _begin(self, picture: Picture) -> None:
        if self._rows.has_room(picture, self._itemsize, self._open.needed()):
            encoded = call_in_thread("radixserve-pictures", self._rows.encode, picture)
            self._encoding = picture, encoded

    def _pinned(self) -> set[int]:
        """The first ids of pictures that open requests and the first held one need."""
        first = next(iter(self._held.values()), None)
        own = set() if first is None else {picture.first_id for picture in first.request.pictures}
        return self._open.needed() | own

    def _take_encoded(self, wait_s: float) -> None:
        if self._encoding is None:
            return
        picture, future = self._encoding
        with contextlib.suppress(TimeoutError, Exception):
            future.result(wait_s)
        if not future.done():
            return
        self._encoding = None
        if (cause := future.exception()) is not None:
            self._fail_held(picture, cause)
        else:
            self._rows.put(picture, future.result(), self._pinned())

    def _fail_held(self, picture: Picture, cause: BaseException) -> None:
        for held in list(self._held.values()):
            if any(picture is other for other in held.request.pictures):
                message = f"a picture cannot be encoded: {cause}"
                self._engine.fail(held.request.request_id, request_failed(message, cause))


def _ends_after(picture: Picture, tokens: Any, length: int) -> bool:
    """Whether any of its rows is among the tokens from `length` on."""
    rest = tokens[length:]
    end = picture.first_id + picture.num_rows
    return bool(((rest >= picture.first_id) & (rest < end)).any())
