"""Every error that radixserve raises on purpose: one tree under `RadixServeError`."""

from __future__ import annotations

import traceback


class RadixServeError(Exception):
    """Base of all errors raised by radixserve."""


class InvalidRequest(RadixServeError, ValueError):
    """A request or a setting is wrong; the message names it and the allowed values.

    `param`: the field or the place that is wrong, such as "tools[0].function.name", where known.
    """

    def __init__(self, *args: object, param: str | None = None) -> None:
        super().__init__(*args)
        self.param = param


class PromptTooLong(InvalidRequest):
    """A prompt leaves no room in the context for a token of output.

    `num_tokens`: of the prompt. `max_tokens`: of the longest prompt.
    """

    def __init__(self, message: str, *, num_tokens: int, max_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


class BranchBusy(InvalidRequest):
    """Another call moves this branch: wait for its end, or fork the branch."""


class ModelNotSupported(RadixServeError):
    """The model cannot be run; the message names the reason."""


class OutOfPages(RadixServeError):
    """The page pool has no room left even after eviction; nothing was changed."""


class RequestFailed(RadixServeError):
    """This request could not be answered, for instance because its logits are not numbers or its
    step failed. The engine continues. `__cause__` is the reason, if it is known."""


class EngineDead(RadixServeError):
    """The engine has ended: it was closed, it failed, or it runs in the process that this one was
    forked from. `__cause__` is the reason, if it is known."""


def fresh(error: EngineDead) -> EngineDead:
    """A copy to raise: a raised exception collects the traceback of its thread."""
    copy = EngineDead(*error.args)
    copy.__cause__ = error.__cause__
    return copy


def request_failed(message: str, cause: BaseException | None = None) -> RequestFailed:
    """RequestFailed with its cause, whose traceback becomes a note: as frames of the engine's
    thread it would hold the errors of all requests of its step, and with them their callers."""
    error = RequestFailed(message)
    if cause is not None and cause.__traceback__ is not None:
        cause.add_note("".join(traceback.format_tb(cause.__traceback__)))
        cause.__traceback__ = None
    error.__cause__ = cause
    return error
