"""The trace that a caller belongs to, as W3C headers. Needs OpenTelemetry's API."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry import context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_FORMAT = TraceContextTextMapPropagator()


def current_headers() -> dict[str, str] | None:
    """The W3C headers of the caller's present span; None outside of one."""
    headers: dict[str, str] = {}
    _FORMAT.inject(headers)
    return headers or None


@contextlib.contextmanager
def trace_of(scope: Mapping[str, Any]) -> Iterator[None]:
    """Within it, `current_headers` returns those of an HTTP request (ASGI), if they are valid."""
    headers = {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in (b"traceparent", b"tracestate")
    }
    token = context.attach(_FORMAT.extract(headers))
    try:
        yield
    finally:
        context.detach(token)
