"""The benchmark of scripted sessions: what it scripts, and that all settings run."""

from __future__ import annotations

import importlib
from typing import Any


def test_sessions_extend_their_own_text() -> None:
    bench: Any = importlib.import_module("bench_scripted_sessions")
    trace, loop = bench.scripted(bench.texts(is_mixed=True), bench.thinks(0.2, "mixed"))
    assert len(loop.sessions) == bench.SESSIONS
    first, second = trace.request(loop.sessions[1][0]), trace.request(loop.sessions[1][1])
    known = [*first.prompt.tolist(), *first.output.tolist()]
    assert second.prompt.tolist()[: len(known)] == known
    assert len(second.prompt) == len(known) + 25
    assert loop.think_s[loop.sessions[0][0]] == 0.0
    assert loop.think_s[loop.sessions[0][1]] > 0.0
