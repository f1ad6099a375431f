"""DELETE /v1/sessions/{id}."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from radixserve.server.errors import ApiError
from radixserve.server.json_response import answer
from radixserve.server.state import caller_of, server_of

router = APIRouter()


@router.delete("/v1/sessions/{session_id}")
async def delete_session(
    request: Request, session_id: str, cache_salt: str | None = None
) -> Response:
    """Close a session of one's own."""
    server = server_of(request)
    namespace = caller_of(request).namespace(cache_salt)
    if not server.sessions.close(namespace, session_id):
        raise ApiError(404, "no such session is open", param="session_id")
    return answer({"id": session_id, "object": "session", "deleted": True})
