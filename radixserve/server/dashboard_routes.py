"""The page at /, its files, and what it reads: /v1/cache/snapshot and /v1/cache/compare."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.cache import SnapshotView
from radixserve.server.errors import ApiError
from radixserve.server.json_response import answer
from radixserve.server.schema import SnapshotRequest
from radixserve.server.state import caller_of, check_admin

router = APIRouter()
_FOLDER = Path(__file__).parent / "dashboard"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
PATHS = frozenset(_FILES)  # without a key: they hold nothing but the page
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_MAX_OPENED = 200
_MAX_PATH = 100_000


@router.get("/", include_in_schema=False)
@router.get("/page/style.css", include_in_schema=False)
@router.get("/page/page.js", include_in_schema=False)
async def file(request: Request) -> Response:
    name, kind = _FILES[request.url.path]
    return Response((_FOLDER / name).read_bytes(), headers=_HEADERS, media_type=kind)


@router.post("/v1/cache/snapshot")
async def snapshot(request: Request, body: SnapshotRequest) -> Response:
    """A bounded snapshot of cache and requests for the page: one's own part, all for an admin.

    `opened`: ids of nodes of which more children are wanted; `path`: token ids whose nodes are.
    Taken at most so often, and shared; "next_s" says when to ask again.
    """
    caller = caller_of(request)
    for name, values, limit in (
        ("opened", body.opened, _MAX_OPENED),
        ("path", body.path, _MAX_PATH),
    ):
        if values is not None and len(values) > limit:
            raise ApiError(400, f"{name} takes {limit} numbers at most", param=name)
        if any(not 0 <= value < 2**31 for value in values or ()):
            raise ApiError(400, f"{name} must be numbers from 0 to 2**31 - 1", param=name)
    view = SnapshotView(
        within=None if caller.is_admin else caller.tenant,
        opened=frozenset(body.opened or ()),
        path=tuple(body.path or ()),
        path_namespace=caller.namespace(None),
    )
    return Response(
        await request.app.state.snapshots.get(caller, view), media_type="application/json"
    )


@router.post("/v1/cache/compare")
async def compare(request: Request) -> Response:
    """A short script on the bundled demo model with the radix cache, the hash cache and none.

    One at a time; who asks meanwhile gets the same answer. Needs an admin key.
    """
    check_admin(request)
    return answer(await request.app.state.comparison.run())
