"""Engines with a K/V store: the store's extension of a runtime, and limits of time for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from radixserve import Runtime
from radixserve.store import connector
from radixserve.store.connector import KVConnector
from tests.pacing import wait_until


def connector_of(runtime: Runtime) -> KVConnector:
    """The extension of a runtime's engine that has its kv_store."""
    live = runtime._core._engine.extensions.live  # type: ignore[attr-defined]
    return next(one for one in live if isinstance(one, KVConnector) and one.is_main)


def store_stats(runtime: Runtime) -> dict[str, Any]:
    return dict(runtime.cache_stats()["kv_store"])


def flush(runtime: Runtime) -> None:
    """Wait until all that is to be written is written."""
    wait_until(lambda: store_stats(runtime)["unsaved_requests"] == 0)
    runtime.check()


def set_limits(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    """Change the limits of the stores that are opened from now on."""
    monkeypatch.setattr(connector, "LIMITS", replace(connector.LIMITS, **fields))
