"""`ReplicaRequestRouter`: Ray Serve's side of the routing."""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from radixserve.cluster import frontends


class ReplicaRequestRouter(RequestRouter):
    """Calls go to the replica that they name; who is there is told to the process's frontends."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        names = [one.replica_id.unique_id for one in replicas]
        frontends.note(self._deployment_id.app_name, names)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """One that has gone is not waited for: another one says so."""
        name = pending_request.args[0] if pending_request is not None else ""
        named = [one for one in candidate_replicas if one.replica_id.unique_id == name]
        return [named or candidate_replicas]
