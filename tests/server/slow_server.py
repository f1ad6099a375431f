"""`python -m tests.server.slow_server SECONDS serve ...`: radixserve, whose engine takes no step in
the first SECONDS after it was idle, as if it computed a long prompt."""

from __future__ import annotations

import sys
import time

from radixserve.cli import main
from radixserve.engine.engine import Engine
from radixserve.output import RequestOutput

_IDLE_S = 0.5  # without a call of `begin_step`


def slow_down(seconds: float) -> None:
    begin_step = Engine.begin_step
    busy_since = called_at = 0.0

    def late(engine: Engine) -> list[RequestOutput]:
        nonlocal busy_since, called_at
        now = time.monotonic()
        if now - called_at > _IDLE_S:
            busy_since = now
        called_at = now
        if now - busy_since < seconds:
            time.sleep(0.005)
            engine._must_collect = False  # nothing was launched
            return []
        return begin_step(engine)

    Engine.begin_step = late  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down(float(sys.argv.pop(1)))
    sys.exit(main(sys.argv[1:]))
