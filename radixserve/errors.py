"""The errors that radixserve raises: subclasses of `RadixServeError`."""

from __future__ import annotations

import traceback


class RadixServeError(Exception):
    """Base of all errors raised by radixserve."""


class InvalidRequest(RadixServeError, ValueError):
    """A request or a setting is wrong. The message names it and the allowed values.

    `param`: the wrong field or place, such as "tools[0].function.name", if it is known.
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
    """Too few pages are free or can be evicted. The call that raised it changed nothing."""


class RequestFailed(RadixServeError):
    """This request could not be answered, for instance because its logits are not numbers or its
    step failed. The engine continues. `__cause__` is the reason, if it is known."""


class EngineDead(RadixServeError):
    """The engine has ended: it was closed, it failed, or it runs in the process that this one was
    forked from. `__cause__` is the reason, if it is known."""


def fresh(error: EngineDead) -> EngineDead:
    """Returns a copy to raise, since a raised exception collects the traceback of its thread."""
    copy = EngineDead(*error.args)
    copy.__cause__ = error.__cause__
    return copy


def request_failed(message: str, cause: BaseException | None = None) -> RequestFailed:
    """Returns a RequestFailed with its cause. The cause's traceback becomes a note, since its
    frames in the engine's thread would keep alive the errors of all requests of the step."""
    error = RequestFailed(message)
    if cause is not None and cause.__traceback__ is not None:
        cause.add_note("".join(traceback.format_tb(cause.__traceback__)))
        cause.__traceback__ = None
    error.__cause__ = cause
    return error
