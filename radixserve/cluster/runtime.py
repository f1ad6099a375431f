"""`ClusterRuntime`: a Runtime whose engines are replicas in other processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from radixserve.api.loop_waker import LoopWakers
from radixserve.api.runtime import Runtime
from radixserve.cluster.cluster_client import ClusterClient
from radixserve.config import EngineConfig

START_TIMEOUT_S = 600.0


class ClusterRuntime(Runtime):
    """Callers see one engine: its cache is where the tokens are, its capacity that of one replica.

    Pictures of the tree and of what is evicted next are those of one replica.
    """

    def __init__(
        self, client: ClusterClient, config: EngineConfig, close: Callable[[], object]
    ) -> None:
        """`config`: that of the replicas; `close` is called when the Runtime is closed. Raises
        TimeoutError where no replica reports."""
        self.config = config
        self._use(client.facts(START_TIMEOUT_S), client, LoopWakers())
        self._finalizer = weakref.finalize(self, _close, client, close)


def _close(client: ClusterClient, close: Callable[[], object]) -> None:
    if not client.is_forked:
        client.close()
        close()
