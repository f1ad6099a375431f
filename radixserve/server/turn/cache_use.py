"""`CacheUse`: how a request uses the cache: its namespace, session and hints."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from radixserve.server.gate.session_table import check_session_id
from radixserve.server.gate.state import namespace_of
from radixserve.server.turn.request_hints import RequestHints, request_hints
from radixserve.server.wire.cache_fields import CacheHint
from radixserve.server.wire.errors import ApiError

# Where `session_id_of` looks for a session's name, in this order.
SESSION_FIELDS = ("session_id", "prompt_cache_key")
SESSION_HEADERS = (
    "x-claude-code-session-id",  # Claude Code
    "session-id",  # Codex
    "session_id",  # Codex, older
    "x-session-id",
    "x-session-affinity",
    "x-amp-thread-id",
    "x-openwebui-chat-id",  # Open WebUI with ENABLE_FORWARD_USER_INFO_HEADERS
)
_OF_USER_ID = re.compile(r"_session_([0-9A-Za-z-]{1,64})\Z")  # Claude Code's metadata.user_id


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How a request uses the cache.

    namespace   only requests with the same one share K/V
    session_id  the client's name of the session; None: without a session
    supersede   end older requests of the session that have not generated a token
    hints       for the K/V of the prompts, applied after the answer
    """

    namespace: str
    session_id: str | None
    supersede: bool
    hints: RequestHints

    @classmethod
    def read(cls, request: Request, body: Any, hints: Sequence[CacheHint] = ()) -> CacheUse:
        """Read it from a body and headers. `hints`: hints of other fields, which follow those of
        the body's `cache_hints`. Raises ApiError."""
        check_session_id(body.session_id)
        if body.supersede and body.session_id is None:
            raise ApiError(400, "supersede needs a session_id", param="supersede")
        namespace = namespace_of(request, body)
        own = getattr(body, "cache_hints", None) or ()
        return cls(
            namespace,
            session_id_of(body, request.headers),
            bool(body.supersede),
            request_hints(request, [*own, *hints], body.kv_hints, namespace),
        )


def session_id_of(body: Any, headers: Mapping[str, str]) -> str | None:
    """The session's name in a request: from a field, then a header, then Anthropic's user_id. None
    without any."""
    for field in SESSION_FIELDS:
        value = getattr(body, field, None)
        if value:
            return str(value)
    for header in SESSION_HEADERS:
        value = headers.get(header, "")
        if 0 < len(value) <= 256:
            return str(value)
    metadata = getattr(body, "metadata", None)
    return _session_of_user_id(getattr(metadata, "user_id", None))


def _session_of_user_id(user_id: str | None) -> str | None:
    """The session in Claude Code's user_id: "user_..._session_UUID", or JSON with a session_id."""
    if not user_id:
        return None
    match = _OF_USER_ID.search(user_id)
    if match is not None:
        return match[1]
    try:
        fields = json.loads(user_id)
    except ValueError:
        return None
    name = fields.get("session_id") if isinstance(fields, dict) else None
    return name if isinstance(name, str) and 0 < len(name) <= 256 else None
