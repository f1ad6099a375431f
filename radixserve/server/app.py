"""The application: every route, the gate before them, errors in one shape."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from radixserve._version import __version__
from radixserve.errors import RadixServeError
from radixserve.server import (
    cache_routes,
    chat,
    completions,
    dashboard_routes,
    generate,
    health,
    hints,
    metrics,
    models,
    scores,
    sessions,
)
from radixserve.server.anthropic_messages import routes as anthropic_messages
from radixserve.server.comparison import Comparison
from radixserve.server.disconnect import ClientGone
from radixserve.server.errors import ApiError, as_api_error
from radixserve.server.middleware import RequestMiddleware, error_response
from radixserve.server.responses import routes as responses
from radixserve.server.snapshots import Snapshots
from radixserve.server.state import Server, server_of

_GONE = 499  # the client closed the connection; it never sees this


def make_app(server: Server) -> FastAPI:
    app = FastAPI(title="radixserve", version=__version__, docs_url=None, redoc_url=None)
    app.state.server = server
    app.state.snapshots = Snapshots(server)
    app.state.comparison = Comparison()
    for subject in (health, models, completions, chat, generate, scores, metrics):
        app.include_router(subject.router)
    for subject in (anthropic_messages, responses, cache_routes, hints, sessions, dashboard_routes):
        app.include_router(subject.router)
    kinds = (ApiError, RadixServeError, RequestValidationError, HTTPException, RecursionError)
    for kind in (*kinds, Exception):
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(ClientGone, _gone)
    app.add_middleware(RequestMiddleware, server=server)
    return app


async def _failed(request: Request, error: Exception) -> Response:
    found = as_api_error(error)
    if found.code is not None:
        server_of(request).counters.rejected[found.code] += 1
    return error_response(found, request.scope)


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=_GONE)
