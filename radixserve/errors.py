"""Every error that radixserve raises on purpose: one tree under `RadixServeError`."""


class RadixServeError(Exception):
    """Base of all errors raised by radixserve."""


class InvalidRequest(RadixServeError, ValueError):
    """A request or a setting is wrong; the message says what, and what is allowed."""


class ModelNotSupported(RadixServeError):
    """The model cannot be run; the message names the reason."""


class OutOfPages(RadixServeError):
    """The page pool has no room left even after eviction; nothing was changed."""


class EngineDead(RadixServeError):
    """A step failed or the engine was closed; `__cause__` carries the reason when there is one."""
