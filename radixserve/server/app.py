"""`make_app`: the FastAPI application with all routes, the checks before them, and the error
handlers."""

from __future__ import annotations

import difflib

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from radixserve._version import __version__
from radixserve.errors import RadixServeError
from radixserve.server.gate.disconnect import CLIENT_CLOSED, ClientGone
from radixserve.server.gate.json_body import JsonRoute
from radixserve.server.gate.middleware import RequestMiddleware, error_response
from radixserve.server.gate.state import AppState, server_of
from radixserve.server.routes import (
    branches,
    cache,
    chat,
    completions,
    dashboard_page,
    decisions,
    generate,
    health,
    hints,
    metrics,
    models,
    rerank,
    scores,
    server_info,
    weights,
)
from radixserve.server.routes.anthropic_messages import routes as anthropic_messages
from radixserve.server.routes.dashboard_page import Comparison, Snapshots
from radixserve.server.routes.responses import routes as responses
from radixserve.server.wire.errors import ApiError, as_api_error

_ROUTE_MODULES = (
    *(health, models, completions, chat, generate, anthropic_messages, responses),
    *(scores, rerank, decisions, branches, metrics, cache, hints, server_info, weights),
    dashboard_page,
)
_MAX_PATH = 100  # characters of an unknown path that are compared and shown


def make_app(server: AppState) -> FastAPI:
    """The application. Routes find `server` with `server_of(request)`."""
    app = FastAPI(title="radixserve", version=__version__, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False  # the middleware removes them
    app.state.server = server
    app.state.snapshots = Snapshots(server)
    app.state.comparison = Comparison()
    # `include_router` would make each route again when its first request comes.
    app.router.routes += [route for module in _ROUTE_MODULES for route in module.router.routes]
    kinds = (ApiError, RadixServeError, RequestValidationError, HTTPException, RecursionError)
    for kind in (*kinds, Exception):
        app.add_exception_handler(kind, _failed)
    app.add_exception_handler(ClientGone, _gone)
    app.add_middleware(
        RequestMiddleware,
        server=server,
        public_paths=health.PATHS | dashboard_page.PATHS,
        probes=health.PATHS | {"/metrics"},
    )
    origins = list(server.config.cors_origin)
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def build_main_validators() -> None:
    """Build the validators of the routes that most clients use; the others' are built when their
    first bodies come."""
    for route in (*chat.router.routes, *completions.router.routes):
        if isinstance(route, JsonRoute):
            route.build_validator()


async def _failed(request: Request, error: Exception) -> Response:
    """The response to an exception that a route raised."""
    api_error = as_api_error(error)
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        api_error = _no_route(request)
    server_of(request).counters.rejected[api_error.code or str(api_error.status)] += 1
    return error_response(api_error, request.scope)


def _no_route(request: Request) -> ApiError:
    """The error for an unknown path, 404 with the most similar paths, or for a wrong method, 405
    with the methods of the path."""
    included = (route for module in _ROUTE_MODULES for route in module.router.routes)
    routes = [route for route in included if isinstance(route, Route)]
    path = request.url.path[:_MAX_PATH]
    matching = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
    methods = sorted({method for route in matching for method in route.methods or ()} - {"HEAD"})
    if methods:
        message = f"{request.method} is not allowed for {path}: use {' or '.join(methods)}"
        return ApiError(405, message, headers={"allow": ", ".join(methods)})
    near = difflib.get_close_matches(path, sorted({route.path for route in routes}), 3)
    hint = f"; near: {', '.join(near)}" if near else "; /openapi.json lists the routes"
    return ApiError(404, f"there is no {path}{hint}")


async def _gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)
