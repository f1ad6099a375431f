"""`EngineExtension`: what plugs into the engine, such as a K/V store, KV events or a trace.

    class Counter(EngineExtension):
        name = "counter"
        num_steps = 0

        def after_step(self, *, is_idle: bool) -> None:
            self.num_steps += 1

        def stats(self) -> dict[str, int]:
            return {"steps": self.num_steps}

    engine.extend(Counter())

The engine makes all calls, in its thread. None of them may wait for a disk or a network: what does
belongs into a thread of the extension. An exception ends the extension and never the engine: it is
logged once, the requests that the extension holds are scheduled, and `stats` names it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from radixserve.cache import CacheSequence
    from radixserve.engine.messages import EngineMessage
    from radixserve.output import Finish, RequestOutput
    from radixserve.request import Request

_log = logging.getLogger("radixserve")


class EngineExtension:
    """Does nothing at any point. A subclass overrides the calls that it needs; the engine does not
    make the others."""

    name = "extension"  # in the engine's `stats` and in the log

    def hold(
        self,
        request: Request,  # noqa: ARG002
        queued_at: float,  # noqa: ARG002
        release: Callable[[int], None],  # noqa: ARG002
    ) -> bool:
        """A request arrives. Returns True to hold it back until `release` is called with the number
        of its prompt's tokens that were loaded meanwhile. Then the extensions after this one may
        hold it.

        `queued_at`: by the scheduler's clock. `release` may be called in the engine's thread only,
        after this call; further calls of it do nothing.
        """
        return False

    def let_go(self, request_id: str) -> None:
        """A request that it holds is scheduled or ended without it."""

    def on_held(self, request: Request, held_s: float) -> None:
        """Another extension has held a request back for so long, and it is scheduled now."""

    def before_step(self, *, may_wait: bool) -> None:
        """The next step is about to be scheduled. `may_wait`: nothing else is to be done, so that
        it may wait for its threads for some milliseconds."""

    def after_step(self, *, is_idle: bool) -> None:
        """A step has ended, and the cache may have changed. `is_idle`: no request is open and no
        step in flight."""

    def on_outputs(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Returns the outputs of a step for callers: without those of requests that the extension
        itself has added."""
        return outputs

    def on_release(self, sequence: CacheSequence, num_prompt: int, num_reused: int) -> None:
        """A running request ends, and its pages are about to be released. `num_prompt`: tokens of
        its prompt, of which it did not compute `num_reused`."""

    def on_finish(
        self, request: Request, output_ids: Sequence[int], finish: Finish, arrived_at: float
    ) -> None:
        """A request has ended. `arrived_at`: in seconds since 1970."""

    def on_reset(self, namespace: str | None) -> None:
        """The cache has dropped the prefixes of a namespace and those below it, see `is_within`;
        of all where None."""

    def on_epoch(self, weights: str) -> None:
        """The runner has other weights, which `weights` tells from all others; the cache has begun
        their epoch."""

    def on_idle(self) -> None:
        """The engine is about to wait for requests."""

    @property
    def has_work(self) -> bool:
        """Whether the engine has to step for it."""
        return False

    @property
    def idle_timeout(self) -> float | None:
        """Seconds after which an idle engine has to step for it; None for never."""
        return None

    def answer(self, message: EngineMessage[Any], answer: Any) -> Any:  # noqa: ARG002
        """Returns the answer to a message, or a future of it. `answer`: the engine's, or that of
        the extensions before; None where they do not know the message. What it raises goes to the
        caller and does not end the extension."""
        return answer

    def stats(self) -> dict[str, Any] | None:
        """Returns its counters, which the engine's `stats` have under its name."""
        return None

    def check(self) -> Future[None] | None:
        """Audit its state; AssertionError names what is wrong. What needs other threads may follow
        in a future."""
        return None

    def close(self, timeout_s: float) -> None:
        """End it. What takes longer than `timeout_s` is given up. It is called once."""


