"""`ClusterRuntime`: a Runtime whose engines are replicas in other processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from radixserve.api.runtime import Runtime
from radixserve.cluster.cluster_client import ClusterClient
from radixserve.config import EngineConfig
from radixserve.engine.output_notifier import OutputNotifier

START_TIMEOUT_S = 600.0


class ClusterRuntime(Runtime):
    """Callers see one engine. A request goes to the replica that has cached most of its tokens; the
    capacity is that of one replica.

    Dumps of the tree and previews of evictions are those of one replica.
    """

    def __init__(
        self, client: ClusterClient, config: EngineConfig, close: Callable[[], object]
    ) -> None:
        """`config`: that of the replicas; `close` is called when the Runtime is closed. Raises
        TimeoutError where no replica reports."""
        self.config = config
        self._use(client.facts(START_TIMEOUT_S), client, OutputNotifier())
        self._finalizer = weakref.finalize(self, _close, client, close)


def _close(client: ClusterClient, close: Callable[[], object]) -> None:
    if not client.is_forked:
        client.close()
        close()
