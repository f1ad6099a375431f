"""Pictures in the engine: a request is held until the embeddings that it needs are computed.

A thread encodes one picture at a time, and none whose K/V is cached. The next picture is of the
tenant that has been served least, by the scheduler's own account: what encoding took is charged as
the tokens that are prefilled in that time. A request begins when the embeddings of all its pictures
have room beside those of others; these stay until its prompt is computed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from radixserve.daemon_call import call_in_thread
from radixserve.engine.engine import Engine
from radixserve.engine.extension import EngineExtension
from radixserve.errors import request_failed
from radixserve.picture import Picture
from radixserve.request import Request
from radixserve.scheduler.extension import SchedulerExtension, SchedulerParts
from radixserve.tenants.virtual_time import Tenant, VirtualTimes

_WAIT_S = 0.005  # for a picture that is being encoded, where there is nothing else to do


@dataclass(eq=False)
class _Held:
    request: Request
    tenant: Tenant
    release: Callable[[int], None]
    missing: set[int]  # first ids of pictures to encode for it, as far as was looked up
    has_begun: bool = False  # room is reserved for the embeddings of its pictures


class _Encoding(NamedTuple):
    """A picture that is being encoded, and who pays."""

    picture: Picture
    tenant: Tenant
    result: Future[tuple[Any, float]]  # embeddings, and the seconds that they took


class _OpenRequests(SchedulerExtension):
    """Knows the scheduler's requests."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def attach(self, parts: SchedulerParts) -> None:
        self._requests = parts.requests
        self._costs = parts.costs
        self._rows.read_requests(parts.requests)

    def needed(self) -> set[int]:
        """The first ids of pictures whose rows requests have not computed yet. O(requests)."""
        return {
            picture.first_id
            for state in self._requests.values()
            if state.request.pictures and state.committed < state.num_prompt
            for picture in state.request.pictures
        }

    def as_tokens(self, seconds: float, num_rows: int) -> float:
        """Tokens whose prefill takes that long; `num_rows` as long as none was measured."""
        token_s = self._costs.prefill_token_s
        return seconds / token_s if token_s else num_rows