class HeldRequest(NamedTuple):
    """A request that an extension holds back."""

    request: Request
    queued_at: float
    extension: EngineExtension
    others: tuple[EngineExtension, ...]  # that may hold it after this one
    admit: Callable[[int], None]  # passes it to the scheduler
    since: float  # time.monotonic()


class Extensions:
    """The extensions of an engine, and the requests that they hold. The engine's thread makes all
    calls but `held_counts`."""

    def __init__(self) -> None:
        self.live: tuple[EngineExtension, ...] = ()
        self.ended: list[str] = []  # names of those that failed
        self._held: dict[str, HeldRequest] = {}  # by request id
        self._look_up_calls()

    def add(self, extension: EngineExtension, *, is_first: bool = False) -> None:
        """is_first: the others get a request once this one does not hold it any more."""
        self.live = (extension, *self.live) if is_first else (*self.live, extension)
        self._look_up_calls()

    def remove(self, extension: EngineExtension) -> None:
        """Make no further call to an extension that holds no request, until it is added again."""
        self.live = tuple(other for other in self.live if other is not extension)
        self._look_up_calls()

    def _look_up_calls(self) -> None:
        """Find out once which extensions want which call. The engine asks whether there is one
        before it makes the calls of each step."""
        self._holding = self._overriding("hold")
        self.of_before_step = self._overriding("before_step")
        self.of_after_step = self._overriding("after_step")
        self.of_on_outputs = self._overriding("on_outputs")
        self._on_held = self._overriding("on_held")
        self._on_release = self._overriding("on_release")
        self._on_finish = self._overriding("on_finish")
        self.of_has_work = self._overriding("has_work")

    def _overriding(self, name: str) -> tuple[EngineExtension, ...]:
        plain = getattr(EngineExtension, name)
        return tuple(
            extension for extension in self.live if getattr(type(extension), name) is not plain
        )

    def _call(self, extension: EngineExtension, call: Callable[[], Any]) -> Any:
        """Returns what the call returns; None where it fails and the extension ends."""
        if extension not in self.live:
            return None
        try:
            return call()
        except Exception:
            _log.exception("%s has failed and is ended; the engine continues", extension.name)
            self._end(extension)
            return None

    def _end(self, extension: EngineExtension) -> None:
        self.remove(extension)
        self.ended.append(extension.name)
        with contextlib.suppress(Exception):
            extension.close(0.0)
        for held in list(self._held.values()):
            if held.extension is extension:
                self._release(held, 0)

    # -- requests -----------------------------------------------------------------------------

    def hold(self, request: Request, queued_at: float, admit: Callable[[int], None]) -> bool:
        """Returns whether an extension holds the request back until it is passed to `admit`. They
        may hold it one after the other, in their order."""
        return self._offer(request, queued_at, self._holding, admit)

    def _offer(
        self,
        request: Request,
        queued_at: float,
        extensions: tuple[EngineExtension, ...],
        admit: Callable[[int], None],
    ) -> bool:
        for place, extension in enumerate(extensions):
            others = extensions[place + 1 :]
            held = HeldRequest(request, queued_at, extension, others, admit, time.monotonic())
            release = partial(self._release, held)
            call = partial(extension.hold, request, queued_at, release)
            if self._call(extension, call):
                self._held[request.request_id] = held
                return True
        return False

    def _release(self, held: HeldRequest, num_loaded: int) -> None:
        request, queued_at, _, others, admit, since = held
        if self._held.get(request.request_id) is held:
            del self._held[request.request_id]
            held_s = time.monotonic() - since
            for extension in self._on_held:
                self._call(extension, partial(extension.on_held, request, held_s))
            admit_all = partial(_admit, admit, num_loaded)
            if not self._offer(request, queued_at, others, admit_all):
                admit_all(0)

    def let_go(self, request_id: str | None = None) -> None:
        """Pass one held request, or all if None, to the scheduler."""
        for held in list(self._held.values()) if self._held else ():
            name = held.request.request_id
            if request_id in (None, name):
                self._call(held.extension, partial(held.extension.let_go, name))
                if self._held.pop(name, None) is held:
                    held.admit(0)

    def is_held(self, request_id: str) -> bool:
        return request_id in self._held

    def held_requests(self) -> list[Request]:
        return [held.request for held in self._held.values()]

    def held_counts(self) -> tuple[int, int]:
        """Number of held requests and of their prompts' tokens. May be called from any thread."""
        held = list(self._held.values())
        return len(held), sum(len(request.request.token_ids) for request in held)

    # -- the loop -----------------------------------------------------------------------------

    def before_step(self, *, may_wait: bool) -> None:
        for extension in self.of_before_step:
            self._call(extension, partial(extension.before_step, may_wait=may_wait))

    def after_step(self, *, is_idle: bool) -> None:
        for extension in self.of_after_step:
            self._call(extension, partial(extension.after_step, is_idle=is_idle))

    def on_outputs(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        for extension in self.of_on_outputs:
            kept = self._call(extension, partial(extension.on_outputs, outputs))
            outputs = outputs if kept is None else kept
        return outputs

    def on_release(self, sequence: CacheSequence, num_prompt: int, num_reused: int) -> None:
        for extension in self._on_release:
            self._call(extension, partial(extension.on_release, sequence, num_prompt, num_reused))

    def on_finish(
        self, request: Request, output_ids: Sequence[int], finish: Finish, arrived_at: float
    ) -> None:
        for extension in self._on_finish:
            call = partial(extension.on_finish, request, output_ids, finish, arrived_at)
            self._call(extension, call)

    def on_reset(self, namespace: str | None) -> None:
        for extension in self.live:
            self._call(extension, partial(extension.on_reset, namespace))

    def on_epoch(self, weights: str) -> None:
        for extension in self.live:
            self._call(extension, partial(extension.on_epoch, weights))

    def on_idle(self) -> None:
        for extension in self.live:
            self._call(extension, extension.on_idle)

    @property
    def has_work(self) -> bool:
        return any(
            self._call(extension, partial(getattr, extension, "has_work"))
            for extension in self.of_has_work
        )

    @property
    def idle_timeout(self) -> float | None:
        """The shortest of the extensions' ones."""
        timeouts = [
            self._call(extension, partial(getattr, extension, "idle_timeout"))
            for extension in self.live
        ]
        return min((timeout for timeout in timeouts if timeout is not None), default=None)

    # -- the whole ----------------------------------------------------------------------------

    def answer(self, message: EngineMessage[Any], answer: Any) -> Any:
        """See `EngineExtension.answer`."""
        for extension in self.live:
            answer = extension.answer(message, answer)
        return answer

    def stats(self) -> dict[str, Any]:
        """Returns the counters of each extension by its name, and the names of those that ended."""
        stats = {extension.name: self._call(extension, extension.stats) for extension in self.live}
        known = {name: counts for name, counts in stats.items() if counts is not None}
        return {**known, "ended_extensions": list(self.ended)}

    def check(self) -> Future[None] | None:
        """Audit all extensions. Raises AssertionError; the rest of the audit is in the future."""
        futures = [extension.check() for extension in self.live]
        return joined([future for future in futures if future is not None])

    def close(self, timeout_s: float) -> None:
        """End all extensions. Idempotent."""
        live, self.live = self.live, ()
        self._look_up_calls()
        for extension in live:
            try:
                extension.close(timeout_s)
            except Exception:
                _log.exception("%s could not be closed", extension.name)


def _admit(admit: Callable[[int], None], num_loaded: int, num_more: int) -> None:
    admit(num_loaded + num_more)


def joined(futures: Sequence[Future[None]]) -> Future[None] | None:
    """Returns a future that ends with all others, with the first error among them; None where there
    is none."""
    if len(futures) < 2:
        return futures[0] if futures else None
    whole: Future[None] = Future()
    lock, left = threading.Lock(), [len(futures)]

    def note(_: Future[None]) -> None:
        with lock:
            left[0] -= 1
            is_last = not left[0]
        if is_last:
            errors = [error for future in futures if (error := future.exception()) is not None]
            whole.set_exception(errors[0]) if errors else whole.set_result(None)

    for future in futures:
        future.add_done_callback(note)
    return whole
