"""Answers as JSON."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


def dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def answer(value: Any, status: int = 200) -> Response:
    """Compact, in ASCII: texts may hold anything."""
    return Response(dump(value), status, media_type="application/json")
