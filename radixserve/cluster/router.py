"""`ReplicaRouter`: chooses the replica of a request."""

from __future__ import annotations

import numpy as np

from radixserve.arrays import IntArray
from radixserve.cache import EventSnapshot
from radixserve.cluster.replica import ReplicaReport
from radixserve.request import Request
from radixserve.routing.tree_router import TreeRouter


class ReplicaRouter:
    """A `TreeRouter` that is fed by the reports of replicas. Owned by one thread.

    Replicas are known by name from `add` to `remove`.
    """

    def __init__(self) -> None:
        self._router = TreeRouter()
        self._replicas: set[str] = set()
        self._num_output: dict[str, int] = {}  # tokens that came, by request id

    def add(self, replica: str) -> None:
        self._router.add(replica)
        self._replicas.add(replica)

    def remove(self, replica: str) -> None:
        if replica in self._replicas:
            self._replicas.remove(replica)
            self._router.remove(replica)
            of = self._router.of_request
            self._num_output = {key: n for key, n in self._num_output.items() if of(key)}

    def update(self, replica: str, report: ReplicaReport) -> None:
        """Take in the load of a replica and the events of its cache."""
        for output in report.outputs:
            if output.token_ids and output.request_id in self._num_output:
                self._router.start(output.request_id)
                self._num_output[output.request_id] += len(output.token_ids)
        for events in report.events:
            if isinstance(events, EventSnapshot):
                self._router.restart(replica, events)
            else:
                self._router.take(replica, events)
        for request_id in report.settled:
            self._router.end(request_id, self._num_output.pop(request_id, None))

    def needs_snapshot(self, replica: str) -> bool:
        """Whether events of the replica's cache were missed, or none has arrived."""
        return self._router.index.needs_snapshot(replica)

    def choose(self, request: Request) -> str | None:
        """The replica that is to run the request; None without replicas.

        The request counts as the replica's load until a report says that it has settled.
        """
        params = request.params
        replica = self._router.choose(
            request.request_id,
            request.token_ids.astype(np.int32, copy=False).tobytes(),
            params.namespace,
            max_output=params.max_tokens,
            session=request.session,
        )
        if replica is not None:
            self._num_output[request.request_id] = 0
        return replica

    def best(self, token_ids: IntArray, namespace: str) -> str | None:
        """The replica that has cached most of the tokens; None without replicas."""
        return self._router.best(token_ids.astype(np.int32, copy=False).tobytes(), namespace)

    def of_session(self, session: str) -> str | None:
        return self._router.of_session(session)

    def close_session(self, session: str) -> None:
        self._router.close_session(session)