class PictureExtension(EngineExtension):
    """The engine's thread makes all calls."""

    name = "pictures"

    def __init__(self, engine: Engine, rows: Any, itemsize: int, times: VirtualTimes) -> None:
        """rows: the runner's `PictureRows`. itemsize: bytes of a number of an embedding. times: the
        scheduler's account of tenants."""
        self._engine, self._rows, self._itemsize, self._times = engine, rows, itemsize, times
        self._open = _OpenRequests(rows)
        engine.scheduler.plug_in(self._open)
        self._held: dict[str, _Held] = {}  # by request id, in order of arrival
        self._encoding: _Encoding | None = None
        self._num_reused = {"kv_cache": 0, "embeddings": 0}  # pictures of requests

    def hold(self, request: Request, queued_at: float, release: Callable[[int], None]) -> bool:
        del queued_at
        if not request.pictures:
            return False
        for picture in request.pictures:
            self._rows.know(picture)
        needed = self._needed(request)
        missing = {picture.first_id for picture in needed if not self._rows.has(picture)}
        self._count_reused(request, len(needed), missing)
        if not needed or not (missing or self._is_full()):
            return False
        others = {held.tenant for held in self._held.values()}
        tenant = self._times.enter(request.namespace.tenant)
        if tenant not in others:
            self._times.raise_to_least(tenant, others)
        self._held[request.request_id] = _Held(request, tenant, release, missing)
        return True

    def let_go(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            self._times.leave(held.tenant)

    def before_step(self, *, may_wait: bool) -> None:
        if self._held or self._encoding is not None:
            self._take_encoded(_WAIT_S if may_wait else 0.0)
            if self._encoding is None:
                self._encode_next()

    def on_epoch(self, weights: str) -> None:
        del weights
        self._encoding = None  # by the weights before
        for held in self._held.values():
            held.missing = {picture.first_id for picture in held.request.pictures}

    @property
    def has_work(self) -> bool:
        return bool(self._held)

    def stats(self) -> dict[str, Any]:
        return {
            "encoded": self._rows.num_encoded,
            "encode_s": self._rows.encode_s,
            "reused": dict(self._num_reused),
            "kept": len(self._rows),
            "kept_bytes": self._rows.num_bytes,
            "held_requests": len(self._held),
        }

    def check(self) -> None:
        for held in self._held.values():
            assert held.request.pictures, "a request without pictures is held"
            assert held.tenant.num_requests, "the tenant of a held request has left"

    # -- inside -------------------------------------------------------------------------------

    def _count_reused(self, request: Request, num_needed: int, missing: set[int]) -> None:
        """Count its pictures that are not encoded for it. missing: first ids of those whose
        embeddings are not kept; another request may wait for them already."""
        awaited = set[int]().union(*(held.missing for held in self._held.values()))
        self._num_reused["kv_cache"] += len(request.pictures) - num_needed
        self._num_reused["embeddings"] += num_needed - len(missing - awaited)

    def _needed(self, request: Request) -> list[Picture]:
        """The request's pictures whose rows are to be computed, in order of the prompt."""
        tokens = request.keyed_tokens()
        cached = self._engine.lookup(
            tokens, str(request.namespace), compare_namespaces=False
        ).cached_len
        return [picture for picture in request.pictures if _ends_after(picture, tokens, cached)]

    def _missing(self, request: Request) -> list[Picture]:
        """Of those the ones whose embeddings are not kept."""
        return [picture for picture in self._needed(request) if not self._rows.has(picture)]

    def _encode_next(self) -> None:
        """Begin the next picture. Lets requests go that need none any more."""
        while (held := self._next()) is not None:
            missing = self._missing(held.request)
            if missing:
                held.has_begun = True
                result = call_in_thread("radixserve-pictures", self._encode, missing[0])
                self._encoding = _Encoding(missing[0], held.tenant, result)
                return
            self._release(held)

    def _next(self) -> _Held | None:
        """The first held request of the tenant that has been served least. Where its pictures have
        no room, those that have begun go on and make some. None: all wait for room. O(held)."""
        first = min(self._held.values(), key=_virtual_time, default=None)
        if first is None or first.has_begun or self._has_room(first):
            return first
        begun = (held for held in self._held.values() if held.has_begun)
        return min(begun, key=_virtual_time, default=None)

    def _is_full(self) -> bool:
        """Whether the request whose turn it is waits for room."""
        first = min(self._held.values(), key=_virtual_time, default=None)
        return first is not None and not first.has_begun and not self._has_room(first)

    def _has_room(self, held: _Held) -> bool:
        begun = [other for other in self._held.values() if other.has_begun]
        pinned = self._pinned()
        if not pinned:
            return True  # even if it takes more than all of the memory
        pictures = {
            picture
            for other in (held, *begun)
            for picture in other.request.pictures
            if picture.first_id in other.missing
        }
        return bool(self._rows.has_room(pictures, self._itemsize, pinned))

    def _pinned(self) -> set[int]:
        """The first ids of pictures that open requests need, and held ones that have begun."""
        begun = (held.request.pictures for held in self._held.values() if held.has_begun)
        own = {picture.first_id for pictures in begun for picture in pictures}
        return self._open.needed() | own

    def _encode(self, picture: Picture) -> tuple[Any, float]:
        self._rows.load()  # before the time that a tenant is charged for
        start = time.perf_counter()
        rows = self._rows.encode(picture)
        return rows, time.perf_counter() - start

    def _take_encoded(self, wait_s: float) -> None:
        if self._encoding is None:
            return
        picture, tenant, result = self._encoding
        with contextlib.suppress(TimeoutError, Exception):
            result.result(wait_s)
        if not result.done():
            return
        self._encoding = None
        if (cause := result.exception()) is not None:
            self._fail_held(picture, cause)
            return
        rows, seconds = result.result()
        tenant.charge(self._open.as_tokens(seconds, picture.num_rows))
        self._rows.put(picture, rows, self._pinned())
        self._note_encoded(picture)

    def _note_encoded(self, picture: Picture) -> None:
        """Let requests go that waited for no other picture."""
        is_full = self._is_full()
        for held in list(self._held.values()):
            held.missing.discard(picture.first_id)
            if not held.missing and (held.has_begun or not is_full):
                missing = self._missing(held.request)
                held.missing.update(picture.first_id for picture in missing)
                if not missing:
                    self._release(held)

    def _release(self, held: _Held) -> None:
        request_id = held.request.request_id
        if self._held.pop(request_id, None) is not None:
            held.release(0)
            self._times.leave(held.tenant)

    def _fail_held(self, picture: Picture, cause: BaseException) -> None:
        for held in list(self._held.values()):
            if any(picture is other for other in held.request.pictures):
                message = f"a picture cannot be encoded: {cause}"
                self._engine.fail(held.request.request_id, request_failed(message, cause))


def _virtual_time(held: _Held) -> float:
    return held.tenant.virtual_time


def _ends_after(picture: Picture, tokens: Any, length: int) -> bool:
    """Whether any of its rows is among the tokens from `length` on."""
    rest = tokens[length:]
    end = picture.first_id + picture.num_rows
    return bool(((rest >= picture.first_id) & (rest < end)).any())
