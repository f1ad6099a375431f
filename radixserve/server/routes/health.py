"""/health and its parts, which do not wait for the engine's thread and do not need a key."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.server.gate.state import AppState, server_of
from radixserve.server.wire.json_response import answer

router = APIRouter()
PATHS = frozenset({"/health", "/health/live", "/health/ready", "/health/startup", "/ping"})


@router.get("/health/live")
async def live() -> Response:
    """The process answers."""
    return answer({"status": "ok"})


@router.get("/health/startup")
async def startup(request: Request) -> Response:
    """The model is loaded."""
    is_loaded = server_of(request).is_loaded
    return answer({"status": "ok" if is_loaded else "loading"}, 200 if is_loaded else 503)


@router.get("/ping")
@router.post("/ping", include_in_schema=False)
@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """New requests are taken, and the engine computes or has nothing to do."""
    problem = not_ready(server_of(request))
    return answer({"status": problem or "ok"}, 503 if problem else 200)


@router.get("/health")
async def health(request: Request) -> Response:
    """Ready or not, queue depths and, without keys, the cache's figures."""
    server = server_of(request)
    problem = not_ready(server)
    fields: dict[str, object] = {"status": problem or "ok"}
    if server.is_loaded and not server.tenants:
        status = server.runtime.status()
        names = ("pages_total", "pages_free", "prompted_tokens", "reused_tokens", "evicted_tokens")
        fields |= {"running": status.running, "waiting": status.waiting}
        fields["cache"] = {name: status.stats[name] for name in names}
    return answer(fields, 503 if problem else 200)


def not_ready(server: AppState) -> str | None:
    """Why the server is not ready; None if it is."""
    if not server.is_loaded:
        return "loading"
    if server.is_draining:
        return "draining"
    status = server.runtime.status()
    if not status.is_alive:
        return "the engine is dead"
    silent_s = time.monotonic() - status.stepped_at
    if status.stats.get("replicas") == 0 and silent_s > server.config.ready_timeout:
        return f"no replica has reported for {silent_s:.0f} s"
    if not status.is_idle and silent_s > server.config.ready_timeout:
        return f"the engine has not stepped for {silent_s:.0f} s"
    return None
